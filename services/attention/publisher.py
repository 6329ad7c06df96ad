"""TokenEvents from the engine's thread into Redis, in order, one call for whatever has gathered since the last.

While Redis is away the same call is repeated, whether or not it took effect: the gateway drops doubled tokens by their
index. Meanwhile events gather in the engine thread's bounded buffer, and the engine pauses when that is full. It also
pauses while a gateway lags behind what was published (:mod:`services.attention.backpressure`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from services.messages import TokenEvent
from services.queue.backoff import Backoff, until_answered

MAX_EVENTS = 2048
"""Events per call: bounds how long one script keeps Redis busy after an outage."""
MAX_BYTES = 2 * 1024 * 1024
"""About what the events of one call may take together. The publisher looks whether gateways lag after each call."""


class EventSource(Protocol):
    """Where events come from (:class:`services.attention.engine_thread.EngineThread`)."""

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
        """There is something to take. Event loop only."""
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
        """Returns once everything taken so far, and all there was to take, is in Redis."""
        await self._idle.wait()

    async def _publish(self, events: Sequence[TokenEvent]) -> None:
        refused = await until_answered("publishing", lambda: self._send(events), self._backoff)
        self._source.published(events)
        attempts: dict[str, int] = {}
        for event in events if refused else ():
            if event.request_id in refused:  # the lowest: a later attempt in the same call may be good
                attempts.setdefault(event.request_id, event.attempt)
        self._on_published(events, attempts)
