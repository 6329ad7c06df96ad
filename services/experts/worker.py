"""The expert worker between Redis and its experts. In: the group to hold, by heartbeat. Out: status, load and rows.

A worker takes a seat, loads the group that the scheduler assigns, serves it, and leaves. Before it changes its group it
waits until no table in use lists its seat, so that no attention worker needs the old group.
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

from services.errors import OutOfMemory, QueueUnavailable
from services.messages import ExpertInfo, SeatLoad, SeatReport, SeatRows, SeatStatus
from services.queue.backoff import Backoff, until_answered
from services.queue.expert_side import Assignment, ExpertQueue, Orders
from services.queue.tables import TableReader, unused
from services.routing import RoutingTable, ShardGroup
from services.runtime import in_daemon
from services.runtime.tasks import end_tasks, first_done, forget_frames, unless_stopped

HEARTBEATS_PER_LEASE = 8
FIRST_BEAT_S = 0.05
"""First pause between heartbeats after a worker takes a seat, to get its group soon; the pause doubles each time."""
ROWS_S = 2.0
"""Interval at which the worker reports the rows of each expert: for a large model they are tens of kilobytes."""
DEREGISTER_S = 2.0
"""Timeout for deregistering."""

log = logging.getLogger(__name__)


class Serving(Protocol):
    """A loaded group, answering attention workers."""

    @property
    def port(self) -> int: ...

    @property
    def rows_in_flight(self) -> int: ...

    @property
    def busy_s(self) -> float:
        """Seconds spent computing since the start."""

    @property
    def waited_s(self) -> float:
        """Seconds that calls waited to be computed, added up over all calls."""

    @property
    def failure(self) -> BaseException | None:
        """The error by which it stopped serving, if it did."""

    def rows(self) -> dict[int, tuple[int, ...]]:
        """Return layer -> rows computed so far by each expert of the group, ascending. May wait for a device."""

    def drain(self, seconds: float) -> bool:
        """Refuse new calls, answer those that are here, close; return whether all were answered."""


Load = Callable[[ShardGroup, int, threading.Event], Serving]
"""``(group, seat, stopped) -> serving``: blocks while it reads the weights. Once ``stopped`` is set it may raise any
error at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Periods in seconds: the lease of a seat, and the longest time for draining."""

    lease: float
    drain: float


class _SleepOrder:
    """The level of a sleep, 0 to be awake; ``done`` is for whoever waits."""

    def __init__(self, level: int = 0, done: asyncio.Future[None] | None = None) -> None:
        self.level, self._done = level, done

    @property
    def awaited(self) -> bool:
        """Whether somebody waits."""
        return self._done is not None and not self._done.done()

    def end(self, error: Exception | None = None) -> None:
        """Let whoever waits go on."""
        if self._done is not None and not self._done.done():
            self._done.set_exception(error) if error else self._done.set_result(None)


class ServingFailed(RuntimeError):
    """A thread that serves the experts has died. The process must exit with a failure."""


class ExpertWorker:
    """One incarnation of an expert worker.

    Args:
        info: what is registered. No later worker has ``info.id``; the port is filled in once the experts are served.
        rest: called with the level of a sleep, without a group that is served; gives the memory of ``load`` back.
    """

    def __init__(
        self,
        *,
        info: ExpertInfo,
        queue: ExpertQueue,
        reader: TableReader,
        load: Load,
        timing: Timing,
        rest: Callable[[int], object] = lambda _: None,
    ) -> None:
        self._info = info
        self._queue, self._reader, self._load, self._timing = queue, reader, load, timing
        self.status: SeatStatus = "waiting"
        self.seat = 0
        """Number of the seat; 0 before there is one."""
        self.held: Assignment | None = None
        """The group that is loaded."""
        self.serving: Serving | None = None
        self._serving_since = 0.0
        self._orders = Orders(number=0)
        self._rows_due, self._reported = 0.0, ""
        self._counting: tuple[str, asyncio.Future[dict[int, tuple[int, ...]]]] | None = None
        self._new_orders = asyncio.Event()
        self._rest = rest
        self._sleep = _SleepOrder()
        self._rests = 0
        """The level at which it sleeps."""
        self._heartbeat_backoff = Backoff(max_s=min(1.0, timing.lease / 8))

    def missing(self) -> list[str]:
        """Return what the worker waits for before it serves, for /ready; nothing while it is to sleep."""
        if self._sleep.level:
            return []
        if not self.seat:
            return ["a seat"]
        if self.status == "waiting":
            return [_unfulfilled(self._info)]
        return [] if self.status == "ready" else ["experts"]

    async def fall_asleep(self, level: int) -> None:
        """Stop serving and give the memory back, but keep the seat."""
        await self._turn(level)

    async def wake_up(self) -> None:
        """Serve the group that is assigned now. Raises OutOfMemory; the worker sleeps on then."""
        await self._turn(0)

    async def _turn(self, level: int) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleep = _SleepOrder(level, done)
        self._new_orders.set()
        await done

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop`` or until the scheduler orders it to leave; then leave it.

        Raises:
            FingerprintMismatch: the namespace serves another model.
            CheckpointError: the experts cannot be loaded.
            ServingFailed: a thread that serves them died; the seat is given up.
        """
        if not await self._take_seat(stop):
            return
        heartbeats = asyncio.ensure_future(self._keep_lease())
        try:
            await first_done(heartbeats, self._follow_orders(), stop.wait())
            await self._leave(heartbeats)
        except ServingFailed:
            await end_tasks([heartbeats])
            await self._deregister()
            raise
        finally:
            await end_tasks([heartbeats])
            if self.serving:
                await asyncio.to_thread(self.serving.drain, 0.0)

    async def _take_seat(self, stop: asyncio.Event) -> bool:
        """Return False if ``stop`` is set before Redis answers; a seat given meanwhile ends with its lease."""
        join = partial(self._queue.join, self._info, self._timing.lease)
        seat = await unless_stopped(until_answered("seat", join, Backoff()), stop)
        if seat is None:
            return False
        self.seat = seat
        log.info("took seat %d", self.seat)
        return True

    async def _follow_orders(self) -> None:
        """Sleep, wake up and change groups as is ordered; return when the worker has to leave."""
        while True:
            await self._new_orders.wait()
            self._new_orders.clear()
            sleep, orders = self._sleep, self._orders
            if orders.leave:
                log.info("the scheduler has asked this seat to leave")
                return
            if await self._followed(sleep, orders):
                sleep.end()
            else:  # not where the error is caught: it holds what the try took
                self._sleep = _SleepOrder(self._rests)
                await asyncio.to_thread(self._rest, self._rests)

    async def _followed(self, sleep: _SleepOrder, orders: Orders) -> bool:
        """Return False where there was too little memory to wake up; whoever ordered it has heard then."""
        try:
            await (self._rest_at(sleep.level) if sleep.level else self._hold(orders.assignment))
        except OutOfMemory as error:
            if not (self._rests and sleep.awaited):
                raise
            forget_frames(error)  # first: a future keeps those that an error has
            sleep.end(error)
            return False
        return True

    async def _rest_at(self, level: int) -> None:
        if level > self._rests:
            await self._stop_serving()
            await asyncio.to_thread(self._rest, level)
            self._rests = level

    async def _hold(self, wanted: Assignment | None) -> None:
        if wanted is not None and (self.held is None or wanted.digest != self.held.digest):
            await self._change(wanted)
        self._rests = 0

    async def _stop_serving(self) -> None:
        self.status = "loading"
        if self.serving is not None:
            try:
                async with asyncio.timeout(self._timing.drain):
                    await self._out_of_all_tables()
            except TimeoutError:
                log.warning("not serving while a routing table in use still lists this seat; its calls go to replicas")
            await asyncio.to_thread(self.serving.drain, self._timing.drain)
            self.serving, self.held = None, None

    async def _change(self, wanted: Assignment) -> None:
        await self._stop_serving()
        log.info("loading group %d", wanted.group.number)
        serving = await self._loaded(wanted.group)
        info = msgspec.structs.replace(self._info, port=serving.port)
        await until_answered("seat", partial(self._queue.join, info, self._timing.lease), Backoff())
        self._serving_since = time.monotonic()
        self.serving, self.held, self._info, self.status = serving, wanted, info, "ready"
        await until_answered("heartbeat", self._heartbeat, self._heartbeat_backoff)
        log.info("serving group %d on port %d", wanted.group.number, serving.port)

    async def _loaded(self, group: ShardGroup) -> Serving:
        stopped = threading.Event()
        try:
            return await in_daemon("load", partial(self._load, group, self.seat, stopped))
        finally:
            stopped.set()

    async def _leave(self, heartbeats: asyncio.Future[None]) -> None:
        """Leave the routing tables first, then drain, then give up the seat."""
        was_serving = self.serving is not None
        self.status = "leaving"
        try:
            async with asyncio.timeout(self._timing.drain if was_serving else DEREGISTER_S):
                await until_answered("leaving", partial(self._queue.leave, self._info.id), Backoff())
                if was_serving:
                    await self._out_of_all_tables()
        except TimeoutError:
            log.warning("leaving while a routing table in use still lists this seat; its calls go to replicas")
        if self.serving:
            await asyncio.to_thread(self.serving.drain, self._timing.drain)
            self.serving = None
        await end_tasks([heartbeats])
        await self._deregister()

    async def _deregister(self) -> None:
        try:
            async with asyncio.timeout(DEREGISTER_S):
                await until_answered("leaving", partial(self._queue.deregister, self._info.id), Backoff())
        except TimeoutError:
            log.warning("stopping without deregistering: Redis does not answer; the lease will expire")

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
            if self.serving and (failure := self.serving.failure):
                raise ServingFailed("A thread that serves experts died.") from failure
            await until_answered("heartbeat", self._heartbeat, self._heartbeat_backoff)
            pause_s = min(2 * pause_s, self._timing.lease / HEARTBEATS_PER_LEASE)
            await asyncio.sleep(pause_s)

    async def _counted(self, serving: Serving, digest: str) -> SeatRows | None:
        """Return the rows, or None while the device has not answered.

        That may take seconds, while a lane is opened, and the lease must not wait for it.
        """
        if self._counting is None:
            self._counting = digest, asyncio.ensure_future(asyncio.to_thread(serving.rows))
        of, counted = self._counting
        await asyncio.wait({counted}, timeout=self._timing.lease / (2 * HEARTBEATS_PER_LEASE))
        if not counted.done():
            return None
        self._counting = None
        rows = counted.result()
        return SeatRows(digest=digest, rows=rows) if of == digest else None

    async def _heartbeat(self) -> None:
        serving, held = self.serving, self.held
        load, rows = None, None
        if serving:
            up_s = time.monotonic() - self._serving_since
            load = SeatLoad(up_s=up_s, busy_s=serving.busy_s, waited_s=serving.waited_s)
        report = SeatReport(
            status=self.status,
            group=held.group.number if held else None,
            digest=held.digest if held else "",
            outstanding_rows=serving.rows_in_flight if serving else 0,
            load=load,
        )
        if serving and held and (time.monotonic() >= self._rows_due or self._reported != held.digest):
            rows = await self._counted(serving, held.digest)
        try:  # a reply lost on the way must not cost the lease
            async with asyncio.timeout(self._timing.lease / HEARTBEATS_PER_LEASE):
                self._orders = await self._queue.heartbeat(self._info.id, report, rows)
        except TimeoutError as error:
            raise QueueUnavailable("Redis did not answer a heartbeat in time.") from error
        self.seat = self._orders.number or self.seat
        if rows is not None:
            self._rows_due, self._reported = time.monotonic() + ROWS_S, rows.digest
        self._new_orders.set()


def _unfulfilled(info: ExpertInfo) -> str:
    """Return the group that a worker waits for, and why it may never get one."""
    wish = "a shard group" if info.group is None else f"shard group {info.group}"
    if info.group is not None and info.group >= info.num_experts > 0:
        return f"{wish}: there is none, for the model has {info.num_experts} experts in a layer"
    return wish if info.max_experts is None else f"{wish}, with room for {info.max_experts} experts of a layer"
