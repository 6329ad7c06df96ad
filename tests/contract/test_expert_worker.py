"""An expert worker's life over a real Redis, with the scheduler's placement next to it: seat, group, table, end."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec import structs
from testkit.fabric.expert_floor import Floor, expert
from testkit.processes.background import ended
from testkit.waiting import LIMIT_S, eventually

from services.attention.routing_table import TableFollower
from services.errors import CheckpointError, OutOfMemory, QueueUnavailable, StaleLeader
from services.experts.worker import ExpertWorker, ServingFailed, Timing
from services.placement import Hysteresis
from services.queue.limits import QueueLimits
from services.queue.scheduler_side import SchedulerQueue
from services.routing import RoutingTable, ShardGroup, even_groups
from services.scheduler.experts import ExpertPlacement, PlacementEvents

LEASE_S = 16.0
"""No seat is lost while a busy machine holds this process up."""
READER = "attention"


@dataclass
class Served:
    group: ShardGroup
    port: int
    rows_in_flight: int = 0
    busy_s: float = 0.0
    waited_s: float = 0.0
    drained: bool = False
    failure: BaseException | None = None

    def rows(self) -> dict[int, tuple[int, ...]]:
        return {layer: tuple(1 for _ in ids) for layer, ids in self.group.experts.items()}

    def drain(self, seconds: float) -> bool:  # noqa: ARG002
        self.drained = True
        return True


@dataclass
class Link:
    """Takes tables; ``busy`` names the epoch of an exchange under way."""

    tables: list[RoutingTable] = field(default_factory=list)
    busy: int | None = None

    def apply(self, table: RoutingTable) -> None:
        self.tables.append(table)

    def oldest_epoch(self) -> int:
        return self.busy or self.tables[-1].epoch

    def missing(self) -> tuple[int, ...]:
        return () if self.tables else (0,)

    def wait_ready(self, seconds: float) -> bool:  # noqa: ARG002
        return bool(self.tables)


class Stage:
    """A floor with a leader that turns, expert workers and what they loaded."""

    def __init__(self, floor: Floor, groups: int) -> None:
        self.floor = floor
        self.placement = ExpertPlacement(floor.registry, floor.reader, groups=groups)
        self.loaded: list[Served] = []
        self.tasks: dict[str, tuple[ExpertWorker, asyncio.Event, asyncio.Task[None]]] = {}

    def load(self, group: ShardGroup, seat: int, stopped: threading.Event) -> Served:  # noqa: ARG002
        self.loaded.append(Served(group, port=7000 + len(self.loaded)))
        return self.loaded[-1]

    def start(
        self,
        name: str,
        load: Callable[..., Served] | None = None,
        rest: Callable[[int], object] = lambda _: None,
        **wishes: int,
    ) -> ExpertWorker:
        info = structs.replace(expert(name), num_experts=8, layers=(0, 1), **wishes)
        worker = ExpertWorker(
            info=info,
            queue=self.floor.new_experts(),
            reader=self.floor.reader,
            load=load or self.load,
            timing=Timing(lease=LEASE_S, drain=5.0),
            rest=rest,
        )
        stop = asyncio.Event()
        self.tasks[name] = (worker, stop, asyncio.create_task(worker.run(stop)))
        return worker

    async def until(self, condition: Callable[[], bool]) -> None:
        async def turned() -> bool:
            await self.placement.turn(self.floor.e)
            return condition()

        await eventually(turned)

    async def death_of(self, name: str, error: type[Exception], match: str | None = None) -> None:
        """The worker ends by itself, with ``error``."""
        _, _, task = self.tasks.pop(name)
        await self.until(task.done)
        with pytest.raises(error, match=match):
            task.result()

    async def until_seats(self, workers: set[str]) -> None:
        """Without a turn of the leader."""

        async def there() -> bool:
            return set(await self.floor.seats()) == workers

        await eventually(there, f"the seats of {workers}")

    async def until_listed(self, *workers: str) -> None:
        """A worker that calls itself ready has yet to report it to Redis, where the leader reads it."""

        async def listed() -> bool:
            await self.placement.turn(self.floor.e)
            table = await self.floor.reader.read_table()
            return table is not None and sorted(seat.worker for seat in table.seats) == sorted(workers)

        await eventually(listed, f"a table of {workers}")

    async def table(self) -> RoutingTable:
        table = await self.floor.reader.read_table()
        assert table is not None
        return table

    async def listed(self) -> dict[str, int]:
        return {seat.worker: seat.port for seat in (await self.table()).seats}


@asynccontextmanager
async def stage_of(floor: Floor, groups: int) -> AsyncIterator[Stage]:
    stage = Stage(floor, groups)
    try:
        yield stage
    finally:
        await ended(task for _, _, task in stage.tasks.values())


@pytest.fixture(autouse=True)
def _frequent_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.experts.worker.HEARTBEATS_PER_LEASE", 80)


@pytest.mark.parametrize(
    ("wishes", "says"),
    [
        ({"group": 8}, "shard group 8: there is none, for the model has 8 experts in a layer"),
        ({"group": 2}, "shard group 2"),
        ({"group": 0, "max_experts": 1}, "shard group 0, with room for 1 experts of a layer"),
    ],
)
async def test_a_worker_without_a_group_says_which_one_it_waits_for(floor, wishes, says):
    async with stage_of(floor, groups=2) as stage:
        worker = stage.start("a", **wishes)
        await stage.until_seats({"a"})
        await stage.placement.turn(floor.e)
        assert worker.missing() == [says]


async def test_workers_get_groups_load_them_and_are_listed_with_their_ports(floor):
    async with stage_of(floor, groups=2) as stage:
        workers = [stage.start("a"), stage.start("b")]
        assert workers[0].missing() == ["a seat"]
        await stage.until(lambda: all(worker.status == "ready" for worker in workers))
        await stage.until(lambda: not any(worker.missing() for worker in workers))
        await stage.until_listed("a", "b")
        assert await stage.listed() == {"a": workers[0].serving.port, "b": workers[1].serving.port}
        assert {worker.held.group.number for worker in workers} == {0, 1}
        seats = {worker.seat for worker in workers}
        async with asyncio.timeout(LIMIT_S):
            while (await floor.registry.rows()).keys() != seats:
                await asyncio.sleep(0.01)


async def test_counted_rows_travel_once_in_a_while_and_not_with_each_heartbeat(floor, monkeypatch):
    monkeypatch.setattr("services.experts.worker.ROWS_S", 3600.0)  # they are due again when the test says so
    async with stage_of(floor, groups=1) as stage:
        worker = stage.start("a")
        heartbeat, reported = worker._queue.heartbeat, []

        async def watched(*arguments: object) -> object:
            reported.append(arguments[2])
            return await heartbeat(*arguments)

        worker._queue.heartbeat = watched
        await stage.until(lambda: worker.status == "ready")
        await stage.until(lambda: any(reported))
        first = len(reported)
        await stage.until(lambda: len(reported) >= first + 4)
        assert not any(reported[first:])
        worker._rows_due = 0.0
        await stage.until(lambda: any(reported[first:]))


async def test_a_device_that_is_slow_to_report_its_rows_holds_no_heartbeat_up(floor):
    async with stage_of(floor, groups=1) as stage:
        worker = stage.start("a")
        await stage.until(lambda: worker.status == "ready")
        asked, answered = threading.Event(), threading.Event()

        def slow() -> dict[int, tuple[int, ...]]:
            asked.set()
            answered.wait(20)
            return {}

        worker.serving.rows, worker._rows_due = slow, 0.0
        heartbeat, reported = worker._queue.heartbeat, []

        async def watched(*arguments: object) -> object:
            reported.append(arguments[2])
            return await heartbeat(*arguments)

        worker._queue.heartbeat = watched
        try:
            await stage.until(asked.is_set)
            first = len(reported) + 1  # one may still report what was asked for before
            await stage.until(lambda: len(reported) >= first + 3)
            assert not any(reported[first:])
        finally:
            answered.set()
        await stage.until(lambda: any(reported))


async def test_a_worker_that_is_stopped_waits_for_the_exchanges_of_the_table_before(floor):
    async with stage_of(floor, groups=1) as stage:
        workers = [stage.start("a"), stage.start("b")]
        await stage.until(lambda: all(worker.status == "ready" for worker in workers))
        await stage.until_listed("a", "b")
        link = Link()
        follower = TableFollower(link, floor.reader, worker_id=READER, fingerprint="f", lease_s=LEASE_S)
        following = asyncio.create_task(follower.run())
        await asyncio.wait_for(follower.ready(), LIMIT_S)
        link.busy = (await stage.table()).epoch
        worker, stop, task = stage.tasks["b"]
        served = worker.serving
        stop.set()
        await stage.until(lambda: link.tables[-1].epoch > link.busy)
        assert [seat.worker for seat in link.tables[-1].seats] == ["a"]
        await asyncio.sleep(0.2)
        assert not served.drained, "an exchange by the table before is under way"
        link.busy = None
        await asyncio.wait_for(task, LIMIT_S)
        assert served.drained
        assert set(await floor.seats()) == {"a"}
        await ended([following])
        assert (await floor.registry.table_epochs()).oldest is None, "a reader that ends is waited for no more"


async def test_a_group_without_workers_gets_one_that_first_leaves_the_table(floor):
    async with stage_of(floor, groups=2) as stage:
        workers = {name: stage.start(name) for name in ("a", "b", "c")}
        await stage.until(lambda: all(worker.status == "ready" for worker in workers.values()))
        await stage.until_listed("a", "b", "c")
        alone = next(name for name, worker in workers.items() if worker.held.group.number == 1)
        stage.tasks[alone][2].cancel()
        lost = await stage.table()
        await floor.lapse(alone)
        await stage.until(lambda: {w.held.group.number for n, w in workers.items() if n != alone and w.held} == {0, 1})
        await stage.until(lambda: all(w.status == "ready" for n, w in workers.items() if n != alone))
        await stage.until_listed(*(workers.keys() - {alone}))
        table = await stage.table()
        assert table.epoch >= lost.epoch + 2
        assert sorted(seat.group for seat in table.seats) == [0, 1]
        assert sum(served.drained for served in stage.loaded) >= 1


HOT = (0, 1, 2, 3)
"""Experts that take nine tenths of the rows: one of two even groups."""


@dataclass
class Busy(Served):
    """Counts rows by how popular its experts are, more with every look."""

    looks: int = 0

    def rows(self) -> dict[int, tuple[int, ...]]:
        self.looks += 1
        return {
            layer: tuple(self.looks * (90 + expert if expert in HOT else 10) for expert in ids)
            for layer, ids in self.group.experts.items()
        }


class Noted(PlacementEvents):
    def __init__(self) -> None:
        self.tables: list[RoutingTable] = []
        self.changes: list[tuple[int, str]] = []
        self.ratios: list[float | None] = []
        self.cuts = 0

    def tabled(self, table: RoutingTable) -> None:
        self.tables.append(table)

    def changed(self, shard: int, change: str) -> None:
        self.changes.append((shard, change))

    def balanced(self, ratio: float | None) -> None:
        self.ratios.append(ratio)

    def repartitioned(self) -> None:
        self.cuts += 1


async def test_groups_are_cut_again_by_load_and_every_expert_is_served_all_the_while(floor, monkeypatch):
    monkeypatch.setattr("services.scheduler.experts.WINDOW_S", 0.1)
    monkeypatch.setattr("services.experts.worker.ROWS_S", 0.1)
    events = Noted()
    tables = events.tables

    def busy(group: ShardGroup, _seat: int, _stopped: threading.Event) -> Busy:
        return Busy(group, port=1)

    async with stage_of(floor, groups=2) as stage:
        hysteresis = Hysteresis(wait_s=0.2)
        stage.placement = ExpertPlacement(floor.registry, floor.reader, groups=2, events=events, hysteresis=hysteresis)
        workers = [stage.start(name, busy) for name in ("a", "b", "c", "d")]
        await stage.until(lambda: bool(tables) and len(tables[-1].seats) == 4)
        first = tables[-1]
        await stage.until(lambda: tables[-1].groups != first.groups and len(tables[-1].seats) == 4)
        last = tables[-1]
        hot = [sum(expert in HOT for expert in group.experts[0]) for group in last.groups]
        assert min(hot) > 0, "the popular experts are shared out"
        await stage.until(lambda: events.cuts == 1)
        assert events.ratios[0] is None, "of the first reading nothing is known"
        assert max(ratio for ratio in events.ratios if ratio is not None) > 1.5
        seats = sum(change == "join" for _, change in events.changes) - len(events.changes) / 2
        assert seats == len(tables[-1].seats) / 2, "what joined and did not leave is there"
        assert all(change != "death" for _, change in events.changes)
        for table in tables:
            assert all(table.seats_of.values()), f"a group of table {table.epoch} has no seat"
            assert set(table.group_of) == {0, 1}
        assert all(worker.status == "ready" for worker in workers)


async def test_a_leader_that_was_paused_neither_assigns_nor_publishes(floor):
    """It still believes that it leads, and sees what the next leader has not done yet."""
    async with stage_of(floor, groups=1) as stage:
        worker = stage.start("a")
        await stage.until(lambda: worker.status == "ready")
        await stage.until_listed("a")
        paused, table = floor.e, await stage.table()
        await floor.redis.delete(floor.keys.leader)
        other = SchedulerQueue(floor.redis, floor.keys, floor.bench.limits)
        epoch = await other.campaign("another", 60)
        assert epoch is not None
        stage.start("b")
        await stage.until_seats({"a", "b"})
        with pytest.raises(StaleLeader):
            await stage.placement.turn(paused)
        assert await stage.table() == table
        assert (await floor.seats())["b"].assigned is None
        floor.e, stage.placement = epoch, ExpertPlacement(floor.registry, floor.reader, groups=1)
        await stage.until_listed("a", "b")


async def test_a_dismissed_worker_leaves(floor):
    async with stage_of(floor, groups=1) as stage:
        stage.start("a")
        worker = stage.start("b")
        await stage.until(lambda: worker.status == "ready")
        await floor.registry.dismiss(floor.e, "b")
        task = stage.tasks["b"][2]
        await stage.until(task.done)
        assert set(await floor.seats()) == {"a"}


async def test_experts_that_cannot_be_loaded_end_the_worker(floor):
    def broken(*_: object) -> Served:
        raise CheckpointError("The file is cut off.", hint="Fetch it again.")

    async with stage_of(floor, groups=1) as stage:
        stage.start("a", broken)
        await stage.death_of("a", CheckpointError, match="cut off")


async def test_a_stop_during_a_long_load_is_heard_at_once(floor):
    """Also by a load that does not look: its thread is left behind."""
    loading, reported, listens = threading.Event(), threading.Event(), threading.Event()

    def endless(_group: ShardGroup, _seat: int, stopped: threading.Event) -> Served:
        loading.set()
        stopped.wait(LIMIT_S)
        reported.set()
        listens.wait(2 * LIMIT_S)
        raise AssertionError("nobody listens")

    async with stage_of(floor, groups=1) as stage:
        stage.start("a", endless)
        await stage.until(loading.is_set)
        _, stop, task = stage.tasks["a"]
        stop.set()
        await asyncio.wait_for(task, LIMIT_S)
        assert await asyncio.to_thread(reported.wait, LIMIT_S)
        assert not listens.is_set(), "nobody waited for the load"
        listens.set()
        assert await floor.seats() == {}


async def test_a_stop_is_heard_while_redis_is_away(durable_floor):
    server, floor = durable_floor
    server.kill()
    async with stage_of(floor, groups=1) as stage:
        stage.start("a")
        _, stop, task = stage.tasks["a"]
        await asyncio.sleep(0.2)
        stop.set()
        await asyncio.wait_for(task, LIMIT_S)
    server.start()


async def test_a_worker_whose_experts_died_gives_its_seat_up_and_fails(floor):
    async with stage_of(floor, groups=1) as stage:
        worker, other = stage.start("a"), stage.start("b")
        await stage.until(lambda: worker.status == other.status == "ready")
        await stage.placement.turn(floor.e)
        worker.serving.failure = MemoryError("no more")
        await stage.death_of("a", ServingFailed)
        assert set(await floor.seats()) == {"b"}
        await stage.until_listed("b")


async def test_another_model_in_the_same_namespace_gets_a_table_of_its_own(floor):
    async with stage_of(floor, groups=2) as stage:
        stage.placement = ExpertPlacement(floor.registry, floor.reader, groups=1)
        old = RoutingTable(
            epoch=(await floor.registry.table_epochs()).following,
            fingerprint="another",
            num_experts=4,
            groups=even_groups([7], 4, 1),
        )
        await floor.registry.publish_table(floor.e, old)
        worker = stage.start("a")
        await stage.until(lambda: worker.status == "ready")
        await stage.until_listed("a")
        table = await stage.table()
        assert (table.fingerprint, set(table.group_of), len(table.seats)) == ("f", {0, 1}, 1)
        assert table.epoch > old.epoch


async def test_a_follower_passes_over_the_table_of_another_model(floor):
    old = RoutingTable(epoch=3, fingerprint="another", num_experts=4, groups=even_groups([7], 4, 1))
    await floor.registry.publish_table(floor.e, old)
    link = Link()
    follower = TableFollower(link, floor.reader, worker_id=READER, fingerprint="f", lease_s=LEASE_S)
    following = asyncio.create_task(follower.run())
    await asyncio.sleep(0.1)
    assert not link.tables
    await floor.publish()
    await asyncio.wait_for(follower.ready(), LIMIT_S)
    assert [table.fingerprint for table in link.tables] == ["f"]
    await ended([following])


def delay(worker: ExpertWorker, seconds: float) -> None:
    """Redis does not answer its heartbeats for so long."""
    heartbeat, until = worker._queue.heartbeat, time.monotonic() + seconds

    async def late(*arguments: object) -> object:
        if time.monotonic() < until:
            raise QueueUnavailable("A connection breaks.")
        return await heartbeat(*arguments)

    worker._queue.heartbeat = late


@pytest.mark.parametrize("queue_limits", [QueueLimits(lease_s=3.0)])
async def test_after_redis_lost_everything_the_first_table_lists_all_that_it_listed_before(floor):
    """The groups are cut unevenly, so that nobody could guess them; who was there loads nothing again. The
    table waits for as long as reclaiming is held back: here for longer than heartbeats may be late."""
    cut = tuple(
        ShardGroup(number=number, experts=dict.fromkeys((0, 1), ids))
        for number, ids in enumerate([(0, 1, 2, 5, 7), (3, 4, 6)])
    )
    async with stage_of(floor, groups=2) as stage:
        first = RoutingTable(epoch=1, fingerprint="f", num_experts=8, groups=cut)
        await floor.registry.publish_table(floor.e, first)
        workers = [stage.start(name) for name in ("a", "b", "c")]
        await stage.until(lambda: all(worker.status == "ready" for worker in workers))
        link = Link()
        follower = TableFollower(link, floor.reader, worker_id=READER, fingerprint="f", lease_s=LEASE_S)
        following = asyncio.create_task(follower.run())
        await stage.until(lambda: bool(link.tables) and len(link.tables[-1].seats) == 3)
        before, serving = link.tables[-1], [worker.serving for worker in workers]
        await floor.redis.flushall()
        await floor.bench.lead()
        floor.e = floor.bench.epoch
        stage.placement = ExpertPlacement(floor.registry, floor.reader, groups=2)
        delay(workers[2], 0.3)

        async def one_is_back() -> bool:
            return bool(await floor.seats())

        await eventually(one_is_back, "a seat that was there before")  # it says that there was a table
        stage.start("new")
        await stage.until(lambda: link.tables[-1].epoch > before.epoch)
        after = link.tables[-1]
        assert after.groups == cut
        assert {seat.worker: seat.group for seat in before.seats}.items() <= {
            s.worker: s.group for s in after.seats
        }.items()
        await stage.until(lambda: len(link.tables[-1].seats) == 4)
        assert [worker.serving for worker in workers] == serving
        await ended([following])


async def test_a_worker_that_sleeps_keeps_its_seat_and_its_group(floor):
    """It leaves the table before it gives its memory back, and comes back into it with another port."""
    rested: list[int] = []
    async with stage_of(floor, groups=2) as stage:
        worker, other = stage.start("a", rest=rested.append), stage.start("b")
        await stage.until_listed("a", "b")
        seat, group, first = worker.seat, worker.held.group, worker.serving
        await beside(stage, worker.fall_asleep(1))
        assert (worker.serving, first.drained, rested, worker.missing()) == (None, True, [1], [])
        await stage.until_listed("b")
        await beside(stage, worker.fall_asleep(1))
        await beside(stage, worker.fall_asleep(2))
        assert rested == [1, 2]
        await beside(stage, worker.wake_up())
        await stage.until_listed("a", "b")
        assert (worker.seat, worker.held.group, len(stage.loaded)) == (seat, group, 3)
        assert (await stage.listed())["a"] == worker.serving.port != first.port
        await beside(stage, worker.wake_up())
        assert len(stage.loaded) == 3
        assert other.status == "ready"


class Taken:
    """Memory that a try to load took."""


async def test_a_worker_that_finds_too_little_memory_to_wake_up_sleeps_on(floor):
    rested: list[int] = []
    full = False
    async with stage_of(floor, groups=1) as stage:
        held: list[weakref.ref[Taken]] = []

        def load(group: ShardGroup, seat: int, stopped: threading.Event) -> Served:
            if full:
                weights = Taken()
                held.append(weakref.ref(weights))
                try:
                    raise MemoryError
                except MemoryError as error:
                    raise OutOfMemory("Others have it.") from error
            return stage.load(group, seat, stopped)

        def rest(level: int) -> None:
            gc.collect()  # as whoever loads does
            assert not any(weights() for weights in held), "nobody holds weights that were half read"
            rested.append(level)

        worker = stage.start("a", load, rest=rest)
        await stage.until_listed("a")
        await beside(stage, worker.fall_asleep(1))
        full = True
        with pytest.raises(OutOfMemory):
            await beside(stage, worker.wake_up())
        await stage.until(lambda: rested == [1, 1])  # what the try took is given back
        await asyncio.sleep(0.5)  # heartbeats bring orders meanwhile
        assert worker.serving is None
        full = False
        await beside(stage, worker.wake_up())
        await stage.until_listed("a")


async def beside(stage: Stage, work: Coroutine[Any, Any, None]) -> None:
    """Do ``work`` while the leader turns."""
    task = asyncio.create_task(work)
    await stage.until(task.done)
    task.result()
