"""Backpressure: a worker computes no more than the gateways that its tokens go to can take.

Without it a gateway's stream in Redis would grow until its older half is dropped, other clients' tokens among it. The
engine's steps become rarer instead: all sequences go on, and none waits for the tokens of another.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from services.errors import QueueUnavailable

LOOK_S = 0.02
"""Time between two looks at gateways that lag."""
LONGEST_S = 0.5
"""The longest wait after one publishing call. Clients of other gateways get no tokens meanwhile."""
STALLED_S = 1.0
"""A gateway that handled nothing for this long is dead or paused: workers do not wait for it."""
REMEMBERED_S = 60.0
"""How long a worker remembers where such a gateway stood."""


class LagReport(Protocol):
    """``lagging``: for each gateway that lags, the id of the last entry that it has handled; refreshed by
    :meth:`look_at_lag` (:class:`services.queue.worker_side.WorkerQueue`)."""

    lagging: dict[str, str]

    async def look_at_lag(self) -> None: ...


class Backpressure:
    """Waits while a gateway lags and still handles entries.

    Args:
        report: what the last publishing call found.
        hold: called with True before a wait and with False after it; the engine is to pause between the two.
        clock: the current time in seconds.
    """

    def __init__(
        self, report: LagReport, hold: Callable[[bool], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._report = report
        self._hold = hold
        self._clock = clock
        self._ended = False
        self._seen: dict[str, tuple[str, float]] = {}
        """By gateway the last entry that it handled, and when that was first seen."""

    def end(self) -> None:
        """Wait no more: the engine has ended, and what is left is to be published soon."""
        self._ended = True

    async def wait(self) -> float:
        """Returns once no gateway lags that handles entries, or when Redis is away, or after LONGEST_S and the answer
        of Redis that is awaited then.

        Returns:
            The seconds it took.
        """
        began = self._clock()
        if not self._to_wait_for():
            return 0.0
        self._hold(True)
        try:
            with suppress(QueueUnavailable):
                while self._to_wait_for() and self._clock() < began + LONGEST_S:
                    await asyncio.sleep(LOOK_S)
                    await self._report.look_at_lag()
        finally:
            self._hold(False)
        return self._clock() - began

    def _to_wait_for(self) -> bool:
        now, waits = self._clock(), False
        for gateway, handled in self._report.lagging.items():
            if gateway not in self._seen or self._seen[gateway][0] != handled:
                self._seen[gateway] = handled, now
            waits = waits or now - self._seen[gateway][1] < STALLED_S
        self._seen = {name: seen for name, seen in self._seen.items() if now - seen[1] < REMEMBERED_S}
        return waits and not self._ended
