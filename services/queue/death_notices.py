"""Reports of workers that ended, from the supervisor that started them to Redis: nobody waits for their leases."""

from __future__ import annotations

from urllib.parse import urlsplit

from redis.asyncio import Redis

from services.messages import ExpertInfo, WorkerInfo
from services.queue.fates import fates_of, log_fates
from services.queue.keys import Keys
from services.queue.limits import QueueLimits
from services.queue.scheduler_side import SchedulerQueue
from services.queue.scripts import Scripts
from services.queue.seats import SeatRegistry
from services.runtime.address import incarnations_of


class DeathNotices:
    """Reports ends of attention and expert workers, of this host unless another is named.

    Raises QueueUnavailable while Redis does not answer.
    """

    def __init__(self, redis: Redis, keys: Keys, limits: QueueLimits | None = None) -> None:
        limits = limits or QueueLimits()
        self._scripts = Scripts(redis, keys, limits)
        self._workers, self._seats = SchedulerQueue(redis, keys, limits), SeatRegistry(redis, keys, limits)

    async def send(self, pid: int, metrics_port: int, host: str | None = None) -> int:
        """Reports that the process ``pid`` with its metrics page on ``metrics_port`` has ended.

        A member's id begins with its host's name and its process number (:func:`services.runtime.address.incarnation`);
        its ``host`` is the address at which it is reached. The port identifies the process, too: containers may share a
        host's name and number their processes alike. Attempts that are lost with it are logged. Returns how many
        members it was: a worker, a seat, a reader of the table.
        """
        infos: list[WorkerInfo | ExpertInfo] = [
            *(state.info for state in await self._workers.workers()),
            *(state.info for state in await self._seats.seats()),
        ]
        ours = incarnations_of(pid, host)
        ended = [
            info.id
            for info in infos
            if info.id.startswith(ours) and urlsplit(info.metrics_url or "").port == metrics_port
        ]
        if not ended:
            return 0
        count, fates = await self._scripts.run("death_notice", *ended)
        log_fates(fates_of(fates))
        return int(count)
