"""Which shard group an attention worker waits for. In: moments of waiting. Out: seconds by group."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class Stalls:
    """Every moment is shared evenly by the groups whose answers are missing in it: what a faster group would have
    saved, and over all groups the time that was waited. One thread waits, any may read."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    @contextmanager
    def waiting(self, groups: Sequence[int]) -> Iterator[None]:
        """For an answer of each of ``groups``, which may repeat."""
        began = time.perf_counter()
        try:
            yield
        finally:
            each_s = (time.perf_counter() - began) / len(groups)
            for group in groups:
                self._seconds[group] = self._seconds.get(group, 0.0) + each_s

    def totals(self) -> dict[int, float]:
        """Seconds since the start, by group."""
        return dict(self._seconds)
