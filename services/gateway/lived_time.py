"""A clock for deadlines of peers: it stands still while this process does."""

from __future__ import annotations

import time
from collections.abc import Callable


class LivedTime:
    """Seconds in which this process ran. The time between two calls of :meth:`tick` counts as at most ``max_step_s``:
    while the process was stopped (SIGSTOP, a frozen cgroup) or its event loop was blocked, it could hear no peer, so no
    peer was late."""

    def __init__(self, max_step_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_step_s = max_step_s
        self._clock = clock
        self._ticked = clock()
        self._lived = 0.0

    def now(self) -> float:
        return self._lived + min(self._clock() - self._ticked, self._max_step_s)

    def tick(self) -> float:
        """Begins the next step and returns :meth:`now`. Call it at least every half of ``max_step_s``."""
        self._lived, self._ticked = self.now(), self._clock()
        return self._lived
