"""Reports to Redis that a child has ended, in the background: as soon as it is known, or not at all."""

from __future__ import annotations

import asyncio
import logging

from services.queue.connect import connect
from services.queue.death_notices import DeathNotices
from services.queue.keys import Keys
from services.runtime.tasks import end_tasks

TIMEOUT_S = 2.0

log = logging.getLogger(__name__)


class Notices:
    """Notices of one deployment. Where Redis does not answer, the lease of the dead process has to expire instead."""

    def __init__(self, redis_url: str, namespace: str) -> None:
        self._redis = connect(redis_url)
        self._death_notices = DeathNotices(self._redis, Keys(namespace))
        self._under_way: set[asyncio.Task[None]] = set()

    def ended(self, pid: int, *, name: str, metrics_port: int, host: str | None = None) -> None:
        """Report the end of process ``pid`` of ``host`` (default: this one), which was called ``name``. Returns at
        once."""
        task = asyncio.create_task(self._send(pid, name, metrics_port, host))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def aclose(self) -> None:
        await end_tasks(self._under_way)
        await self._redis.aclose()

    async def _send(self, pid: int, name: str, metrics_port: int, host: str | None) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                if await self._death_notices.send(pid, metrics_port, host):
                    log.info("%s (process %d) has ended; its requests and experts move to other workers", name, pid)
        except Exception as error:  # noqa: BLE001  the lease ends it otherwise
            log.debug("cannot report the end of %s (process %d): %r", name, pid, error)
