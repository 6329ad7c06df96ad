"""What the registry knows of an attention worker: that it is there, and the credit by which the scheduler assigns.

Out: registrations. While the engine lacks something, such as experts that nobody here can reach, there is no credit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from services.messages import WorkerInfo
from services.queue.backoff import Backoff, until_answered
from services.queue.worker_side import WorkerQueue

LOOK_S = 0.1
"""How often it is asked what is lacking."""

log = logging.getLogger(__name__)


class CreditOptions(Protocol):
    """Of :class:`services.attention.worker.WorkerOptions`."""

    @property
    def credit_tokens(self) -> int: ...

    @property
    def credit_requests(self) -> int: ...

    @property
    def lease_s(self) -> float: ...


class Registration:
    """``lacks`` names what keeps the engine from computing; it is asked often."""

    def __init__(
        self, info: WorkerInfo, queue: WorkerQueue, options: CreditOptions, lacks: Callable[[], Sequence[str]]
    ) -> None:
        self._info = info
        self._queue = queue
        self._options = options
        self._lacks = lacks
        self._able = True
        self._withdrawn = False
        self._telling = asyncio.Lock()
        self.registered = False

    async def enter(self, prepare: Callable[[], Awaitable[object]]) -> None:
        """Register, after ``prepare``, as soon as Redis answers. Raises FingerprintMismatch."""

        async def once() -> None:
            await prepare()
            self._able = not self._lacks()
            await self._announce()

        await until_answered("registration", once, Backoff())
        self.registered = True
        log.info("worker %s serves %s", self._info.id, self._info.model)

    async def keep(self, hand_back: Callable[[], Awaitable[object]]) -> None:
        """Follow what is lacking until cancelled. ``hand_back`` is called, after the credit went, to give back what
        has not begun: another worker may have what this one lacks."""
        while True:
            await asyncio.sleep(LOOK_S)
            lacks = self._lacks()
            if not self.registered or self._withdrawn or self._able == (not lacks):
                continue
            self._able = not lacks
            if self._able:
                log.info("takes requests again")
            else:
                log.warning("takes no requests while there is no %s", ", no ".join(lacks))
            await until_answered("credit", self._announce, Backoff())
            if not self._able:
                await until_answered("credit", hand_back, Backoff())

    async def withdraw(self) -> None:
        """No credit any more, for good."""
        self._withdrawn = True
        await self._announce()

    async def _announce(self) -> None:
        async with self._telling:  # what is told last must be what holds
            credit = self._able and not self._withdrawn
            await self._queue.register(
                self._info,
                self._options.lease_s,
                credit_tokens=self._options.credit_tokens if credit else 0,
                credit_requests=self._options.credit_requests if credit else 0,
            )
