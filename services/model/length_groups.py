"""Puts sequences of similar length together, so that padding each group to its longest costs little."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


def group_by_length(length_B: NDArray[np.int64], call_cost: float) -> Iterator[NDArray[np.int64]]:
    """Yield the indices of ``length_B``, split into groups so that padding each to its longest costs little.

    A cut saves the padding of everything below it and costs ``call_cost``. The best cut is made first, then both sides
    are looked at again. The longest group comes first; indices within a group ascend.

    >>> [group_G.tolist() for group_G in group_by_length(np.array([1, 90, 2, 100]), call_cost=20)]
    [[1, 3], [0, 2]]
    """
    pending = [np.argsort(-length_B, kind="stable")] if len(length_B) else []
    while pending:
        order = pending.pop()
        sorted_lengths = length_B[order]
        savings = (sorted_lengths[0] - sorted_lengths) * np.arange(len(order), 0, -1)
        cut = int(savings.argmax())
        if savings[cut] <= call_cost:
            yield np.sort(order)
        else:
            pending += [order[cut:], order[:cut]]
