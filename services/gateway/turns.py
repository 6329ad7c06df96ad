"""Requests begin in rotation: a few in each turn of the event loop, tenants in rotation.

In: requests whose heads have come, a thousand at once perhaps. Out: the same, at a pace that leaves room in each turn
for what is owed to others: tokens of open streams, answers of Redis, probes. A tenant waits for one request of each
other tenant, not for all that somebody has sent before.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

_AT_ONCE = 4
"""A request takes some milliseconds of the loop until it is in the queue."""


class Turns:
    """``tell`` hears how many requests wait, as it changes."""

    def __init__(self, tell: Callable[[float], None], *, at_once: int = _AT_ONCE) -> None:
        self._tell = tell
        self._at_once = at_once
        self._left = at_once
        self._renewing = False
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}  # the next tenant's first
        self._waiting = 0

    async def take(self, tenant: str) -> None:
        """Returns when a request of ``tenant`` may begin."""
        if self._left and not self._waiting:
            self._left -= 1
            self._renew()
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(tenant, deque()).append(turn)
        self._count(1)
        self._renew()
        await turn  # one that is cancelled is passed over

    def _renew(self) -> None:
        if not self._renewing:
            self._renewing = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._renewing, self._left = False, self._at_once
        while self._waiting and self._left:
            tenant, queue = next(iter(self._queues.items()))
            turn = queue.popleft()
            del self._queues[tenant]
            if queue:
                self._queues[tenant] = queue  # behind the others
            self._count(-1)
            if not turn.done():
                turn.set_result(None)
                self._left -= 1
        if self._left < self._at_once:
            self._renew()

    def _count(self, change: int) -> None:
        self._waiting += change
        self._tell(self._waiting)
