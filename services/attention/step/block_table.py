"""The KV blocks of decoding sequences as one array, kept from step to step: a step changes few of its rows. No tensors.

Legend: B sequences, M blocks per sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from services.attention.sequences.sequence import SequenceState

_SLACK = 16
"""Columns more than are needed, so that the array grows seldom."""


class BlockTable:
    """Rows in the order of the sequences asked for last."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._states: Sequence[SequenceState] = ()
        self._blocks_BM: NDArray[np.int64] = np.zeros((0, _SLACK), dtype=np.int64)

    def rows(self, states: Sequence[SequenceState], position_B: NDArray[np.int64]) -> NDArray[np.int64]:
        """``blocks_BM`` of ``states``, each followed by repeats of its last block; valid until the next call.

        Args:
            position_B: of the token that each computes now. A sequence asked for in the step before has taken a block
                since only if this is the first in one. Asking twice for a step changes nothing.
        """
        if states is not self._states:
            self._adopt(states)
        for row in np.flatnonzero(position_B % self._block_size == 0).tolist():
            self._write(row, states[row].blocks, -1)
        return self._blocks_BM

    def _adopt(self, states: Sequence[SequenceState]) -> None:
        """Rows of sequences that stayed move; the others' are written."""
        row_of = {state: row for row, state in enumerate(self._states)}
        before = [row_of.get(state, -1) for state in states]
        most = max((len(state.blocks) for state in states), default=0)
        width = min(self._blocks_BM.shape[1], most + _SLACK)  # back, when a long one has gone
        blocks_BM = np.zeros((len(states), width), dtype=np.int64)
        if row_of:
            blocks_BM[:] = self._blocks_BM[before, :width]
        self._states, self._blocks_BM = states, blocks_BM
        for row, old in enumerate(before):
            if old < 0:
                self._write(row, states[row].blocks, 0)

    def _write(self, row: int, blocks: Sequence[int], first: int) -> None:
        """``blocks`` from ``first`` on."""
        count, width = len(blocks), self._blocks_BM.shape[1]
        if count > width:
            self._blocks_BM = np.pad(self._blocks_BM, ((0, 0), (0, count + _SLACK - width)), mode="edge")
        start = first % count
        self._blocks_BM[row, start:count] = blocks[start:]
        self._blocks_BM[row, count:] = blocks[-1]
