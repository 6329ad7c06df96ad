"""Keeps a step's inputs at fixed addresses, for CUDA graphs to read.

Graphs of decodes take each row as a sequence by itself; graphs of pieces take sequences with any number of rows, by
work lists (:mod:`services.model.work_lists`). No method waits for the device.
Legend: T rows of the step, S sequences, M blocks of a sequence, at most, W words of a work list.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_kernels.paged_attention.work import Work
from services.model.inputs import PagedPieces, PagedRows, StateRows, StepInputs
from services.model.state_room import SPARE_SLOT, ZERO_SLOT
from services.model.work_lists import Planners, WorkLists, sequences_of, trees_of

_MIN_ROWS = 8
"""The least rows that graphs of pieces are made for: steps of fewer are as fast."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Most blocks of a sequence, tokens of a block, and the slot of the KV cache for rows of no sequence. ``states``:
    whether sequences have recurrent states."""

    blocks: int
    block_size: int
    spare_slot: int
    states: bool = False


class FixedInputs(ABC):
    """The inputs of steps of one kind. ``buckets``: the numbers of rows that graphs are made for, ascending."""

    def __init__(self, buckets: Sequence[int], shape: Shape, device: torch.device) -> None:
        self.buckets = buckets
        self._shape, self._device, self._pinned = shape, device, device.type == "cuda"
        rows = buckets[-1]
        self._token_ids_T, self._positions_T, self._slots_T = (
            torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(3)
        )
        self._states_2T = torch.zeros(2, rows if shape.states else 0, dtype=torch.int64, device=device)
        """Slots that each row's sequence reads and writes."""

    def of(self, rows: int) -> StepInputs:
        """Return the first ``rows`` rows, as views."""
        return StepInputs(
            token_ids_T=self._token_ids_T[:rows],
            positions_T=self._positions_T[:rows],
            slots_T=self._slots_T[:rows],
            sequences=(),
            logits_rows_R=self._positions_T[:0],
            paged=self._paged(rows),
            states=self._states(rows),
        )

    def _states(self, rows: int) -> StateRows | None:
        read_T, write_T = self._states_2T[:, :rows]
        return StateRows(read_S=read_T, write_S=write_T) if self._shape.states else None

    def fill(self, inputs: StepInputs, rows: int) -> None:
        """Copy the rows of ``inputs``. Those after them, up to ``rows``, are of no sequence."""
        count = len(inputs.token_ids_T)
        for fixed_T, step_T in (
            (self._token_ids_T, inputs.token_ids_T),
            (self._positions_T, inputs.positions_T),
            (self._slots_T, inputs.slots_T),
        ):
            fixed_T[:count].copy_(step_T, non_blocking=True)
        if inputs.states is not None:
            for fixed_T, step_S in zip(self._states_2T, (inputs.states.read_S, inputs.states.write_S), strict=True):
                fixed_T[:count].copy_(step_S, non_blocking=True)
        self._fill(inputs, count, rows)
        self._clear_rows(count, rows)

    def clear(self, rows: int) -> None:
        """Make ``rows`` rows of no sequence: they see nothing, and nobody reads what they write."""
        self._fill(None, 0, rows)
        self._clear_rows(0, rows)

    def _clear_rows(self, first: int, rows: int) -> None:
        if first < rows:
            self._token_ids_T[first:rows].zero_()
            self._slots_T[first:rows].fill_(self._shape.spare_slot)
            self._states_2T[0, first:rows].fill_(ZERO_SLOT)
            self._states_2T[1, first:rows].fill_(SPARE_SLOT)

    def _write(self, fixed_SM: Tensor, table_SM: NDArray[np.int32]) -> None:
        """Copy ``table_SM`` into the first rows and columns of ``fixed_SM``."""
        staged_SM = torch.empty(table_SM.shape, dtype=torch.int32, pin_memory=self._pinned)
        staged_SM.numpy()[:] = table_SM
        fixed_SM[: table_SM.shape[0], : table_SM.shape[1]].copy_(staged_SM, non_blocking=True)

    @abstractmethod
    def _paged(self, rows: int) -> PagedRows | PagedPieces: ...

    @abstractmethod
    def _fill(self, inputs: StepInputs | None, count: int, rows: int) -> None:
        """Copy what attention reads of ``inputs`` with ``count`` rows; None: there are no sequences."""


class FixedDecodes(FixedInputs):
    """Inputs of steps of at most ``most`` rows, whose sequences have one row each."""

    def __init__(self, most: int, shape: Shape, device: torch.device) -> None:
        super().__init__(row_buckets(most), shape, device)
        self._kv_len_T = torch.zeros(most, dtype=torch.int32, device=device)
        self._blocks_TM = torch.zeros(most, shape.blocks, dtype=torch.int32, device=device)

    def _paged(self, rows: int) -> PagedRows:
        return PagedRows(kv_len_B=self._kv_len_T[:rows], blocks_BM=self._blocks_TM[:rows])

    def _fill(self, inputs: StepInputs | None, count: int, rows: int) -> None:
        if inputs is not None:
            torch.add(self._positions_T[:count], 1, out=self._kv_len_T[:count])
            self._write(self._blocks_TM, sequences_of(inputs, self._shape.block_size)[2])
        self._kv_len_T[count:rows].zero_()


class FixedPieces(FixedInputs):
    """Inputs of steps of at most ``most`` rows of at most ``sequences`` sequences.

    Args:
        lists: makes the planners of work lists.
        trees: whether rows of a sequence may branch.
    """

    def __init__(
        self, most: int, sequences: int, shape: Shape, lists: WorkLists, device: torch.device, *, trees: bool = False
    ) -> None:
        buckets = row_buckets(most)
        super().__init__([rows for rows in buckets if rows >= _MIN_ROWS] or [most], shape, device)
        self._blocks_SM = torch.zeros(min(most, sequences), shape.blocks, dtype=torch.int32, device=device)
        self._live_T = torch.zeros(most, dtype=torch.bool, device=device)
        self._planners: dict[int, Planners] = {
            rows: lists.planners(
                rows=rows, sequences=min(rows, sequences), positions=shape.blocks * shape.block_size, trees=trees
            )
            for rows in self.buckets
        }
        self._work = {
            rows: {window: Work.empty(planner, device) for window, planner in planners.items()}
            for rows, planners in self._planners.items()
        }

    def _paged(self, rows: int) -> PagedPieces:
        return PagedPieces(blocks_SM=self._blocks_SM, work=self._work[rows], live=self._live_T[:rows])

    def _fill(self, inputs: StepInputs | None, count: int, rows: int) -> None:
        rows_S = kv_len_S = np.empty(0, dtype=np.int64)
        trees = {} if inputs is None else trees_of(inputs)
        if inputs is not None:
            rows_S, kv_len_S, table_SM = sequences_of(inputs, self._shape.block_size)
            self._write(self._blocks_SM, table_SM)
        for window, planner in self._planners[rows].items():
            words_W = torch.from_numpy(planner.plan(rows_S, kv_len_S, trees))
            self._work[rows][window].fill(words_W.pin_memory() if self._pinned else words_W)
        self._live_T[:count].fill_(True)
        self._live_T[count:rows].fill_(False)


def row_buckets(max_rows: int) -> list[int]:
    """Return the numbers of rows that graphs are made for: doubling up to 16, then growing by a quarter to a half, and
    from 512 on, where more rows take longer, by an eighth to a quarter.

    >>> row_buckets(40), row_buckets(1030)[-5:]
    ([1, 2, 4, 8, 16, 24, 32, 40], [640, 768, 896, 1024, 1030])
    """
    sizes = [1, 2, 4, 8]
    while sizes[-1] < max_rows:
        parts = 2 if sizes[-1] < 512 else 3  # of the power of two
        sizes.append(2 * sizes[-1] if sizes[-1] < 16 else sizes[-1] + (1 << (sizes[-1].bit_length() - parts)))
    return [size for size in sizes if size < max_rows] + [max_rows]
