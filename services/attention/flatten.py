"""A step plan becomes tensors: all pieces in one flat row dimension, without padding (ExpertFlow 4.2).

Legend: T rows of the step, R rows whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from services.attention.plan import Piece, StepPlan
from services.model.inputs import SequenceRows, StepInputs


def step_inputs(plan: StepPlan, block_size: int, device: torch.device) -> StepInputs:
    """The rows of ``plan``. Wanted logits: of each piece that draws its last row, then the rows that score prompts."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    sequences: list[SequenceRows] = []
    draws: list[int] = []
    scores: list[int] = []
    for piece in plan.pieces:
        first = len(token_ids)
        sequences.append(SequenceRows(start=first, length=piece.length, kv_len=piece.end, blocks=piece.state.blocks))
        token_ids += piece.state.token_ids[piece.start : piece.end]
        positions += range(piece.start, piece.end)
        slots += _slots(piece, block_size)
        if piece.draws:
            draws.append(first + piece.length - 1)
        scores += (first + position - 1 - piece.start for position in piece.scored)
    rows_4T = (token_ids, positions, slots, draws + scores)
    token_ids_T, positions_T, slots_T, logits_rows_R = (
        torch.tensor(rows, dtype=torch.int64, device=device) for rows in rows_4T
    )
    return StepInputs(
        token_ids_T=token_ids_T,
        positions_T=positions_T,
        slots_T=slots_T,
        sequences=tuple(sequences),
        logits_rows_R=logits_rows_R,
    )


def _slots(piece: Piece, block_size: int) -> Iterator[int]:
    blocks = piece.state.blocks
    for position in range(piece.start, piece.end):
        yield blocks[position // block_size] * block_size + position % block_size
