"""Whether this gateway can serve, and if not, what is missing."""

from __future__ import annotations

from redis.asyncio import Redis

from services.errors import QueueUnavailable
from services.gateway.auth import KeyStore
from services.gateway.recent import Recent
from services.gateway.results import ResultFollower
from services.queue.connect import command

_LOOKS_PER_S = 4.0


class LeaderProbe:
    """Looks for the scheduler's leader lock."""

    def __init__(self, redis: Redis, key: str) -> None:
        self._redis = redis
        self._key = key

    async def present(self) -> bool:
        """Raises QueueUnavailable while Redis is away."""
        return bool(await command(self._redis, "EXISTS", self._key))


class Readiness:
    """Collects what a request needs on its way. Redis is asked a few times a second, whoever asks here how often."""

    def __init__(self, follower: ResultFollower, leader: LeaderProbe, keys: KeyStore | None = None) -> None:
        self._follower = follower
        self._led = Recent(leader.present, _LOOKS_PER_S)
        self._keys = keys
        self._connected = False

    def connected(self) -> bool:
        """Whether Redis has answered once. While it is away later this gateway is still the one to tell clients so."""
        self._connected = self._connected or self._follower.up
        return self._connected

    async def missing(self) -> list[str]:
        """Names of what is missing: ``api keys``, ``redis``, ``scheduler``, ``worker``."""
        keys = [] if self._keys is None or await self._keys.usable() else ["api keys"]
        if not self._follower.up:
            return [*keys, "redis"]
        try:
            led = await self._led.get()
        except QueueUnavailable:
            return [*keys, "redis"]
        return keys + ([] if led else ["scheduler"]) + ([] if self._follower.workers else ["worker"])
