"""An estimate of Redis TIME, so that a process judges a deadline by the clock that set it, without a round trip."""

from __future__ import annotations

import time

from redis.asyncio import Redis

from services.queue.connect import queue_errors


class RedisClock:
    """Redis TIME, extrapolated by the local monotonic clock from the last :meth:`sync`. Readable from any thread."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._offset_ms = time.time() * 1000 - time.monotonic() * 1000  # a guess, until the first sync

    async def sync(self) -> None:
        """Asks Redis. The offset is exact to half the round trip.

        Raises:
            QueueUnavailable: Redis does not answer.
        """
        before = time.monotonic()
        with queue_errors():
            seconds, microseconds = await self._redis.time()
        middle = (before + time.monotonic()) / 2
        self._offset_ms = seconds * 1000 + microseconds / 1000 - middle * 1000

    def now_ms(self) -> int:
        return int(time.monotonic() * 1000 + self._offset_ms)
