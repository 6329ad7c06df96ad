"""Packs rows for the next rank on their way, unpacks them there, and sums outputs on the way back.

Legend: N rows of a batch, D hidden size, K slots per row, M rows of a message, P pairs of a row and a slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.fabric.lockstep.gloo import Messages

SLOT_BYTES = 8
"""Bytes of a slot in a message: the place of its expert, int32, and its weight, float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Rows and the place of each slot's expert, int64, with -1 for none; weights are float32."""

    x_ND: Tensor
    places_NK: Tensor
    weights_NK: Tensor

    def __len__(self) -> int:
        return len(self.x_ND)


@dataclass(frozen=True, slots=True)
class Hop:
    """Peer -> indices of the batch's rows that went there; their outputs come back in this order."""

    rows_of: Mapping[int, Tensor]

    def sizes(self, row_bytes: int) -> dict[int, int]:
        """Return the bytes that come back from each peer."""
        return {peer: len(rows_M) * row_bytes for peer, rows_M in self.rows_of.items()}

    def add(self, y_ND: Tensor, answers: Mapping[int, Tensor], dtype: torch.dtype) -> None:
        """Add ``answers``, bytes of rows in ``dtype``, to the float32 ``y_ND``, peers in ascending order."""
        for peer in sorted(answers):
            answer_MD = answers[peer].view(dtype).view(-1, y_ND.shape[1])
            y_ND.index_add_(0, self.rows_of[peer], answer_MD.float())


def forward_rows(batch: Batch, next_NK: Tensor, peers: Sequence[int]) -> tuple[Hop, Messages]:
    """Make one message per peer: each row with a slot for it once, with those slots. ``next_NK``: peer of a slot."""
    rows_of, messages = {}, {}
    for peer in peers:
        here_NK = next_NK == peer
        rows_M = rows_of[peer] = here_NK.any(1).nonzero().squeeze(1)
        here_MK = here_NK[rows_M]
        places_MK = torch.where(here_MK, batch.places_NK[rows_M], -1).int()
        messages[peer] = (places_MK, batch.weights_NK[rows_M].float(), batch.x_ND[rows_M])
    return Hop(rows_of), messages


def room_for(rows: int, like: Batch) -> int:
    """Return the bytes of a message of ``rows`` rows with the width, slots and dtype of ``like``."""
    return rows * (like.places_NK.shape[1] * SLOT_BYTES + like.x_ND.shape[1] * like.x_ND.element_size())


def received(messages: Mapping[int, Tensor], like: Batch) -> tuple[Batch, list[tuple[int, int]]]:
    """Return all rows that came, by sender ascending, and (sender, number of rows); ``like`` has their format."""
    parts = [(peer, _unpacked(messages[peer], like)) for peer in sorted(messages)]
    origins = [(peer, len(part)) for peer, part in parts]
    return joined([part for _, part in parts], like), origins


def joined(parts: Sequence[Batch], like: Batch) -> Batch:
    """Return the rows of ``parts``, one after the other; an empty batch has the format of ``like``."""
    if not parts:
        return Batch(x_ND=like.x_ND[:0], places_NK=like.places_NK[:0], weights_NK=like.weights_NK[:0])
    if len(parts) == 1:
        return parts[0]
    return Batch(
        x_ND=torch.cat([part.x_ND for part in parts]),
        places_NK=torch.cat([part.places_NK for part in parts]),
        weights_NK=torch.cat([part.weights_NK for part in parts]),
    )


def answers(y_ND: Tensor, origins: Sequence[tuple[int, int]], dtype: torch.dtype) -> Messages:
    """Return the messages that bring outputs, in ``dtype``, to where their rows came from."""
    parts = y_ND.to(dtype).split_with_sizes([rows for _, rows in origins])
    return {peer: (part,) for (peer, _), part in zip(origins, parts, strict=True)}


def pairs(batch: Batch) -> tuple[Batch, Tensor]:
    """Return every slot with a place as a row of its own with weight 1, and ``index_P`` into the N x K slots."""
    index_P = (batch.places_NK >= 0).flatten().nonzero().squeeze(1)
    slots = batch.places_NK.shape[1]
    places_P1 = batch.places_NK.flatten()[index_P].unsqueeze(1)
    weights_P1 = torch.ones(places_P1.shape, dtype=torch.float32, device=places_P1.device)
    x_PD = batch.x_ND[index_P // slots] if slots else batch.x_ND[:0]
    return Batch(x_ND=x_PD, places_NK=places_P1, weights_NK=weights_P1), index_P


def _unpacked(message: Tensor, like: Batch) -> Batch:
    rows, slots = len(message) // room_for(1, like), like.places_NK.shape[1]
    places, weights, x = message.split_with_sizes(
        [rows * slots * 4, rows * slots * 4, len(message) - rows * slots * SLOT_BYTES]
    )
    return Batch(
        x_ND=x.view(like.x_ND.dtype).view(rows, like.x_ND.shape[1]),
        places_NK=places.view(torch.int32).view(rows, slots).long(),
        weights_NK=weights.view(torch.float32).view(rows, slots),
    )
