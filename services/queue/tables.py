"""The routing table's readers: attention workers, and expert workers that look whether they are in it.

In: :class:`RoutingTable`, whenever there is a newer one. Out: the epochs in use, so that seats know when to go.
"""

from __future__ import annotations

import asyncio

from redis.asyncio import Redis

from services.errors import UnreadableMessage
from services.queue.connect import MAX_BLOCK_MS, command
from services.queue.keys import Keys
from services.queue.limits import QueueLimits
from services.queue.quarantine import Quarantine
from services.queue.scripts import Scripts, milliseconds
from services.routing import RoutingTable, decode_table


class TableReader:
    """A reader's view of the table. All methods raise QueueUnavailable while Redis does not answer."""

    def __init__(
        self, redis: Redis, keys: Keys, limits: QueueLimits | None = None, *, quarantine: Quarantine | None = None
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._scripts = Scripts(redis, keys, limits or QueueLimits())
        self._quarantine = quarantine or Quarantine()

    async def read_table(self, known_epoch: int = 0, block_ms: int = 0) -> RoutingTable | None:
        """Waits up to ``block_ms`` for a published table with an epoch above ``known_epoch``; returns it, else None.

        The reader brings only the known epoch, so it misses nothing between calls and connections. Without a newer
        table the call moves some hundred bytes. A table that cannot be read counts as none until the next one is there.
        """
        block = ("BLOCK", min(block_ms, MAX_BLOCK_MS)) if block_ms > 0 else ()
        place = ("STREAMS", self._keys.table, f"{known_epoch}-0")
        reply = await command(self._redis, "XREAD", "COUNT", 1, *block, *place)
        if not reply:
            return None
        name, fields = reply[0][1][-1]
        data = fields.get(b"t", b"")
        try:
            return decode_table(data)
        except UnreadableMessage as error:
            await self._quarantine.put("table", f"epoch {name.decode()}", error, data)
            await asyncio.sleep(min(block_ms, MAX_BLOCK_MS) / 1000)  # it would be there again at once
            return None

    async def note_epoch(self, worker_id: str, epoch: int, lease_s: float) -> int:
        """Reports that the worker uses no table below ``epoch``, and renews its lease. Returns the published epoch (0:
        none).

        Seats of tables from ``epoch`` on stay until a later call. So a worker moves to a newer table first, and notes
        it when no seat that only the older table lists owes it an answer; it takes its first table by :meth:`enter`.
        Call it every quarter of the lease, which only :meth:`SeatRegistry.reap` ends.
        """
        return int(await self._scripts.run("note_epoch", worker_id, milliseconds(lease_s), epoch))

    async def enter(self, worker_id: str, lease_s: float) -> RoutingTable | None:
        """Returns the worker's first table, noted before any of its seats could go; None if none is published."""
        table = await self.read_table()
        while table is not None and await self.note_epoch(worker_id, table.epoch, lease_s) > table.epoch:
            table = await self.read_table()
        return table

    async def forget(self, worker_id: str) -> None:
        """Reports that the worker uses no table any more, so no seat waits for it."""
        await self._scripts.run("forget_reader", worker_id)


def unused(table: RoutingTable | None, worker_id: str, oldest_epoch: int | None) -> bool:
    """Says whether an expert worker that leaves may end: no reader uses a table that lists it.

    Read ``table`` first (None: there is none, or Redis lost it), then ``oldest_epoch`` (None: there are no readers).
    """
    if oldest_epoch is None:
        return True
    return table is not None and oldest_epoch >= table.epoch and all(seat.worker != worker_id for seat in table.seats)
