"""Which positions the rows of a step see where some branch: words for each row, behind the items of a work list.

A sequence to verify may have rows that stand for the same position, as alternatives. Keys lie in places, one after the
other: what is known, then a place for each row of the step. A row sees what is known, which ends with the first row's
place, and of the other rows itself and those on the way to it. For each row there are four int32 words::

    first place that it sees, places that are known, two halves of a word of 64 bits

Bit i is set if the row sees place ``known + i``. Rows that do not branch know all that they see.
Legend: S sequences, T rows of the step, W rows of a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moe_kernels.arguments import ArgumentError, require

SEEN: Final = 4
"""Words of a row."""
MOST: Final = 64
"""Rows behind the first of a sequence."""
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TreeRows:
    """Rows that branch: W rows of a sequence, the first of which every other one sees.

    Row w is ``depth_W[w]`` positions after the first. Of the rows behind the first it sees row i + 1 if bit i of
    ``ancestors_W[w]`` (uint64) is set: itself, and those on the way to it, which come before it.
    """

    depth_W: Ints
    ancestors_W: NDArray[np.uint64]

    def within(self, window: int | None) -> NDArray[np.uint64]:
        """Return ``ancestors_W`` without those that are out of a ``window``."""
        if window is None or window > self.depth_W.max():
            return self.ancestors_W
        near_WA = self.depth_W[:, None] - self.depth_W[None, 1:] < window
        bit_A = np.uint64(1) << np.arange(len(self.depth_W) - 1, dtype=np.uint64)
        words_W: NDArray[np.uint64] = self.ancestors_W & (near_WA * bit_A).sum(axis=1, dtype=np.uint64)
        return words_W


def check(trees: Mapping[int, TreeRows], rows_S: Ints) -> None:
    """
    Raises:
        ArgumentError: a tree of no sequence, of another number of rows, or whose rows see later ones.
    """
    for sequence, tree in trees.items():
        require(0 <= sequence < len(rows_S), f"there is no sequence {sequence} that could branch")
        rows, shapes = int(rows_S[sequence]), (np.shape(tree.depth_W), np.shape(tree.ancestors_W))
        if shapes != ((rows,), (rows,)):
            raise ArgumentError(f"sequence {sequence} has {rows} rows, found a tree of {shapes[0]} and {shapes[1]}")
        require(1 <= rows <= 1 + MOST, f"a tree may have 1..{1 + MOST} rows, found {rows}")
        require(tree.ancestors_W.dtype == np.uint64, f"ancestors must be uint64, found {tree.ancestors_W.dtype}")
        later_W = tree.ancestors_W[1:] >> np.arange(rows - 1, dtype=np.uint64)
        fits = not tree.ancestors_W[0] and bool((later_W == 1).all())
        require(fits, "ancestors must be words in which a row sees itself and no later row, the first one nothing")


def seen_words(rows_S: Ints, kv_len_S: Ints, trees: Mapping[int, TreeRows], window: int | None) -> NDArray[np.int32]:
    """The words of all rows, ``[T, SEEN]``.

    Example: a sequence of 5 places with 3 rows, the last two after the first, window 4: (0, 3, 0, 0), (0, 3, 1, 0),
    (0, 3, 2, 0).
    """
    begin_S, start_S = np.cumsum(rows_S) - rows_S, kv_len_S - rows_S
    position_T = np.repeat(start_S - begin_S, rows_S) + np.arange(int(rows_S.sum()))
    words_T = np.zeros((len(position_T), SEEN), dtype=np.int32)
    words_T[:, 1] = np.maximum(position_T + 1, 0)
    for sequence, tree in trees.items():
        rows = slice(begin_S[sequence], begin_S[sequence] + rows_S[sequence])
        position_T[rows] = start_S[sequence] + tree.depth_W
        words_T[rows, 1] = start_S[sequence] + 1
        words_T[rows, 2:] = tree.within(window).astype("<u8").view("<i4").reshape(-1, 2)
    if window is not None:
        words_T[:, 0] = np.maximum(position_T - (window - 1), 0)
    return words_T
