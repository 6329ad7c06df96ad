"""Rows on their way between ranks: chosen by the next hop, packed for it, unpacked there, and summed on the way back.

Legend: N rows of a batch, D hidden size, K slots per row, M rows of a message, P pairs of a row and a slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.fabric.lockstep.gloo import Messages

SLOT_BYTES = 8
"""Of a slot in a message: its expert's place, int32, and its weight, float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Rows with what each of their slots wants. ``places_NK``: int64, which held expert; -1 wants nothing."""

    x_ND: Tensor
    places_NK: Tensor
    weights_NK: Tensor

    def __len__(self) -> int:
        return len(self.x_ND)

    def empty(self) -> Batch:
        return Batch(x_ND=self.x_ND[:0], places_NK=self.places_NK[:0], weights_NK=self.weights_NK[:0])


@dataclass(frozen=True, slots=True)
class Hop:
    """Which rows of a batch went to each peer: their outputs come back in this order."""

    rows_of: Mapping[int, Tensor]

    def sizes(self, row_bytes: int) -> dict[int, int]:
        """Bytes that come back from each peer."""
        return {peer: len(rows_M) * row_bytes for peer, rows_M in self.rows_of.items()}

    def add(self, y_ND: Tensor, answers: Mapping[int, Tensor], dtype: torch.dtype) -> None:
        """Add what came back, bytes of rows in ``dtype``, to the float32 ``y_ND``; peers in ascending order."""
        for peer in sorted(answers):
            answer_MD = answers[peer].view(dtype).view(-1, y_ND.shape[1])
            y_ND.index_add_(0, self.rows_of[peer], answer_MD.float())


def forward_rows(batch: Batch, next_NK: Tensor, peers: Sequence[int]) -> tuple[Hop, Messages]:
    """One message per peer: each row that wants it once, with the slots that do. ``next_NK``: next hop of a slot."""
    rows_of, messages = {}, {}
    for peer in peers:
        here_NK = next_NK == peer
        rows_M = rows_of[peer] = here_NK.any(1).nonzero().squeeze(1)
        here_MK = here_NK[rows_M]
        places_MK = torch.where(here_MK, batch.places_NK[rows_M], -1).int()
        messages[peer] = (places_MK, batch.weights_NK[rows_M].float(), batch.x_ND[rows_M])
    return Hop(rows_of), messages


def room_for(rows: int, like: Batch) -> int:
    """Bytes of a message of at most ``rows`` rows."""
    return rows * _row_bytes(like)


def received(messages: Mapping[int, Tensor], like: Batch) -> tuple[Batch, list[tuple[int, int]]]:
    """All rows that came, by sender ascending, and (sender, rows) of each. ``like``: their width, slots and dtype."""
    parts = [(peer, _unpacked(messages[peer], like)) for peer in sorted(messages)]
    origins = [(peer, len(part)) for peer, part in parts]
    return joined([part for _, part in parts], like), origins


def joined(parts: Sequence[Batch], like: Batch) -> Batch:
    if not parts:
        return like.empty()
    if len(parts) == 1:
        return parts[0]
    return Batch(
        x_ND=torch.cat([part.x_ND for part in parts]),
        places_NK=torch.cat([part.places_NK for part in parts]),
        weights_NK=torch.cat([part.weights_NK for part in parts]),
    )


def answers(y_ND: Tensor, origins: Sequence[tuple[int, int]], dtype: torch.dtype) -> Messages:
    """Outputs to those that the rows came from, in ``dtype``."""
    parts = y_ND.to(dtype).split_with_sizes([rows for _, rows in origins])
    return {peer: (part,) for (peer, _), part in zip(origins, parts, strict=True)}


def pairs(batch: Batch) -> tuple[Batch, Tensor]:
    """Every slot that wants something as a row of its own with weight 1, and ``index_P`` into the N x K slots."""
    index_P = (batch.places_NK >= 0).flatten().nonzero().squeeze(1)
    slots = batch.places_NK.shape[1]
    places_P1 = batch.places_NK.flatten()[index_P].unsqueeze(1)
    weights_P1 = torch.ones(places_P1.shape, dtype=torch.float32, device=places_P1.device)
    x_PD = batch.x_ND[index_P // slots] if slots else batch.x_ND[:0]
    return Batch(x_ND=x_PD, places_NK=places_P1, weights_NK=weights_P1), index_P


def slot_sum(out_SD: Tensor, present_S: Tensor, weights_NK: Tensor, dtype: torch.dtype) -> Tensor:
    """``y_ND`` from unweighted outputs by slot: float32, slot 0 first, rounded once.

    That is how :func:`moe_kernels.fused_moe` adds on a CPU, to the last bit.

    Args:
        out_SD: [N x K, D]; rows of absent slots may hold anything.
    """
    rows, slots = weights_NK.shape
    out_NKD, present_NK = out_SD.view(rows, slots, out_SD.shape[1]), present_S.view(rows, slots)
    y_ND = torch.zeros(rows, out_SD.shape[1], dtype=torch.float32, device=out_SD.device)
    for slot in range(slots):
        weighted_ND = out_NKD[:, slot] * weights_NK[:, slot : slot + 1]
        weighted_ND = torch.where(present_NK[:, slot : slot + 1], weighted_ND, 0)
        y_ND = y_ND + weighted_ND if slot else weighted_ND.float()
    return y_ND.to(dtype)


def _row_bytes(like: Batch) -> int:
    return like.places_NK.shape[1] * SLOT_BYTES + like.x_ND.shape[1] * like.x_ND.element_size()


def _unpacked(message: Tensor, like: Batch) -> Batch:
    rows, slots = len(message) // _row_bytes(like), like.places_NK.shape[1]
    places, weights, x = message.split_with_sizes(
        [rows * slots * 4, rows * slots * 4, len(message) - rows * slots * SLOT_BYTES]
    )
    return Batch(
        x_ND=x.view(like.x_ND.dtype).view(rows, like.x_ND.shape[1]),
        places_NK=places.view(torch.int32).view(rows, slots).long(),
        weights_NK=weights.view(torch.float32).view(rows, slots),
    )
