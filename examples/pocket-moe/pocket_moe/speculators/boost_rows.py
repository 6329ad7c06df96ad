"""A split's text in, packed rows with the target model's greedy token at every position out: what speculators learn.

Legend: R rows, L positions of a row, B rows of a batch, P tokens of a prompt, G generated tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from pocket_moe.corpus.batches import Batch
from pocket_moe.corpus.packing import cut, pack
from pocket_moe.corpus.shards import Shards
from pocket_moe.errors import PocketError
from pocket_moe.model.losses import NO_TARGET, next_tokens
from pocket_moe.model.model import PocketMoe

_LOGIT_ROWS = 8192
"""How many rows of logits are there at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledRows:
    """int16 ``[R, L]`` each, on the device that computes. ``labels_RL`` is the target's most likely next token where
    the document goes on, else -100."""

    tokens_RL: Tensor
    positions_RL: Tensor
    labels_RL: Tensor

    def __len__(self) -> int:
        return len(self.tokens_RL)

    def take(self, index: Tensor) -> LabelledRows:
        return LabelledRows(
            tokens_RL=self.tokens_RL[index], positions_RL=self.positions_RL[index], labels_RL=self.labels_RL[index]
        )

    def join(self, other: LabelledRows) -> LabelledRows:
        return LabelledRows(
            tokens_RL=torch.cat([self.tokens_RL, other.tokens_RL]),
            positions_RL=torch.cat([self.positions_RL, other.positions_RL]),
            labels_RL=torch.cat([self.labels_RL, other.labels_RL]),
        )

    def chunks(self, rows: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Which rows, their int64 tokens and positions."""
        for first in range(0, len(self), rows):
            part = slice(first, first + rows)
            yield part, self.tokens_RL[part].long(), self.positions_RL[part].long()


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """How the target goes on from the beginning of a document: ``new`` of its tokens after ``prompt``, in rows of
    ``length``."""

    prompt: int = 16
    new: int = 48
    length: int = 512


class WeightedSource:
    """Batches of labelled rows, each epoch in another order; ``weights_RL`` says how much each position counts."""

    def __init__(self, rows: LabelledRows, weights_RL: Tensor, *, batch_rows: int, seed: int) -> None:
        if len(rows) < batch_rows:
            raise PocketError(
                f"There are {len(rows)} rows of text, fewer than the {batch_rows} of a batch.",
                hint="Pass a smaller --rows.",
            )
        self._rows, self._weights_RL, self._batch_rows, self._seed = rows, weights_RL, batch_rows, seed
        self.per_epoch = len(rows) // batch_rows
        # One bound for all batches: a captured step keeps its shapes.
        documents = (rows.positions_RL == 0).sum(1).sort(descending=True).values[:batch_rows].sum()
        self._most_documents = int(documents)
        self._order: tuple[int, Tensor] | None = None

    def batch(self, step: int) -> Batch:
        epoch, index = divmod(step, self.per_epoch)
        chosen = self._order_of(epoch)[index * self._batch_rows : (index + 1) * self._batch_rows]
        part = self._rows.take(chosen)
        return Batch(
            tokens_BL=part.tokens_RL.long(),
            positions_BL=part.positions_RL.long(),
            targets_BL=part.labels_RL.long(),
            weights_BL=self._weights_RL[chosen].float(),
            most_documents=self._most_documents,
        )

    def _order_of(self, epoch: int) -> Tensor:
        if self._order is None or self._order[0] != epoch:
            order = np.random.default_rng([self._seed, epoch]).permutation(len(self._rows))
            self._order = epoch, torch.from_numpy(order).to(self._rows.tokens_RL.device)
        return self._order[1]


def pack_documents(shards: Shards, documents: NDArray[np.int64], length: int, *, pad_id: int) -> LabelledRows:
    """On the CPU, and without labels yet: all -100."""
    pieces = cut(shards.starts[documents], np.diff(shards.starts)[documents], length, None)
    packed = pack(shards.tokens, pieces, length, pad_id=pad_id)
    tokens_RL, positions_RL = torch.from_numpy(packed.tokens), torch.from_numpy(packed.positions)
    return LabelledRows(tokens_RL=tokens_RL, positions_RL=positions_RL, labels_RL=torch.full_like(tokens_RL, NO_TARGET))


def label(target: PocketMoe, rows: LabelledRows, *, batch_rows: int) -> LabelledRows:
    """``rows`` on the target's device, with what the target itself would say after each token of the text."""
    device, pad_id = target.embedding.device, target.config.pad_token_id
    rows = LabelledRows(
        tokens_RL=rows.tokens_RL.to(device),
        positions_RL=rows.positions_RL.to(device),
        labels_RL=rows.labels_RL.to(device),
    )
    for part, tokens_BL, positions_BL in rows.chunks(batch_rows):
        follows_BL = next_tokens(tokens_BL, positions_BL, pad_id=pad_id) != NO_TARGET
        best_BL = best_tokens(target, tokens_BL, positions_BL, 1).squeeze(2)
        rows.labels_RL[part] = torch.where(follows_BL, best_BL, NO_TARGET).to(torch.int16)
    return rows


@torch.no_grad()
def best_tokens(model: PocketMoe, tokens_BL: Tensor, positions_BL: Tensor, count: int) -> Tensor:
    """``[B, L, count]`` int64: the most likely next tokens, best first."""
    x_TD = model.hidden(tokens_BL, positions_BL).flatten(0, 1)
    best = [_best(model.logits(x_CD), count) for x_CD in torch.split(x_TD, _LOGIT_ROWS)]
    return torch.cat(best).view(*tokens_BL.shape, count)


@torch.no_grad()
def continue_rows(target: PocketMoe, prompts_BP: Tensor, new: int) -> Tensor:
    """``[B, P + new]`` int64: greedy continuations, padding behind the end token. Prompts are of one length.

    Every step computes all tokens anew: for short texts that costs less than the code of a cache.
    """
    config = target.config
    tokens_BL = F.pad(prompts_BP, (0, new), value=config.pad_token_id)
    ended_B = torch.zeros(len(prompts_BP), dtype=torch.bool, device=prompts_BP.device)
    for position in range(prompts_BP.shape[1], tokens_BL.shape[1]):
        next_B = target.logits(target.hidden(tokens_BL[:, :position])[:, -1]).argmax(1)
        tokens_BL[:, position] = torch.where(ended_B, config.pad_token_id, next_B)
        ended_B |= next_B == config.eos_token_id
    return tokens_BL


def continuations(
    target: PocketMoe, shards: Shards, documents: NDArray[np.int64], shape: Written, *, batch_rows: int
) -> LabelledRows:
    """Beginnings of documents, each with the target's own words behind it, ``batch_rows`` texts at a time; labelled
    from the beginning's last token on. Documents that are no longer than a beginning are left out."""
    device, size = target.embedding.device, shape.prompt + shape.new
    documents = documents[np.diff(shards.starts)[documents] > shape.prompt]
    place_BP = shards.starts[documents][:, None] + np.arange(shape.prompt)
    prompts_BP = torch.from_numpy(shards.tokens[place_BP].astype(np.int64)).to(device)
    texts = [
        continue_rows(target, part_BP, shape.new) for part_BP in torch.split(prompts_BP, batch_rows) if len(part_BP)
    ]
    rows = _side_by_side(texts, size, shape.length, target.config.pad_token_id, device)
    rows = label(target, rows, batch_rows=max(1, batch_rows * size // shape.length))
    rows.labels_RL[rows.positions_RL < shape.prompt - 1] = NO_TARGET
    return rows


def _side_by_side(texts: list[Tensor], size: int, length: int, pad_id: int, device: torch.device) -> LabelledRows:
    """Texts of one size as the documents of rows; each row's end is padding, a document of its own."""
    per_row = length // size
    assert per_row >= 1, "a text fits a row"
    texts_NS = torch.cat(texts) if texts else torch.empty(0, size, dtype=torch.int64, device=device)
    texts_NS = F.pad(texts_NS, (0, 0, 0, -len(texts_NS) % per_row), value=pad_id)
    tokens_RL = F.pad(texts_NS.view(-1, per_row * size), (0, length - per_row * size), value=pad_id)
    positions_L = torch.arange(length, device=device)
    positions_L = torch.where(positions_L < per_row * size, positions_L % size, positions_L - per_row * size)
    return LabelledRows(
        tokens_RL=tokens_RL.to(torch.int16),
        positions_RL=positions_L.to(torch.int16).expand(tokens_RL.shape).clone(),
        labels_RL=torch.full_like(tokens_RL, NO_TARGET, dtype=torch.int16),
    )


def _best(logits_CV: Tensor, count: int) -> Tensor:
    return logits_CV.argmax(1, keepdim=True) if count == 1 else logits_CV.topk(count, dim=1).indices
