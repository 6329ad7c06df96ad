"""Keeps an attention worker in the registry, with the credit by which the scheduler assigns requests to it.

Out: registrations. While the engine lacks something, such as experts that cannot be reached, the credit is 0.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from services.messages import WorkerInfo
from services.queue.backoff import Backoff, until_answered
from services.queue.worker_side import WorkerQueue

LOOK_S = 0.1
"""Time between two looks at what the engine lacks."""

log = logging.getLogger(__name__)


class Registration:
    """One worker's registration.

    Args:
        credit: tokens and requests that the scheduler may assign at a time.
        lacks: names what keeps the engine from computing; called often.
    """

    def __init__(
        self,
        info: WorkerInfo,
        queue: WorkerQueue,
        *,
        lease_s: float,
        credit: tuple[int, int],
        lacks: Callable[[], Sequence[str]],
    ) -> None:
        self._info, self._queue, self._lease_s, self._credit, self._lacks = info, queue, lease_s, credit, lacks
        self._able = True
        self._withdrawn = self._suspended = False
        self._lock = asyncio.Lock()
        self.entered = asyncio.Event()
        """Set once the worker is registered."""

    @property
    def registered(self) -> bool:
        return self.entered.is_set()

    async def enter(self, prepare: Callable[[], Awaitable[object]]) -> None:
        """Call ``prepare``, then register, as soon as Redis answers. Raises FingerprintMismatch."""

        async def once() -> None:
            await prepare()
            self._able = not self._lacks()
            await self._announce()

        await until_answered("registration", once, Backoff())
        self.entered.set()
        log.info("registered as worker %s, serving %s", self._info.id, self._info.model)

    async def keep(self, hand_back: Callable[[], Awaitable[object]]) -> None:
        """Follow what the engine lacks until cancelled. Whenever the credit has become 0, call ``hand_back`` to return
        requests that have not begun: another worker may have what this one lacks."""
        while True:
            await asyncio.sleep(LOOK_S)
            lacks = self._lacks()
            if not self.registered or self._withdrawn or self._suspended or self._able == (not lacks):
                continue
            self._able = not lacks
            if self._able:
                log.info("accepting requests again")
            else:
                log.warning("not accepting requests: waiting for %s", ", ".join(lacks))
            await until_answered("credit", self._announce, Backoff())
            if not self._able:
                await until_answered("credit", hand_back, Backoff())

    async def suspend(self, suspended: bool) -> None:
        """Set the credit to 0, or back to what it is otherwise."""
        self._suspended = suspended
        await self._announce()

    async def withdraw(self) -> None:
        """Set the credit to 0 for good."""
        self._withdrawn = True
        await self._announce()

    async def _announce(self) -> None:
        async with self._lock:  # the credit that Redis gets last must be the one that holds
            open_ = self._able and not self._withdrawn and not self._suspended
            tokens, requests = self._credit if open_ else (0, 0)
            await self._queue.register(self._info, self._lease_s, credit_tokens=tokens, credit_requests=requests)
