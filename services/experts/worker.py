"""The expert worker between Redis and its experts. In: the group that it is to hold, by heartbeat. Out: how it fares.

A life: take a seat, load the group that the scheduler assigns, serve it, leave. A seat that is to hold another group
first sees itself out of every table in use, so that no attention worker counts on what it gives up.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from services.errors import QueueUnavailable
from services.messages import ExpertInfo, SeatLoad, SeatReport, SeatRows, SeatStatus
from services.queue.backoff import Backoff, until_answered
from services.queue.expert_side import Assignment, ExpertQueue, Orders
from services.queue.tables import TableReader, unused
from services.routing import RoutingTable, ShardGroup
from services.runtime import in_daemon
from services.runtime.tasks import end_tasks, first_done, unless_stopped

HEARTBEATS_PER_LEASE = 8
FIRST_BEAT_S = 0.05
"""After taking a seat a worker asks for its group, soon and then ever later, up to the pause between heartbeats."""
ROWS_S = 2.0
"""How often the rows counted for each expert are told: of a large model they are tens of kilobytes."""
DEREGISTER_S = 2.0
"""At the end: how long Redis may take to hear it."""

log = logging.getLogger(__name__)


class Serving(Protocol):
    """A loaded group, answering attention workers."""

    @property
    def port(self) -> int: ...

    @property
    def rows_in_flight(self) -> int: ...

    @property
    def busy_s(self) -> float:
        """Spent computing since the start."""

    @property
    def waited_s(self) -> float:
        """By calls that waited to be computed, added up."""

    @property
    def failure(self) -> BaseException | None:
        """What ended it, if it answers nobody any more."""

    def rows(self) -> dict[int, tuple[int, ...]]:
        """Rows computed so far: layer -> one count for each expert of the group, ascending. May wait for a device;
        called in a thread."""

    def drain(self, seconds: float) -> bool:
        """Refuse new calls, answer those that are here, close; whether all were answered."""


Load = Callable[[ShardGroup, int, threading.Event], Serving]
"""``(group, seat, stopped) -> serving``: blocks for as long as reading the weights takes. Once ``stopped`` is set it
may end at once, by any error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds."""

    lease: float
    drain: float


class ServingFailed(RuntimeError):
    """The experts answer nobody any more, because of a fault here. The process must exit with a failure."""


class ExpertWorker:
    """One incarnation. ``info.id`` is never reused; its port is filled in when there is one."""

    def __init__(
        self, *, info: ExpertInfo, queue: ExpertQueue, reader: TableReader, load: Load, timing: Timing
    ) -> None:
        self._info = info
        self._queue, self._reader, self._load, self._timing = queue, reader, load, timing
        self._status: SeatStatus = "waiting"
        self._seat = 0
        self._held: Assignment | None = None
        self._serving: Serving | None = None
        self._serving_since = 0.0
        self._orders = Orders(number=0)
        self._rows_due, self._told = 0.0, ""
        self._counting: tuple[str, asyncio.Future[dict[int, tuple[int, ...]]]] | None = None
        self._news = asyncio.Event()
        self._heartbeat_backoff = Backoff(max_s=min(1.0, timing.lease / 8))

    @property
    def seat(self) -> int:
        """0 before there is one."""
        return self._seat

    @property
    def status(self) -> SeatStatus:
        return self._status

    @property
    def group(self) -> ShardGroup | None:
        """What it has loaded."""
        return self._held.group if self._held else None

    @property
    def serving(self) -> Serving | None:
        return self._serving

    def missing(self) -> list[str]:
        """What keeps the worker from serving; for /ready."""
        if not self._seat:
            return ["a seat"]
        if self._status == "waiting":
            return [_unfulfilled(self._info)]
        return [] if self._status == "ready" else ["experts"]

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop`` or until the scheduler wants it gone; then leave.

        Raises:
            FingerprintMismatch: the namespace serves another model.
            CheckpointError: the experts cannot be loaded.
            ServingFailed: a thread that serves them died; the seat is given up.
        """
        if not await self._take_seat(stop):
            return
        pulse = asyncio.ensure_future(self._keep_lease())
        try:
            await first_done(pulse, self._follow_orders(), stop.wait())
            await self._leave(pulse)
        except ServingFailed:
            await end_tasks([pulse])
            await self._deregister()
            raise
        finally:
            await end_tasks([pulse])
            if self._serving:
                await asyncio.to_thread(self._serving.drain, 0.0)

    async def _take_seat(self, stop: asyncio.Event) -> bool:
        """False if ``stop`` comes before Redis answers; a seat that it gave all the same ends with its lease."""
        join = partial(self._queue.join, self._info, self._timing.lease)
        seat = await unless_stopped(until_answered("seat", join, Backoff()), stop)
        if seat is None:
            return False
        self._seat = seat
        log.info("seat %d", self._seat)
        return True

    async def _follow_orders(self) -> None:
        """Returns when the worker is to leave."""
        while True:
            await self._news.wait()
            self._news.clear()
            orders = self._orders
            if orders.leave:
                log.info("the scheduler wants this seat to leave")
                return
            wanted = orders.assignment
            if wanted is not None and (self._held is None or wanted.digest != self._held.digest):
                await self._change(wanted)

    async def _change(self, wanted: Assignment) -> None:
        self._status = "loading"
        if self._serving is not None:
            try:
                async with asyncio.timeout(self._timing.drain):
                    await self._out_of_all_tables()
            except TimeoutError:
                log.warning("changing groups although a table in use still lists this seat: calls go to replicas")
            await asyncio.to_thread(self._serving.drain, self._timing.drain)
            self._serving, self._held = None, None
        log.info("loading group %d", wanted.group.number)
        serving = await self._loaded(wanted.group)
        info = msgspec.structs.replace(self._info, port=serving.port)
        await until_answered("seat", partial(self._queue.join, info, self._timing.lease), Backoff())
        self._serving_since = time.monotonic()
        self._serving, self._held, self._info, self._status = serving, wanted, info, "ready"
        await until_answered("heartbeat", self._heartbeat, self._heartbeat_backoff)
        log.info("group %d is ready on port %d", wanted.group.number, serving.port)

    async def _loaded(self, group: ShardGroup) -> Serving:
        stopped = threading.Event()
        try:
            return await in_daemon("load", partial(self._load, group, self._seat, stopped))
        finally:
            stopped.set()

    async def _leave(self, pulse: asyncio.Future[None]) -> None:
        """Out of the table first, then out of the way."""
        was_serving = self._serving is not None
        self._status = "leaving"
        try:
            async with asyncio.timeout(self._timing.drain if was_serving else DEREGISTER_S):
                await until_answered("leaving", partial(self._queue.leave, self._info.id), Backoff())
                if was_serving:
                    await self._out_of_all_tables()
        except TimeoutError:
            log.warning("leaving although a table in use still lists this seat: calls go to replicas")
        if self._serving:
            await asyncio.to_thread(self._serving.drain, self._timing.drain)
            self._serving = None
        await end_tasks([pulse])
        await self._deregister()

    async def _deregister(self) -> None:
        try:
            async with asyncio.timeout(DEREGISTER_S):
                await until_answered("leaving", partial(self._queue.deregister, self._info.id), Backoff())
        except TimeoutError:
            log.warning("left without deregistering: Redis does not answer, the lease will expire")

    async def _out_of_all_tables(self) -> None:
        table: RoutingTable | None = None
        while True:
            newer = partial(self._reader.read_table, table.epoch if table else 0)
            table = await until_answered("routing table", newer, Backoff()) or table
            await until_answered("heartbeat", self._heartbeat, self._heartbeat_backoff)  # asks which epochs are in use
            if unused(table, self._info.id, self._orders.oldest_epoch):
                return
            await asyncio.sleep(min(0.1, self._timing.lease / HEARTBEATS_PER_LEASE))

    async def _keep_lease(self) -> None:
        pause_s = FIRST_BEAT_S
        while True:
            if self._serving and (failure := self._serving.failure):
                raise ServingFailed("A thread that serves experts died.") from failure
            await until_answered("heartbeat", self._heartbeat, self._heartbeat_backoff)
            pause_s = min(2 * pause_s, self._timing.lease / HEARTBEATS_PER_LEASE)
            await asyncio.sleep(pause_s)

    async def _counted(self, serving: Serving, digest: str) -> SeatRows | None:
        """None while the device has not answered: it may take seconds, as long as a lane is made, and a lease must not
        wait for it."""
        if self._counting is None:
            self._counting = digest, asyncio.ensure_future(asyncio.to_thread(serving.rows))
        of, counted = self._counting
        await asyncio.wait({counted}, timeout=self._timing.lease / (2 * HEARTBEATS_PER_LEASE))
        if not counted.done():
            return None
        self._counting = None
        rows = counted.result()
        return SeatRows(digest=digest, rows=rows) if of == digest else None

    def _load_of(self, serving: Serving) -> SeatLoad:
        return SeatLoad(up_s=time.monotonic() - self._serving_since, busy_s=serving.busy_s, waited_s=serving.waited_s)

    async def _heartbeat(self) -> None:
        serving, held = self._serving, self._held
        report = SeatReport(
            status=self._status,
            group=held.group.number if held else None,
            digest=held.digest if held else "",
            outstanding_rows=serving.rows_in_flight if serving else 0,
            load=self._load_of(serving) if serving else None,
        )
        rows = None
        if serving and held and (time.monotonic() >= self._rows_due or self._told != held.digest):
            rows = await self._counted(serving, held.digest)
        try:  # a reply lost on the way must not cost the lease
            async with asyncio.timeout(self._timing.lease / HEARTBEATS_PER_LEASE):
                self._orders = await self._queue.heartbeat(self._info.id, report, rows)
        except TimeoutError as error:
            raise QueueUnavailable("Redis did not answer a heartbeat in time.") from error
        self._seat = self._orders.number or self._seat
        if rows is not None:
            self._rows_due, self._told = time.monotonic() + ROWS_S, rows.digest
        self._news.set()


def _unfulfilled(info: ExpertInfo) -> str:
    """The group that a worker hopes for, and why there may never be one."""
    wish = "a shard group" if info.group is None else f"shard group {info.group}"
    if info.group is not None and info.group >= info.num_experts > 0:
        return f"{wish}: there is none, for the model has {info.num_experts} experts in a layer"
    return wish if info.max_experts is None else f"{wish}, with room for {info.max_experts} experts of a layer"
