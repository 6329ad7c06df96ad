"""A training step's number in, its batch out: always the same, whatever ran before.

Each epoch draws documents by domain, packs them anew and lies on the device as a whole; the next one is packed
meanwhile. Legend: B rows, L positions of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pocket_moe.config import POCKET
from pocket_moe.corpus.packing import Rows, cut, pack
from pocket_moe.corpus.shards import Shards
from pocket_moe.errors import PocketError


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """int64 tokens and positions. ``targets_BL`` int64 (-100: none) instead of the next tokens; ``weights_BL`` float32
    weighs tokens in the loss; ``most_documents`` bounds how many documents there are, for attention by document."""

    tokens_BL: Tensor
    positions_BL: Tensor
    targets_BL: Tensor | None = None
    weights_BL: Tensor | None = None
    most_documents: int | None = None


class Source(Protocol):
    """Batches of one shape by number. What the trainer needs of its data."""

    def batch(self, step: int) -> Batch: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSettings:
    """``weights``: how many times an epoch holds a domain's documents, 1 where it is not named; fractions draw."""

    rows: int = 64
    length: int = POCKET.max_position_embeddings
    seed: int = 0
    weights: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True, kw_only=True, slots=True)
class _Epoch:
    tokens: Tensor
    positions: Tensor
    most_documents: int


class Batches:
    """A :class:`Source` over a split's shards. Close it, or use it as a context manager."""

    def __init__(self, shards: Shards, settings: BatchSettings, device: torch.device, *, pad_id: int) -> None:
        self._shards, self._settings, self._device, self._pad_id = shards, settings, device, pad_id
        self._repeats = _repeats(shards.meta.domains, settings.weights)[shards.domain]
        tokens = float((np.diff(shards.starts) * self._repeats).sum())
        # Packing only adds rows, so an epoch has at least that many steps; the few rows over are left out.
        self.per_epoch = max(1, int(tokens // settings.tokens))
        self._packer = ThreadPoolExecutor(1, thread_name_prefix="pack")
        self._packed: dict[int, Future[Rows]] = {}
        self._current: tuple[int, _Epoch] | None = None
        self._most_documents = 0

    def batch(self, step: int) -> Batch:
        """Batch ``step`` of the run, counted from 0."""
        number, index = divmod(step, self.per_epoch)
        epoch = self._epoch(number)
        rows = slice(index * self._settings.rows, (index + 1) * self._settings.rows)
        return Batch(
            tokens_BL=epoch.tokens[rows].long(),
            positions_BL=epoch.positions[rows].long(),
            most_documents=epoch.most_documents,
        )

    def close(self) -> None:
        self._packer.shutdown(cancel_futures=True)

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _epoch(self, number: int) -> _Epoch:
        if self._current is None or self._current[0] != number:
            rows = self._pack_later(number).result()
            self._packed = {}
            self._current = number, self._load(rows)
            self._pack_later(number + 1)
        return self._current[1]

    def _pack_later(self, number: int) -> Future[Rows]:
        if number not in self._packed:
            self._packed[number] = self._packer.submit(self._pack, number)
        return self._packed[number]

    def _pack(self, number: int) -> Rows:
        """An epoch's rows in their order; if chance drew too few documents, some rows come twice."""
        rng = np.random.default_rng([self._settings.seed, number])
        document = np.repeat(np.arange(len(self._repeats)), _drawn(self._repeats, rng))
        rng.shuffle(document)
        starts, row = self._shards.starts, self._settings.length
        pieces = cut(starts[document], np.diff(starts)[document], row, rng)
        packed = pack(self._shards.tokens, pieces, row, pad_id=self._pad_id)
        order = np.resize(rng.permutation(len(packed.tokens)), self.per_epoch * self._settings.rows)
        return Rows(tokens=packed.tokens[order], positions=packed.positions[order])

    def _load(self, rows: Rows) -> _Epoch:
        documents = (rows.positions == 0).sum(1).reshape(self.per_epoch, -1).sum(1).max()
        # Never fewer than before, and powers of two: a captured graph keeps its shapes.
        self._most_documents = max(self._most_documents, 1 << int(documents - 1).bit_length())
        tokens, positions = (torch.from_numpy(x).to(self._device) for x in (rows.tokens, rows.positions))
        return _Epoch(tokens=tokens, positions=positions, most_documents=self._most_documents)


def _repeats(domains: tuple[str, ...] | list[str], weights: Mapping[str, float]) -> NDArray[np.float64]:
    """By domain.

    Raises:
        PocketError: a weight names no domain, or is negative, or all are 0.
    """
    unknown = sorted(set(weights) - set(domains))
    if unknown:
        raise PocketError(
            f"There is no domain {', '.join(unknown)} in the shards.", hint=f"There are {', '.join(domains)}."
        )
    repeats = np.array([weights.get(domain, 1.0) for domain in domains], np.float64)
    if (repeats < 0).any() or not repeats.any():
        raise PocketError("Domain weights must be 0 or more, and not all 0.", hint="Correct --weights.")
    return repeats


def _drawn(repeats: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.int64]:
    """How often each document comes: its weight, a fraction rounded up as often as it is large."""
    whole = np.floor(repeats)
    return (whole + (rng.random(len(repeats)) < repeats - whole)).astype(np.int64)
