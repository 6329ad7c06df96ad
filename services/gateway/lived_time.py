"""Time for deadlines that must be nobody's fault but the peer's."""

from __future__ import annotations

import time
from collections.abc import Callable


class LivedTime:
    """Seconds that this process has lived through. What passes between two :meth:`tick` counts as ``most_s`` at most:
    while the process was stopped (SIGSTOP, a frozen cgroup) or its event loop stood still, nobody could be heard, so
    nobody was late."""

    def __init__(self, most_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_s = most_s
        self._clock = clock
        self._ticked = clock()
        self._lived = 0.0

    def now(self) -> float:
        return self._lived + min(self._clock() - self._ticked, self._most_s)

    def tick(self) -> float:
        """:meth:`now`, from which the next step is measured. Call it at least every half of ``most_s``."""
        self._lived, self._ticked = self.now(), self._clock()
        return self._lived
