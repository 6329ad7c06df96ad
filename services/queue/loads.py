"""Loads of attention workers and gateways, and the leader's targets, across Redis.

Each member reports its load under a lease, next to its heartbeat and less often than a step; the leader reads all loads
at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from redis.asyncio import Redis

from services.errors import QueueUnavailable, UnreadableMessage
from services.messages import GatewayLoad, WorkerLoad, decode_gateway_load, decode_worker_load, encode
from services.queue.connect import command
from services.queue.keys import Keys
from services.queue.limits import QueueLimits
from services.queue.quarantine import Quarantine
from services.queue.scripts import Scripts, milliseconds

T = TypeVar("T")
NOTES_PER_LEASE = 4
MAX_PAUSE_S = 1.0

log = logging.getLogger(__name__)


class LoadNotes:
    """Reports the load of one member. ``member_id`` is its incarnation."""

    def __init__(
        self, redis: Redis, keys: Keys, *, member_id: str, lease_s: float, read: Callable[[], WorkerLoad | GatewayLoad]
    ) -> None:
        self._redis, self._key = redis, keys.load(member_id)
        self._lease_s, self._read = lease_s, read

    async def note(self) -> None:
        """Reports the load now. Raises QueueUnavailable."""
        await command(self._redis, "SET", self._key, encode(self._read()), "PX", milliseconds(self._lease_s))

    async def run(self) -> None:
        """Reports until cancelled. A report that Redis misses loses nothing: the next one has the totals."""
        while True:
            try:
                await self.note()
            except QueueUnavailable as error:
                log.debug("cannot report the load: %s", error.message)
            await asyncio.sleep(min(MAX_PAUSE_S, self._lease_s / NOTES_PER_LEASE))


@dataclass(frozen=True, kw_only=True, slots=True)
class Loads:
    """Loads by incarnation."""

    workers: Mapping[str, WorkerLoad | None]
    """Attention workers under lease; None: no report yet, or none for the time of a lease."""
    gateways: Mapping[str, GatewayLoad]


class LoadReader:
    """The leader's view. All methods raise QueueUnavailable while Redis does not answer."""

    def __init__(
        self, redis: Redis, keys: Keys, limits: QueueLimits | None = None, *, quarantine: Quarantine | None = None
    ) -> None:
        self._redis, self._keys = redis, keys
        self._scripts = Scripts(redis, keys, limits or QueueLimits())
        self._quarantine = quarantine or Quarantine()

    async def loads(self) -> Loads:
        """Returns the reported loads; a load that cannot be read counts as not reported."""
        workers, gateways = await self._scripts.run("loads")
        return Loads(
            workers=await self._read(workers, decode_worker_load),
            gateways={name: load for name, load in (await self._read(gateways, decode_gateway_load)).items() if load},
        )

    async def _read(self, flat: Sequence[bytes], decode: Callable[[bytes], T]) -> dict[str, T | None]:
        found: dict[str, T | None] = {}
        for name, load in zip(flat[::2], flat[1::2], strict=True):
            member = name.decode(errors="replace")
            try:
                found[member] = decode(load) if load else None
            except UnreadableMessage as error:
                found[member] = None
                await self._quarantine.put("load", member, error, load)
        return found

    async def targets(self) -> bytes | None:
        """Returns the targets that a leader kept last; None: none, or Redis lost them."""
        kept: bytes | None = await command(self._redis, "GET", self._keys.targets)
        return kept

    async def keep_targets(self, epoch: int, targets: bytes) -> None:
        """Keeps ``targets`` for the next leader. Raises StaleLeader, having changed nothing, once another one leads."""
        await self._scripts.run("note_targets", epoch, targets)
