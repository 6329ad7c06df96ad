"""What attention workers and gateways tell of their load, and what the leader made of it, across Redis.

Each tells under a lease, beside its heartbeat and rarer than a step; the leader reads all at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from redis.asyncio import Redis

from services.errors import QueueUnavailable
from services.messages import GatewayLoad, WorkerLoad, decode_gateway_load, decode_worker_load, encode
from services.queue.connect import command
from services.queue.keys import Keys
from services.queue.limits import QueueLimits
from services.queue.scripts import Scripts, milliseconds

NOTES_PER_LEASE = 4
MOST_PAUSE_S = 1.0

log = logging.getLogger(__name__)


class LoadNotes:
    """One member's notes of its load. ``member_id`` is its incarnation."""

    def __init__(
        self, redis: Redis, keys: Keys, *, member_id: str, lease_s: float, read: Callable[[], WorkerLoad | GatewayLoad]
    ) -> None:
        self._redis, self._key = redis, keys.load(member_id)
        self._lease_s, self._read = lease_s, read

    async def note(self) -> None:
        """Raises QueueUnavailable."""
        await command(self._redis, "SET", self._key, encode(self._read()), "PX", milliseconds(self._lease_s))

    async def run(self) -> None:
        """Until cancelled. While Redis is away nothing is lost but notes: they tell totals."""
        while True:
            try:
                await self.note()
            except QueueUnavailable as error:
                log.debug("load not told: %s", error.message)
            await asyncio.sleep(min(MOST_PAUSE_S, self._lease_s / NOTES_PER_LEASE))


@dataclass(frozen=True, kw_only=True, slots=True)
class Loads:
    """By incarnation."""

    workers: Mapping[str, WorkerLoad | None]
    """Attention workers under lease; None: it told nothing yet, or nothing for a lease."""
    gateways: Mapping[str, GatewayLoad]


class LoadReader:
    """The leader's view. All methods raise QueueUnavailable while Redis does not answer."""

    def __init__(self, redis: Redis, keys: Keys, limits: QueueLimits | None = None) -> None:
        self._redis, self._keys = redis, keys
        self._scripts = Scripts(redis, keys, limits or QueueLimits())

    async def loads(self) -> Loads:
        workers, gateways = await self._scripts.run("loads")
        return Loads(
            workers={
                worker.decode(): decode_worker_load(load) if load else None
                for worker, load in zip(workers[::2], workers[1::2], strict=True)
            },
            gateways={
                gateway.decode(): decode_gateway_load(load)
                for gateway, load in zip(gateways[::2], gateways[1::2], strict=True)
            },
        )

    async def targets(self) -> bytes | None:
        """What a leader kept last; None: nothing, or Redis lost it."""
        kept: bytes | None = await command(self._redis, "GET", self._keys.targets)
        return kept

    async def keep_targets(self, epoch: int, targets: bytes) -> None:
        """For the leader's successor. Raises StaleLeader, having changed nothing, once another leads."""
        await self._scripts.run("note_targets", epoch, targets)
