"""A step plan becomes tensors: all pieces in one flat row dimension, without padding (ExpertFlow 4.2).

Decoding sequences, hundreds in a step, are handled together as arrays; pieces of prompts one by one.
Legend: T rows of the step, R rows whose logits are wanted, B decoding sequences, M blocks per sequence.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.attention.sequences.plan import Piece, StepPlan
from services.attention.sequences.sequence import SequenceState
from services.attention.step.block_table import BlockTable
from services.model.inputs import DecodeRows, SequenceRows, StepInputs
from services.model.transfer import upload


class Flattener:
    """One per engine: it keeps the decoding sequences' blocks from step to step."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._table = BlockTable(block_size)
        self._every_row = torch.empty(0, dtype=torch.int64)
        self._states: tuple[SequenceState, ...] = ()
        self._position_B = _array(())

    def of(self, plan: StepPlan, after_B: Tensor | None = None) -> StepInputs:
        """The rows of ``plan``. Wanted logits: of what draws its last row each, then the rows that score prompts.

        Args:
            after_B: tokens on the device that ``plan.decodes`` do not know yet. Then the step is the one after that
                which draws them, asked for last, and each sequence is one token further than it says.
        """
        states, size = plan.decodes, self._block_size
        token_ids = [] if after_B is not None else [state.token_ids[-1] for state in states]
        position_B = self._positions(states, ahead=after_B is not None)
        blocks_BM = self._table.rows(states, position_B)
        slot_B = blocks_BM[np.arange(len(states)), position_B // size] * size + position_B % size
        positions, slots = list[int](), list[int]()
        sequences: list[SequenceRows] = []
        draws, scores = list(range(len(states))) if plan.prompts else [], list[int]()
        for piece in plan.prompts:
            first = len(token_ids)
            blocks = piece.state.blocks
            sequences.append(SequenceRows(start=first, length=piece.length, kv_len=piece.end, blocks=blocks))
            token_ids += piece.state.token_ids[piece.start : piece.end]
            positions += range(piece.start, piece.end)
            slots += _slots(piece, size)
            if piece.draws:
                draws.append(first + piece.length - 1)
            scores += (first + position - 1 - piece.start for position in piece.scored)
        position_T, slot_T = _joined(position_B, positions), _joined(slot_B, slots)
        if after_B is None:
            token_ids_T, positions_T, slots_T = self._tensors(_array(token_ids), position_T, slot_T)
        else:
            token_ids_T, (positions_T, slots_T) = after_B, self._tensors(position_T, slot_T)
        return StepInputs(
            token_ids_T=token_ids_T,
            positions_T=positions_T,
            slots_T=slots_T,
            sequences=tuple(sequences),
            logits_rows_R=upload(_array(draws + scores), self._device)
            if plan.prompts
            else self._first_rows(len(states)),
            decodes=DecodeRows(kv_len_B=position_B + 1, blocks_BM=blocks_BM) if states else None,
        )

    def _first_rows(self, count: int) -> Tensor:
        """``0 .. count``, made once."""
        if count > len(self._every_row):
            self._every_row = torch.arange(2 * count, dtype=torch.int64, device=self._device)
        return self._every_row[:count]

    def _positions(self, states: tuple[SequenceState, ...], *, ahead: bool) -> NDArray[np.int64]:
        if ahead and states is self._states:
            self._position_B = self._position_B + 1
        else:
            self._states, self._position_B = states, _array([len(state.token_ids) - 1 + ahead for state in states])
        return self._position_B

    def _tensors(self, *rows: NDArray[np.int64]) -> tuple[Tensor, ...]:
        """Arrays of one length, in one copy."""
        return upload(np.stack(rows), self._device).unbind()


def _array(values: Sequence[int]) -> NDArray[np.int64]:
    """By way of an array: numpy and torch take several times longer for a list."""
    return np.frombuffer(array("q", values), dtype=np.int64) if values else np.empty(0, dtype=np.int64)


def _joined(values_B: NDArray[np.int64], more: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate((values_B, _array(more))) if more else values_B


def _slots(piece: Piece, block_size: int) -> Iterator[int]:
    blocks = piece.state.blocks
    for position in range(piece.start, piece.end):
        yield blocks[position // block_size] * block_size + position % block_size
