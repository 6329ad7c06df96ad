"""Reading a Redis stream that has one reader: blocking reads, and trimming of what was read."""

from __future__ import annotations

from collections.abc import Mapping

from redis.asyncio import Redis

from services.queue.connect import MAX_BLOCK_MS, command

FIRST_ID = "0-0"
"""The id before every entry."""


class StreamReader:
    """The one reader of the stream ``key``. No consumer group, so there is none to lose."""

    def __init__(
        self, redis: Redis, key: str, *, trim_every: int = 64, trim_bytes: int = 1 << 20, count: int = 64
    ) -> None:
        self._redis = redis
        self._key = key
        self._trim_every = trim_every
        self._trim_bytes = trim_bytes
        self._count = count
        self._untrimmed = self._untrimmed_bytes = 0

    async def read(self, last_id: str, block_ms: int) -> tuple[str, list[Mapping[bytes, bytes]]]:
        """Entries after ``last_id``, waiting up to ``block_ms`` for the first; trims up to ``last_id`` now and then."""
        if self._untrimmed >= self._trim_every or self._untrimmed_bytes >= self._trim_bytes:
            await command(self._redis, "XTRIM", self._key, "MINID", last_id)
            self._untrimmed = self._untrimmed_bytes = 0
        block = ("BLOCK", min(block_ms, MAX_BLOCK_MS)) if block_ms > 0 else ()
        reply = await command(self._redis, "XREAD", "COUNT", self._count, *block, "STREAMS", self._key, last_id)
        if not reply:
            return last_id, []
        entries = reply[0][1]
        self._untrimmed += len(entries)
        self._untrimmed_bytes += sum(len(value) for _, fields in entries for value in fields.values())
        return entries[-1][0].decode(), [fields for _, fields in entries]
