"""Makes events happen at their times, and says what came of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from loadgen.events.host import EventImpossible, Host
from loadgen.events.plan import Planned
from loadgen.results import Event

NOT_REACHED = "the load ended before"


async def check(events: Sequence[Planned], host: Host) -> None:
    """Looks for all targets before there is any load.

    Raises:
        EventImpossible: there is no such target, or what is asked for cannot be done to it.
    """
    for event in events:
        await host.find(event)


class Following:
    """A context in which ``events`` happen: second 0 is ``began`` by ``time.perf_counter``. At its end those that have
    not begun never will, and one that is under way is broken off."""

    def __init__(self, events: Sequence[Planned], host: Host, began: float) -> None:
        self._events, self._host, self._began = events, host, began
        self._done: list[Event | None] = [None] * len(events)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def events(self) -> list[Event]:
        """What came of each, in the order of their times."""
        found = [
            done or Event(at_s=event.at_s, action=event.action, target=event.text, error=NOT_REACHED)
            for event, done in zip(self._events, self._done, strict=True)
        ]
        return sorted(found, key=lambda event: event.at_s)

    async def __aenter__(self) -> Following:
        self._tasks = [asyncio.create_task(self._make(number)) for number in range(len(self._events))]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        for problem in ended:
            if isinstance(problem, Exception):
                raise problem

    def _now(self) -> float:
        return time.perf_counter() - self._began

    async def _make(self, number: int) -> None:
        event = self._events[number]
        await asyncio.sleep(max(0.0, event.at_s - self._now()))
        began, detail, error = self._now(), "", None
        try:
            detail = await self._host.act(event)
        except EventImpossible as problem:
            error = problem.message
        except asyncio.CancelledError:
            error = "broken off at the end of the load"
            raise
        finally:
            self._done[number] = Event(
                at_s=event.at_s,
                action=event.action,
                target=event.text,
                began_s=round(began, 3),
                ended_s=round(self._now(), 3),
                detail=detail[:500],
                error=error,
            )
