"""Follows the routing table for a link to experts in other processes, and hands every new table to the link.

The link uses the newest table from the next exchange on. Redis keeps, under a lease, which older tables this worker
still needs: a seat that leaves waits until no living worker needs a table that lists it.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from functools import partial

from services.fabric.link import RemoteLink
from services.queue.backoff import Backoff, until_answered
from services.queue.tables import TableReader
from services.routing import RoutingTable
from services.runtime.tasks import first_done

NOTES_PER_LEASE = 8
BLOCK_MS = 500
SOON_S = 0.02

log = logging.getLogger(__name__)


class TableFollower:
    """Runs on the event loop, next to the engine's thread. ``worker_id`` is the attention worker's incarnation."""

    def __init__(
        self, link: RemoteLink, reader: TableReader, *, worker_id: str, fingerprint: str, lease_s: float
    ) -> None:
        self._link = link
        self._reader = reader
        self._worker_id = worker_id
        self._fingerprint = fingerprint
        self._lease_s = lease_s
        self._epoch = 0
        self._news = asyncio.Event()

    def missing(self) -> list[str]:
        """Return the shard groups, or the table, that it waits for; for /ready."""
        if not self._epoch:
            return ["a routing table"]
        return [f"experts of group {number}" for number in self._link.missing()]

    async def ready(self) -> None:
        """Return once every shard group can be reached."""
        logged = ""
        while self.missing():
            if not await asyncio.to_thread(self._link.wait_ready, BLOCK_MS / 1000):
                if logged != (awaited := ", ".join(self.missing())):
                    log.info("waiting for %s", awaited)
                logged = awaited
            elif not self._epoch:
                await self._news.wait()

    async def run(self) -> None:
        """Follow until cancelled; then no seat waits for this worker any more.

        Raises:
            FingerprintMismatch: the namespace went on to another model.
        """
        try:
            await self._begin()
            await first_done(self._follow(), self._note())
        finally:
            await self._deregister()

    async def _begin(self) -> None:
        """Take the first table of this model. Another model's is from before: a newer one will come."""
        enter = partial(self._reader.enter, self._worker_id, self._lease_s)
        while True:
            table = await until_answered("routing table", enter, Backoff())
            if table is not None and table.fingerprint == self._fingerprint:
                break
            newer = partial(self._reader.read_table, table.epoch if table else 0, BLOCK_MS)
            await until_answered("routing table", newer, Backoff())
        self._take(table)

    async def _follow(self) -> None:
        backoff = Backoff()
        while True:
            read = partial(self._reader.read_table, self._epoch, BLOCK_MS)
            table = await until_answered("routing table", read, backoff)
            if table is not None:
                self._take(table)

    def _take(self, table: RoutingTable) -> None:
        log.info("using routing table %d (%d seats)", table.epoch, len(table.seats))
        self._link.apply(table)
        self._epoch = table.epoch
        self._news.set()

    async def _note(self) -> None:
        backoff = Backoff()
        while True:
            self._news.clear()
            oldest = self._link.oldest_epoch()
            note = partial(self._reader.note_epoch, self._worker_id, oldest, self._lease_s)
            await until_answered("routing table", note, backoff)
            with suppress(TimeoutError):  # a seat that leaves waits for the exchanges of the table before
                async with asyncio.timeout(SOON_S if oldest < self._epoch else self._lease_s / NOTES_PER_LEASE):
                    await self._news.wait()

    async def _deregister(self) -> None:
        try:
            async with asyncio.timeout(1.0):
                await self._reader.forget(self._worker_id)
        except Exception as error:  # noqa: BLE001  the lease ends it otherwise
            log.debug("cannot deregister from the routing table: %r", error)
