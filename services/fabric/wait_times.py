"""Measures which shard groups an attention worker waits for. In: moments of waiting. Out: seconds by group."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class Stalls:
    """Divides waiting time evenly among the groups whose answers are missing. One thread waits, any thread may read.

    The time of a group is what a faster group would have saved; all groups together have the time that was waited.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    @contextmanager
    def waiting(self, groups: Sequence[int]) -> Iterator[None]:
        """Time the block, which waits for one answer from each entry of ``groups``; a group may occur twice."""
        began = time.perf_counter()
        try:
            yield
        finally:
            each_s = (time.perf_counter() - began) / len(groups)
            for group in groups:
                self._seconds[group] = self._seconds.get(group, 0.0) + each_s

    def totals(self) -> dict[int, float]:
        """Return the seconds waited since the start, by group."""
        return dict(self._seconds)
