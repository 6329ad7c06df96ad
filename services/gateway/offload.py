"""Runs heavy work in threads, few at a time, tenants in rotation.

In: a callable and its tenant. Out: its result, or a refusal where too much work of that tenant waits. Open streams go
on meanwhile, and one tenant's megabytes delay another tenant by one piece, not by all of them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from services.errors import Overloaded, WorkLimited
from services.metrics import GatewayMetrics

T = TypeVar("T")

_HOLDING = 1
"""Threads for work that holds the interpreter's lock: more threads would only take the lock from the event loop."""
_RELEASING = 2
"""Threads for work that releases the lock, such as tokenizing."""
_LONG = 1
"""Threads for work that releases the lock and takes much time and memory: it waits only for other long work."""
_WAITING_OF_ONE = 512
_WAITING_OF_ALL = 4096
_FIRST_GUESS_S = 0.05
_NEWEST = 0.1  # weight of the newest piece in the mean duration


class Offload:
    """Runs pieces of work in threads. Each kind of work has threads of its own."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        *,
        holding: int = _HOLDING,
        releasing: int = _RELEASING,
        long: int = _LONG,
        waiting_of_one: int = _WAITING_OF_ONE,
        waiting_of_all: int = _WAITING_OF_ALL,
    ) -> None:
        bounds = (waiting_of_one, waiting_of_all)
        self._holding = _Lane("holds_lock", holding, bounds, metrics)
        self._releasing = _Lane("releases_lock", releasing, bounds, metrics)
        self._long = _Lane("long", long, bounds, metrics)

    async def run(
        self,
        tenant: str,
        work: Callable[[], T],
        *,
        releases_lock: bool = False,
        long: bool = False,
        owed: bool = False,
    ) -> T:
        """Returns or raises what ``work`` does. Cancelling removes a piece that waits; a running piece goes on unheard.

        ``releases_lock`` says that the work releases the interpreter's lock, ``long`` that it then takes more than a
        tenth of a second. ``owed`` work belongs to an admitted request and is never refused.

        Raises:
            WorkLimited: the maximum of pieces of this tenant waits already.
            Overloaded: the maximum of pieces of all tenants waits already.
        """
        lane = self._holding if not releases_lock else self._long if long else self._releasing
        await lane.turn(tenant, refusable=not owed)
        return await lane.run(work)

    def close(self) -> None:
        """Begins nothing new; running pieces end by themselves."""
        for lane in (self._holding, self._releasing, self._long):
            lane.close()


class _Lane:
    """``places`` threads, and the pieces that wait for one: tenants in rotation, each tenant's pieces in order."""

    def __init__(self, kind: str, places: int, bounds: tuple[int, int], metrics: GatewayMetrics) -> None:
        self._free = places
        self._of_one, self._of_all = bounds
        self._pool = ThreadPoolExecutor(places, thread_name_prefix=f"offload-{kind}")
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}  # the next tenant's first
        self._waiting = 0
        self._mean_s = _FIRST_GUESS_S
        self._gauge = metrics.offload_waiting.labels(kind)
        self._wait = metrics.offload_wait.labels(kind)

    async def turn(self, tenant: str, *, refusable: bool) -> None:
        """Waits for a place and takes it; :meth:`run` gives it back."""
        began = time.monotonic()
        if self._free:  # then no piece waits
            self._free -= 1
        else:
            await self._queue(tenant, refusable=refusable)
        self._wait.observe(time.monotonic() - began)

    async def run(self, work: Callable[[], T]) -> T:
        began = time.monotonic()
        running = asyncio.get_running_loop().run_in_executor(self._pool, work)

        def over(done: asyncio.Future[Any]) -> None:
            if not done.cancelled():
                done.exception()  # marks it as read, even if the client has left
            self._mean_s += _NEWEST * (time.monotonic() - began - self._mean_s)
            self._give_back()

        running.add_done_callback(over)
        return await asyncio.shield(running)  # a thread cannot be cancelled: it keeps its place until it ends

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _queue(self, tenant: str, *, refusable: bool) -> None:
        if refusable:
            self._check(tenant)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(tenant, deque()).append(turn)
        self._count(1)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(tenant, turn)
            else:  # it has the place already
                self._give_back()
            raise

    def _check(self, tenant: str) -> None:
        of_one = len(self._queues.get(tenant, ()))
        retry_after_s = max(1.0, of_one * len(self._queues) * self._mean_s)
        if of_one >= self._of_one:
            raise WorkLimited(
                f"{of_one} large requests of this key are already waiting to be parsed.",
                hint="Send fewer at a time.",
                retry_after_s=retry_after_s,
            )
        if self._waiting >= self._of_all:
            raise Overloaded(
                f"{self._waiting} large requests are already waiting to be parsed.",
                hint="Try again soon.",
                retry_after_s=max(1.0, self._waiting * self._mean_s),
            )

    def _give_back(self) -> None:
        """Gives the place to the next tenant's oldest piece; that tenant goes to the end of the line."""
        while self._queues:
            tenant, queue = next(iter(self._queues.items()))
            turn = queue[0]
            self._forget(tenant, turn)
            if queue:
                self._queues[tenant] = self._queues.pop(tenant)
            if not turn.cancelled():  # else its client has just left
                turn.set_result(None)
                return
        self._free += 1

    def _forget(self, tenant: str, turn: asyncio.Future[None]) -> None:
        queue = self._queues.get(tenant, deque())
        if turn in queue:
            queue.remove(turn)
            self._count(-1)
        if not queue:
            self._queues.pop(tenant, None)

    def _count(self, change: int) -> None:
        self._waiting += change
        self._gauge.set(self._waiting)
