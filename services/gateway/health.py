"""Whether this gateway can serve, and if not, what is missing."""

from __future__ import annotations

from redis.asyncio import Redis

from services.errors import QueueUnavailable
from services.gateway.results import ResultFollower
from services.queue.connect import command


class LeaderProbe:
    """Looks for the scheduler's leader lock."""

    def __init__(self, redis: Redis, key: str) -> None:
        self._redis = redis
        self._key = key

    async def present(self) -> bool:
        """Raises QueueUnavailable while Redis is away."""
        return bool(await command(self._redis, "EXISTS", self._key))


class Readiness:
    """Collects what a request needs on its way."""

    def __init__(self, follower: ResultFollower, leader: LeaderProbe) -> None:
        self._follower = follower
        self._leader = leader
        self._connected = False

    def connected(self) -> bool:
        """Whether Redis has answered once. While it is away later this gateway is still the one to tell clients so."""
        self._connected = self._connected or self._follower.up
        return self._connected

    async def missing(self) -> list[str]:
        """Names of what is missing: ``redis``, ``scheduler``, ``worker``."""
        if not self._follower.up:
            return ["redis"]
        try:
            led = await self._leader.present()
        except QueueUnavailable:
            return ["redis"]
        return ([] if led else ["scheduler"]) + ([] if self._follower.workers else ["worker"])
