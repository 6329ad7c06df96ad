"""Reading a Redis stream that has one reader: blocking reads, and trimming of what was read."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from redis.asyncio import Redis

from services.errors import QueueUnavailable
from services.queue.connect import MAX_BLOCK_MS, command

FIRST_ID = "0-0"
"""The id before every entry."""
POSITION_MS = 60_000
"""How long a position is kept after it was written."""


class StreamReader:
    """The one reader of the stream ``key``. No consumer group, so there is none to lose.

    What was handled is trimmed once it is ``trim_every`` entries or ``trim_bytes``, beside the reading, which waits for
    nothing but the next entry. ``position`` is a key that then gets the id of the last entry that was handled, for
    writers that have to know how far the reader is.
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
        self._untrimmed = self._untrimmed_bytes = 0
        self._trimming: asyncio.Task[None] | None = None

    async def read(self, last_id: str, block_ms: int) -> tuple[str, list[Mapping[bytes, bytes]]]:
        """Entries after ``last_id``, waiting up to ``block_ms`` for the first. Those up to ``last_id`` are handled."""
        self._trim(last_id)
        block = ("BLOCK", min(block_ms, MAX_BLOCK_MS)) if block_ms > 0 else ()
        reply = await command(self._redis, "XREAD", "COUNT", self._count, *block, "STREAMS", self._key, last_id)
        if not reply:
            return last_id, []
        entries = reply[0][1]
        self._untrimmed += len(entries)
        self._untrimmed_bytes += sum(len(value) for _, fields in entries for value in fields.values())
        return entries[-1][0].decode(), [fields for _, fields in entries]

    def _trim(self, last_id: str) -> None:
        due = self._untrimmed >= self._trim_every or self._untrimmed_bytes >= self._trim_bytes
        if due and (self._trimming is None or self._trimming.done()):
            self._untrimmed = self._untrimmed_bytes = 0
            self._trimming = asyncio.create_task(self._trim_to(last_id))

    async def _trim_to(self, last_id: str) -> None:
        with suppress(QueueUnavailable):  # the next one trims this, too
            if self._position is not None:
                await command(self._redis, "SET", self._position, last_id, "PX", POSITION_MS)
            await command(self._redis, "XTRIM", self._key, "MINID", last_id)
