"""How many requests are traced because their clients ask for it."""

from __future__ import annotations

import time
from collections.abc import Callable

BURST_S = 10.0
"""So many seconds' worth may come at once."""


class Allowance:
    """A token bucket of ``rate`` a second; 0 allows nothing. One thread uses it."""

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = rate, clock
        self._most = max(1.0, BURST_S * rate) if rate else 0.0
        self._left, self._at = self._most, clock()

    def take(self) -> bool:
        """Return whether one more is allowed, and count it."""
        now = self._clock()
        self._left = min(self._most, self._left + self._rate * (now - self._at))
        self._at = now
        allowed = self._left >= 1
        self._left -= allowed
        return allowed
