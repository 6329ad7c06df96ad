"""Reading a Redis stream that has one reader: blocking reads, and trimming of what was read."""

from __future__ import annotations

from collections.abc import Mapping

from redis.asyncio import Redis

from services.queue.connect import MAX_BLOCK_MS, commands

FIRST_ID = "0-0"
"""The id before every entry."""
POSITION_MS = 60_000
"""How long a position is kept after the reader last moved."""


class StreamReader:
    """The one reader of the stream ``key``. No consumer group, so there is none to lose.

    ``position``: a key that always holds the id of the last entry that was handled, for writers that want to know how
    far the reader is.
    """

    def __init__(
        self,
        redis: Redis,
        key: str,
        *,
        trim_every: int = 64,
        trim_bytes: int = 1 << 20,
        count: int = 64,
        position: str | None = None,
    ) -> None:
        self._redis = redis
        self._key = key
        self._trim_every = trim_every
        self._trim_bytes = trim_bytes
        self._count = count
        self._position = position
        self._told = FIRST_ID
        self._untrimmed = self._untrimmed_bytes = 0

    async def read(self, last_id: str, block_ms: int) -> tuple[str, list[Mapping[bytes, bytes]]]:
        """Entries after ``last_id``, waiting up to ``block_ms`` for the first. All up to ``last_id`` are handled: that
        is told, and now and then they are trimmed.
        """
        block = ("BLOCK", min(block_ms, MAX_BLOCK_MS)) if block_ms > 0 else ()
        calls: list[tuple[str | int, ...]] = []
        if self._position is not None and last_id != self._told:
            calls.append(("SET", self._position, last_id, "PX", POSITION_MS))
        due = self._untrimmed >= self._trim_every or self._untrimmed_bytes >= self._trim_bytes
        if due:
            calls.append(("XTRIM", self._key, "MINID", last_id))
        calls.append(("XREAD", "COUNT", self._count, *block, "STREAMS", self._key, last_id))
        reply = (await commands(self._redis, *calls))[-1]
        self._told = last_id
        if due:
            self._untrimmed = self._untrimmed_bytes = 0
        if not reply:
            return last_id, []
        entries = reply[0][1]
        self._untrimmed += len(entries)
        self._untrimmed_bytes += sum(len(value) for _, fields in entries for value in fields.values())
        return entries[-1][0].decode(), [fields for _, fields in entries]
