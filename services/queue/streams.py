"""Reads a Redis stream that has one reader: entries come out of blocking reads, and what was handled is trimmed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from redis.asyncio import Redis

from services.errors import QueueUnavailable
from services.queue.connect import MAX_BLOCK_MS, command
from services.runtime.tasks import end_tasks

FIRST_ID = "0-0"
"""The id before every entry."""
POSITION_MS = 60_000
"""How long a position is kept after it was written."""


class _Place(NamedTuple):
    """A place in a stream: an entry's id, and how much had been read up to it."""

    last_id: str = FIRST_ID
    entries: int = 0
    nbytes: int = 0


def _number(entry_id: str) -> tuple[int, int]:
    ms, _, number = entry_id.partition("-")
    return int(ms), int(number)


class StreamReader:
    """The only reader of the stream ``key``. There is no consumer group, so none can be lost.

    A separate task trims what was handled once it is ``trim_every`` entries or ``trim_bytes``, and when nothing is new:
    reads wait for nothing but the next entry. Under the key ``position``, if given, the task writes the id of the last
    handled entry, for writers that have to know how far the reader is.
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
        self._read = self._handled = self._trimmed = _Place()
        self._trimming: asyncio.Task[None] | None = None

    async def read(self, last_id: str, block_ms: int) -> tuple[str, list[Mapping[bytes, bytes]]]:
        """Returns entries after ``last_id``, up to which all are handled; waits up to ``block_ms`` for the first."""
        self._handled = self._read._replace(last_id=last_id)
        if self._due:
            self._trim()
        block = ("BLOCK", min(block_ms, MAX_BLOCK_MS)) if block_ms > 0 else ()
        reply = await command(self._redis, "XREAD", "COUNT", self._count, *block, "STREAMS", self._key, last_id)
        if reply:
            return self._taken(reply[0][1])
        if again := await self._begun_again():
            self._trimmed = self._trimmed._replace(last_id=FIRST_ID)
            return self._taken(again)
        if self._handled != self._trimmed:
            self._trim()
        return last_id, []

    async def _begun_again(self) -> Sequence[tuple[bytes, Mapping[bytes, bytes]]]:
        """Returns entries of a stream that Redis forgot and that began again after its clock had stepped back: their
        ids are below what this reader has trimmed. Reads on would wait until the clock is there again."""
        trimmed = _number(self._trimmed.last_id)  # before the call: what is trimmed during it may be in the reply
        oldest = await self._from_its_start(1)  # an idle reader asks each time, and for no more than it needs
        return await self._from_its_start(self._count) if oldest and _number(oldest[0][0].decode()) < trimmed else ()

    async def _from_its_start(self, count: int) -> Sequence[tuple[bytes, Mapping[bytes, bytes]]]:
        reply = await command(self._redis, "XREAD", "COUNT", count, "STREAMS", self._key, FIRST_ID)
        return reply[0][1] if reply else ()

    def _taken(self, entries: Sequence[tuple[bytes, Mapping[bytes, bytes]]]) -> tuple[str, list[Mapping[bytes, bytes]]]:
        size = sum(len(value) for _, fields in entries for value in fields.values())
        newest = entries[-1][0].decode()
        self._read = _Place(newest, self._read.entries + len(entries), self._read.nbytes + size)
        return newest, [fields for _, fields in entries]

    async def close(self) -> None:
        """Ends the trimming task."""
        if self._trimming is not None:
            await end_tasks([self._trimming])

    @property
    def _due(self) -> bool:
        entries, nbytes = self._handled.entries - self._trimmed.entries, self._handled.nbytes - self._trimmed.nbytes
        return entries > 0 and (entries >= self._trim_every or nbytes >= self._trim_bytes)

    def _trim(self) -> None:
        if self._trimming is None or self._trimming.done():
            self._trimming = asyncio.create_task(self._trim_to_handled())

    async def _trim_to_handled(self) -> None:
        with suppress(QueueUnavailable):  # the next task trims this, too
            while True:
                place = self._handled
                await command(self._redis, "XTRIM", self._key, "MINID", place.last_id)
                self._trimmed = place
                if self._position is not None:  # a full server refuses this, unlike the trimming
                    await command(self._redis, "SET", self._position, place.last_id, "PX", POSITION_MS)
                if not self._due:
                    return
