"""Publishes TokenEvents from the engine's thread to Redis, in order; one call takes all that have gathered.

While Redis is away the same call is repeated, whether or not it took effect: the gateway drops doubled tokens by their
index. Meanwhile events gather in the engine thread's bounded buffer, and the engine pauses when that is full.

The engine also pauses while a gateway lags behind what was published (:class:`Backpressure`). Otherwise the gateway's
stream in Redis would grow until its older half is dropped, other clients' tokens among it. With the pauses steps are
rarer: all sequences go on, and none waits for the tokens of another.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from services.errors import QueueUnavailable
from services.messages import TokenEvent
from services.queue.backoff import Backoff, until_answered

MAX_EVENTS = 2048
"""Most events of one call: bounds how long one script keeps Redis busy after an outage."""
MAX_BYTES = 2 * 1024 * 1024
"""Roughly the most bytes of one call. After each call the publisher looks for gateways that lag."""


class EventSource(Protocol):
    """The source of events (:class:`services.attention.engine_thread.EngineThread`)."""

    def take(self, limit: int, nbytes: int) -> list[TokenEvent]: ...

    def published(self, events: Sequence[TokenEvent]) -> None: ...


class Publisher:
    """Publishes what ``source`` has whenever :meth:`wake` was called.

    Args:
        send: one publishing call to Redis; returns the ids that were refused.
        on_published: called with the events of a call that took effect and the refused attempts by id.
        hold_back: called after each call; returns when there may be another.
    """

    def __init__(
        self,
        source: EventSource,
        send: Callable[[Sequence[TokenEvent]], Awaitable[set[str]]],
        on_published: Callable[[Sequence[TokenEvent], Mapping[str, int]], None],
        hold_back: Callable[[], Awaitable[None]],
    ) -> None:
        self._source = source
        self._send = send
        self._on_published = on_published
        self._hold_back = hold_back
        self._backoff = Backoff()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def wake(self) -> None:
        """Announce that the source has events. Event loop only."""
        self._idle.clear()
        self._wake.set()

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while events := self._source.take(MAX_EVENTS, MAX_BYTES):
                await self._publish(events)
                await self._hold_back()
            if not self._wake.is_set():
                self._idle.set()

    async def flushed(self) -> None:
        """Return once all events that were taken or could be taken are in Redis."""
        await self._idle.wait()

    async def _publish(self, events: Sequence[TokenEvent]) -> None:
        refused = await until_answered("publishing", lambda: self._send(events), self._backoff)
        self._source.published(events)
        attempts: dict[str, int] = {}
        for event in events if refused else ():
            if event.request_id in refused:  # the lowest: a later attempt in the same call may be good
                attempts.setdefault(event.request_id, event.attempt)
        self._on_published(events, attempts)


LOOK_S = 0.02
"""Time between two looks at gateways that lag."""
LONGEST_S = 0.3
"""The longest wait after one publishing call. Clients of other gateways get no tokens meanwhile, and a first token may
wait for two such calls."""
STALLED_S = 1.0
"""A gateway that handled nothing for so long counts as dead or paused: workers do not wait for it."""
REMEMBERED_S = 60.0
"""How long a worker remembers which entry such a gateway handled last."""


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
        """Gateway -> the last entry that it handled, and when that was first seen."""

    def end(self) -> None:
        """Wait no more: the engine has ended, and its last events are to be published soon."""
        self._ended = True

    async def wait(self) -> float:
        """Wait until no gateway lags that still handles entries, at most LONGEST_S, and not while Redis is away.

        Returns:
            The seconds that it took.
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
