"""Turns a step plan into tensors: all pieces in one flat row dimension, without padding (ExpertFlow 4.2).

Decoding sequences, hundreds in a step, are handled together as arrays; chains of drafts and pieces of prompts one by
one. The KV blocks of decodes are in a :class:`BlockTable`, which is kept from step to step: a step changes few of its
rows. For a step that runs as two micro-batches, :func:`split` cuts the tensors between two sequences.
Legend: T rows of the step, R rows whose logits are wanted, B decoding sequences, M blocks per sequence.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray
from torch import Tensor

from moe_kernels.paged_attention.trees import TreeRows
from services.attention.batching.state_slots import StateSlots
from services.attention.sequences.plan import Outcome, StepPlan
from services.attention.sequences.sequence import SequenceState
from services.attention.sequences.tree import TokenTree
from services.model.inputs import DecodeRows, SequenceRows, StateRows, StepInputs
from services.model.transfer import upload


class Flattener:
    """Flattens the plans of one engine, and keeps the decoding sequences' blocks from step to step. ``states`` gives
    out slots for recurrent states; None: the model has none."""

    def __init__(self, block_size: int, device: torch.device, states: StateSlots | None = None) -> None:
        self._block_size = block_size
        self._device = device
        self._state_slots = states
        self._table = BlockTable(block_size)
        self._every_row = torch.empty(0, dtype=torch.int64)
        self._states: tuple[SequenceState, ...] = ()
        self._position_B = _array(())

    def of(self, plan: StepPlan, after_B: Tensor | None = None) -> StepInputs:
        """Return rows of ``plan``. Logits are wanted of the rows that draw, then of those that score.

        Args:
            after_B: tokens on the device that ``plan.decodes`` do not know yet: ``plan`` follows the step that draws
                them, which was flattened last. Each sequence is then one token longer than it says.
        """
        states, size = plan.decodes, self._block_size
        assert after_B is None or len(after_B) == len(states)
        token_ids = [] if after_B is not None else [state.token_ids[-1] for state in states]
        first = len(states)
        position_B = self._positions(states, ahead=after_B is not None)
        blocks_BM = self._table.rows(states, position_B)
        slot_B = blocks_BM[np.arange(len(states)), position_B // size] * size + position_B % size
        position_parts, slot_parts = [position_B], [slot_B]
        sequences: list[SequenceRows] = []
        draws, scores = list(range(len(states))) if plan.prompts else [], list[int]()
        for piece in plan.pieces:
            blocks = piece.state.blocks
            tree = None if piece.tree is None else tree_rows(piece.tree)
            sequences.append(SequenceRows(start=first, length=piece.length, kv_len=piece.end, blocks=blocks, tree=tree))
            token_ids += piece.state.token_ids[piece.start : piece.end]
            token_ids += piece.drafts
            place_W = np.arange(piece.start, piece.end)
            position_parts.append(place_W if tree is None else piece.start + tree.depth_W)
            slot_parts.append(_slots(blocks, place_W, size))
            if piece.draws:
                draws += range(first + piece.length - 1 - len(piece.drafts), first + piece.length)
            scores += (first + position - 1 - piece.start for position in piece.scored)
            first += piece.length
        position_T, slot_T = _joined(position_parts), _joined(slot_parts)
        if after_B is None:
            token_ids_T, positions_T, slots_T = self._tensors(_array(token_ids), position_T, slot_T)
        else:
            token_ids_T, (positions_T, slots_T) = after_B, self._tensors(position_T, slot_T)
            if token_ids:
                token_ids_T = torch.cat((after_B, upload(_array(token_ids), self._device)))
        return StepInputs(
            token_ids_T=token_ids_T,
            positions_T=positions_T,
            slots_T=slots_T,
            sequences=tuple(sequences),
            logits_rows_R=upload(_array(draws + scores), self._device) if plan.prompts else self._first_rows(first),
            decodes=DecodeRows(kv_len_B=position_B + 1, blocks_BM=blocks_BM) if states else None,
            states=self._state_rows(plan),
        )

    def retract(self, plan: StepPlan) -> None:
        """Forget that rows of ``plan`` were given out: its sequences are going to run again, in other plans."""
        if self._state_slots is not None:
            self._state_slots.retract(plan)

    def _state_rows(self, plan: StepPlan) -> StateRows | None:
        if self._state_slots is None:
            return None
        slots = self._state_slots.launch(plan)
        read_S, write_S = self._tensors(_array(slots.read), _array(slots.write))
        return StateRows(read_S=read_S, write_S=write_S, kept=tuple(slots.kept))

    def _first_rows(self, count: int) -> Tensor:
        """Return the row numbers ``0 .. count``, from a tensor that is kept."""
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
        """Upload arrays of one length, in one copy."""
        return upload(np.stack(rows), self._device).unbind()


def _array(values: Sequence[int]) -> NDArray[np.int64]:
    """Make an array by way of :mod:`array`: numpy and torch take several times longer for a list."""
    return np.frombuffer(array("q", values), dtype=np.int64) if values else np.empty(0, dtype=np.int64)


def _joined(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def _slots(blocks: Sequence[int], place_W: NDArray[np.int64], block_size: int) -> NDArray[np.int64]:
    """Return the slots of places, which ascend, of a sequence with ``blocks``."""
    column_W = place_W // block_size
    used = _array(blocks[column_W[0] : column_W[-1] + 1])
    slots_W: NDArray[np.int64] = used[column_W - column_W[0]] * block_size + place_W % block_size
    return slots_W


def tree_rows(tree: TokenTree) -> TreeRows:
    """Return how the rows of ``tree`` see one another."""
    return TreeRows(depth_W=_array(tree.depths()), ancestors_W=np.array(tree.ancestors(), dtype=np.uint64))


def moves(plan: StepPlan, outcomes: Sequence[Outcome], block_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the slots of accepted drafts that are not in the slots of their positions, and those slots."""
    from_parts, to_parts = [_array(())], [_array(())]
    for chain, outcome in zip(plan.chains, outcomes[len(plan.decodes) :], strict=False):
        if chain.tree is None or not outcome.accepted or not chain.state.blocks:
            continue
        row_A, depth_A = _array(outcome.accepted), np.arange(1, 1 + len(outcome.accepted))
        from_parts.append(_slots(chain.state.blocks, chain.start + row_A, block_size)[row_A != depth_A])
        to_parts.append(_slots(chain.state.blocks, chain.start + depth_A, block_size)[row_A != depth_A])
    return _joined(from_parts), _joined(to_parts)


_SLACK = 16
"""Spare columns, so that the array seldom has to grow."""


class BlockTable:
    """KV blocks of the sequences that were asked for last, one row each."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._states: Sequence[SequenceState] = ()
        self._blocks_BM: NDArray[np.int64] = np.zeros((0, _SLACK), dtype=np.int64)

    def rows(self, states: Sequence[SequenceState], position_B: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return ``blocks_BM`` of ``states``, each filled up with repeats of its last block; valid until the next call.

        Args:
            position_B: position of the token that each computes now. A sequence that was in the step before has taken
                a block since only if this position is the first in a block. A second call for a step changes nothing.
        """
        if states is not self._states:
            self._adopt(states)
        for row in np.flatnonzero(position_B % self._block_size == 0).tolist():
            self._write(row, states[row].blocks, -1)
        return self._blocks_BM

    def _adopt(self, states: Sequence[SequenceState]) -> None:
        """Move the rows of sequences that stayed, and write those of the others."""
        row_of = {state: row for row, state in enumerate(self._states)}
        before = [row_of.get(state, -1) for state in states]
        longest = max((len(state.blocks) for state in states), default=0)
        width = min(self._blocks_BM.shape[1], longest + _SLACK)  # narrower again, when a long one has gone
        blocks_BM = np.zeros((len(states), width), dtype=np.int64)
        if row_of:
            blocks_BM[:] = self._blocks_BM[before, :width]
        self._states, self._blocks_BM = states, blocks_BM
        for row, old in enumerate(before):
            if old < 0:
                self._write(row, states[row].blocks, 0)

    def _write(self, row: int, blocks: Sequence[int], first: int) -> None:
        """Write ``blocks`` from ``first`` on into ``row``."""
        count, width = len(blocks), self._blocks_BM.shape[1]
        if count > width:
            self._blocks_BM = np.pad(self._blocks_BM, ((0, 0), (0, count + _SLACK - width)), mode="edge")
        start = first % count
        self._blocks_BM[row, start:count] = blocks[start:]
        self._blocks_BM[row, count:] = blocks[-1]


def split(inputs: StepInputs, at: int | None) -> tuple[StepInputs, ...]:
    """Cut ``inputs`` in two before the sequence ``at`` of ``inputs.sizes``; None: do not cut.

    Row numbers count within each part. The parts want no logits: those are taken from all rows, joined again.
    """
    if at is None:
        return (inputs,)
    first, second = _parts(inputs, at)
    if (states := inputs.states) is None:
        return first, second
    return replace(first, states=states.part(0, at)), replace(second, states=states.part(at, len(states.read_S)))


def _parts(inputs: StepInputs, at: int) -> tuple[StepInputs, StepInputs]:
    decodes = inputs.decodes
    if decodes is not None and at <= len(decodes):
        first = _part(inputs, slice(at), _cut(decodes, slice(at)), ())
        return first, _part(inputs, slice(at, None), _cut(decodes, slice(at, None)), inputs.sequences)
    number = at - (len(decodes) if decodes is not None else 0)
    row = inputs.sequences[number].start
    first = _part(inputs, slice(row), decodes, inputs.sequences[:number])
    return first, _part(inputs, slice(row, None), None, inputs.sequences[number:])


def _cut(decodes: DecodeRows, rows: slice) -> DecodeRows | None:
    kv_len_B = decodes.kv_len_B[rows]
    return DecodeRows(kv_len_B=kv_len_B, blocks_BM=decodes.blocks_BM[rows]) if len(kv_len_B) else None


def _part(
    inputs: StepInputs, rows: slice, decodes: DecodeRows | None, sequences: tuple[SequenceRows, ...]
) -> StepInputs:
    first_row = rows.start or 0
    return StepInputs(
        token_ids_T=inputs.token_ids_T[rows],
        positions_T=inputs.positions_T[rows],
        slots_T=inputs.slots_T[rows],
        sequences=tuple(structs.replace(one, start=one.start - first_row) for one in sequences),
        logits_rows_R=inputs.logits_rows_R[:0],
        decodes=decodes,
    )
