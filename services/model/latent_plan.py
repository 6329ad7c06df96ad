"""Plans multi-head latent attention of a step: which rows read latents as they lie in the cache, each by itself, and
which are pieces of prompts (the forms are those of :mod:`services.model.latent_attention`).

Legend: S sequences, B rows that are computed each by itself, M blocks of a sequence, at most, W rows of a piece, L
positions that it reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from services.model.inputs import PagedRows, StepInputs
from services.model.length_groups import group_by_length
from services.model.spec import LatentSpec
from services.model.transfer import upload
from services.model.work_lists import sequences_of

FEW = 32
"""Rows of a piece that a GPU takes one by one whatever they read: a piece by itself takes several launches."""
_CALL_COST_ELEMENTS = 65_536
"""Cost of one more call for rows on a CPU, in numbers read, as of :mod:`services.model.paged_attention`."""
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentRows:
    """Rows that see the first ``kv_len_B`` positions of their sequences, in the blocks ``blocks_BM``. ``rows_B`` None:
    all rows of the step, in order. ``kv_len_B`` 0: of no sequence."""

    rows_B: Tensor | None
    kv_len_B: Tensor
    blocks_BM: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentPiece:
    """The rows ``start .. start + length`` of one sequence. ``blocks_M`` None: they see only each other, row w those up
    to its own. Otherwise they see the first L positions of these blocks, as ``mask_WL`` says. ``absorbed``: in the form
    that reads latents as they are."""

    start: int
    length: int
    kv_len: int
    absorbed: bool = False
    blocks_M: Tensor | None = None
    mask_WL: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentPlan:
    """The calls of a layer: on a GPU one of all rows that read latents as they are, elsewhere one for decodes of
    similar length; and one for each other piece of a prompt."""

    rows: tuple[LatentRows, ...]
    pieces: tuple[LatentPiece, ...]


class LatentPlanner:
    """Builds :class:`LatentPlan`."""

    def __init__(self, latent: LatentSpec, *, block_size: int, device: torch.device) -> None:
        self._latent, self._block_size, self._device = latent, block_size, device
        self._on_cpu = device.type == "cpu"
        self._call_cost_blocks = _CALL_COST_ELEMENTS / (latent.size * block_size)

    def plan(self, inputs: StepInputs) -> LatentPlan:
        paged = inputs.paged
        if paged is not None:
            assert isinstance(paged, PagedRows), "pieces of prompts have no graph"
            rows = LatentRows(rows_B=None, kv_len_B=paged.kv_len_B, blocks_BM=paged.blocks_BM)
            return LatentPlan(rows=(rows,), pieces=())
        rows_S, kv_len_S, table_SM = sequences_of(inputs, self._block_size)
        absorbed_S = np.array([self._absorbs(*sizes) for sizes in zip(rows_S.tolist(), kv_len_S.tolist(), strict=True)])
        alone_S = (rows_S == 1) if self._on_cpu else absorbed_S
        return LatentPlan(
            rows=tuple(self._rows(rows_S, kv_len_S, table_SM, np.flatnonzero(alone_S))),
            pieces=tuple(
                self._piece(int(start), int(length), int(kv_len), table_M, absorbed=bool(absorbed))
                for start, length, kv_len, table_M, absorbed, alone in zip(
                    np.cumsum(rows_S) - rows_S, rows_S, kv_len_S, table_SM, absorbed_S, alone_S, strict=True
                )
                if not alone
            ),
        )

    def _absorbs(self, rows: int, positions: int) -> bool:
        """Return which form takes fewer products of a head; beyond what both need."""
        if rows == 1 or (rows <= FEW and not self._on_cpu):
            return True
        latent = self._latent
        head = latent.plain + latent.value
        absorbed = rows * positions * (latent.rank + latent.size) + rows * latent.rank * head
        return absorbed < rows * positions * (head + latent.rotated) + positions * latent.rank * head

    def _rows(self, rows_S: Ints, kv_len_S: Ints, table_SM: NDArray[np.int32], chosen: Ints) -> Iterator[LatentRows]:
        """Yield the rows of the sequences ``chosen``, each with what it sees."""
        sequence_B = np.repeat(chosen, rows_S[chosen])
        inside_B = np.arange(len(sequence_B)) - np.repeat(np.cumsum(rows_S[chosen]) - rows_S[chosen], rows_S[chosen])
        row_B = (np.cumsum(rows_S) - rows_S)[sequence_B] + inside_B
        kv_len_B = (kv_len_S - rows_S + 1)[sequence_B] + inside_B
        for group in self._groups(kv_len_B):
            width = -(-int(kv_len_B[group].max()) // self._block_size)
            yield LatentRows(
                rows_B=None if len(group) == rows_S.sum() else upload(row_B[group], self._device),
                kv_len_B=upload(kv_len_B[group].astype(np.int32), self._device),
                blocks_BM=upload(np.ascontiguousarray(table_SM[sequence_B[group], :width]), self._device),
            )

    def _groups(self, kv_len_B: Ints) -> Iterator[Ints]:
        if self._on_cpu:
            yield from group_by_length(-(-kv_len_B // self._block_size), self._call_cost_blocks)
        elif len(kv_len_B):
            yield np.arange(len(kv_len_B))

    def _piece(
        self, start: int, length: int, kv_len: int, table_M: NDArray[np.int32], *, absorbed: bool
    ) -> LatentPiece:
        if kv_len == length:
            return LatentPiece(start=start, length=length, kv_len=kv_len, absorbed=absorbed)
        blocks = table_M[: -(-kv_len // self._block_size)].astype(np.int64)
        if self._on_cpu:
            mask = torch.ones(length, kv_len, dtype=torch.bool).tril(kv_len - length)
        else:
            mask = causal_lower_right(length, kv_len)  # which torch's kernels know without a mask in memory
        return LatentPiece(
            start=start, length=length, kv_len=kv_len, absorbed=absorbed,
            blocks_M=upload(blocks, self._device), mask_WL=mask,
        )  # fmt: skip
