"""Loads and targets across Redis, and a leader's turns over them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest

from services.errors import StaleLeader
from services.messages import LATENCY_BUCKETS, GatewayLoad, SeatLoad, SeatReport, WorkerLoad
from services.queue.loads import LoadNotes, LoadReader
from services.queue.seats import SeatRegistry
from services.queue.sleep import SleepSwitch
from services.scheduler.scaling import Autoscaler, Bounds, Decision, Replicas, ScalingOptions, Sources, Target

NONE = (0,) * LATENCY_BUCKETS
HOT, COLD = Target("experts", 0), Target("experts", 1)
ATTENTION, GATEWAY = Target("attention"), Target("gateway")
OPTIONS = ScalingOptions(
    bounds={role: Bounds(minimum=1, maximum=4) for role in ("experts", "attention", "gateway")},
    sleep_after_s=20.0,
    down_after_s=10.0,
)


class Known:
    """Replica counts that a test sets."""

    def __init__(self) -> None:
        self.counted: Mapping[Target, Replicas] | None = None

    def counts(self) -> Mapping[Target, Replicas] | None:
        return self.counted


class Stage:
    """Two seats of two groups, one attention worker, one gateway; ``at`` is the leader's clock in seconds."""

    def __init__(self, floor) -> None:
        self.floor, self.bench = floor, floor.bench
        self.at = 100.0
        self.known = Known()
        self.reader = LoadReader(floor.bench.user("scheduler"), floor.keys, floor.bench.limits)
        self.decisions: list[Decision] = []
        self.came = 0
        self.busy_s = 0.0

    def leader(self, options: ScalingOptions = OPTIONS) -> Autoscaler:
        registry = SeatRegistry(self.bench.user("scheduler"), self.floor.keys, self.bench.limits, clock=lambda: self.at)
        sources = Sources(queue=self.bench.scheduler, registry=registry, loads=self.reader, counts=self.known)
        return Autoscaler(
            sources, options, groups=2, lease_s=60.0, on_decision=self.decisions.append, clock=lambda: self.at
        )

    async def report(self, *, busy: float) -> None:
        """One round of heartbeats, a second after the one before: in it the hot seat was so busy."""
        self.busy_s += busy
        for worker, group, busy_s in (("e0", 0, self.busy_s), ("e1", 1, 0.1 * self.at)):
            load = SeatLoad(up_s=self.at, busy_s=busy_s, waited_s=0.0)
            report = SeatReport(status="ready", group=group, digest="d", load=load)
            await self.floor.experts.heartbeat(worker, report)
        for role, member, load in (
            ("attention", "w", WorkerLoad(up_s=self.at, busy_s=self.at, lanes=2)),
            ("gateway", "g1", GatewayLoad(up_s=self.at, cpu_s=0.1, came=self.came, ended=0, ttft=NONE, tpot=NONE)),
        ):
            redis, read = self.bench.user(role), lambda load=load: load
            notes = LoadNotes(redis, self.floor.keys, member_id=member, lease_s=60.0, read=read)
            await notes.note()

    async def turns(
        self, leader: Autoscaler, count: int, *, busy: float = 0.1, report: bool = True
    ) -> dict[Target, int]:
        for _ in range(count):
            self.at += 1
            if report:
                await self.report(busy=busy)
            await leader.turn(self.floor.e)
        return self.decisions[-1].state.targets


@pytest.fixture
async def stage(floor) -> Stage:
    made = Stage(floor)
    await floor.join("e0", "e1")
    await floor.bench.add_worker("w")
    await made.report(busy=0.1)
    return made


async def test_loads_come_back_as_they_were_reported_and_expire(stage):
    loads = await stage.reader.loads()
    assert loads.workers == {"w": WorkerLoad(up_s=100.0, busy_s=100.0, lanes=2)}
    assert loads.gateways["g1"].up_s == 100.0
    assert 0 < await stage.floor.redis.pttl(stage.floor.keys.load("w")) <= 60_000
    await stage.floor.redis.delete(stage.floor.keys.load("w"), stage.floor.keys.load("g1"))
    loads = await stage.reader.loads()
    assert (loads.workers, loads.gateways) == ({"w": None}, {}), "who reported nothing is known to be there"


async def test_who_has_no_lease_is_not_listed(stage):
    await stage.bench.expire_lease(stage.floor.keys.workers, "w")
    assert (await stage.reader.loads()).workers == {}


async def test_a_leader_that_was_paused_keeps_no_targets(stage):
    await stage.reader.keep_targets(stage.floor.e, b"{}")
    with pytest.raises(StaleLeader):
        await stage.reader.keep_targets(stage.floor.e - 1, b"other")
    assert await stage.reader.targets() == b"{}"


async def test_the_hot_shard_grows_and_a_successor_holds_it(stage):
    wanted = await stage.turns(stage.leader(), 3, busy=0.95)
    assert wanted == {HOT: 2, COLD: 1, ATTENTION: 1, GATEWAY: 1}
    kept = json.loads(await stage.reader.targets())
    assert kept == {"attention": 1, "gateway": 1, "experts/0": 2, "experts/1": 1}
    successor = stage.leader()
    assert (await stage.turns(successor, 9))[HOT] == 2
    assert (await stage.turns(successor, 4))[HOT] == 1


async def test_targets_that_redis_lost_are_those_asked_for_or_there(stage):
    await stage.turns(stage.leader(), 1)
    await stage.floor.redis.delete(stage.floor.keys.targets)
    stage.known.counted = {HOT: Replicas(wanted=3, ready=1), ATTENTION: Replicas(wanted=2, ready=1)}
    assert await stage.turns(stage.leader(), 2) == {HOT: 3, COLD: 1, ATTENTION: 2, GATEWAY: 1}


async def test_ranks_that_are_there_are_taken_over_as_groups(stage):
    """Three of two groups of two, and what the leader before wanted is lost: both stand."""
    for name in ("v", "x"):
        await stage.floor.bench.add_worker(name)
    ranks = stage.leader(replace(OPTIONS, ranks=2))
    assert (await stage.turns(ranks, 2))[ATTENTION] == 2
    assert stage.decisions[-1].signals.loads[ATTENTION].ready == 1, "the third has nobody to step with"


async def test_targets_in_another_unit_are_not_taken_for_groups(stage):
    """Six attention workers were wanted; four of them are a group now. And no bound is passed."""
    kept = b'{"experts/0":6,"experts/1":0,"attention":6,"gateway":1}'
    groups = stage.leader(replace(OPTIONS, ranks=4))
    await stage.reader.keep_targets(stage.floor.e, kept)
    assert await stage.turns(groups, 1) == {HOT: 4, COLD: 1, ATTENTION: 1, GATEWAY: 1}
    assert json.loads(await stage.reader.targets())["ranks"] == 4
    again = stage.leader(replace(OPTIONS, ranks=4))
    await stage.reader.keep_targets(stage.floor.e, b'{"attention":3,"ranks":4}')
    assert (await stage.turns(again, 1))[ATTENTION] == 3
    assert (await stage.turns(stage.leader(), 1))[ATTENTION] == 1, "nor groups for single workers"


async def test_replicas_with_seats_are_wanted_as_attention_alone(stage):
    """The hot group's seat has 1.9 replicas' work, of which each replica would do one; nothing else is asked for."""
    leader = stage.leader(replace(OPTIONS, ranks=1, groups=1))
    await stage.reader.keep_targets(stage.floor.e, b'{"experts/0":3,"attention":1}')
    assert await stage.turns(leader, 9, busy=0.95) == {ATTENTION: 2, GATEWAY: 1}
    assert json.loads(await stage.reader.targets()) == {"attention": 2, "gateway": 1}


async def test_targets_of_long_ago_take_nothing_away_that_is_asked_for_now(stage):
    await stage.reader.keep_targets(stage.floor.e, b'{"experts/0":1,"experts/1":0,"attention":0,"gateway":1}')
    stage.known.counted = {HOT: Replicas(wanted=3, ready=3), ATTENTION: Replicas(wanted=2, ready=2)}
    assert await stage.turns(stage.leader(), 1) == {HOT: 3, COLD: 1, ATTENTION: 2, GATEWAY: 1}


@pytest.mark.parametrize("kept", [b"\xff", b"[]", b'{"experts/x":1}', b'{"other":1}', b'{"attention":"2"}'])
async def test_targets_that_nobody_understands_are_no_targets(stage, kept):
    await stage.reader.keep_targets(stage.floor.e, kept)
    assert await stage.turns(stage.leader(), 1) == {HOT: 1, COLD: 1, ATTENTION: 1, GATEWAY: 1}


async def test_heartbeats_that_stop_shrink_nothing(stage):
    leader = stage.leader()
    await stage.turns(leader, 3, busy=0.95)
    stage.at += 70  # longer than a lease, and than fewer must have sufficed
    await stage.bench.admit(stage.bench.request("r"))
    for _ in range(3):
        stage.at += 12
        assert (await stage.turns(leader, 1, report=False))[HOT] == 2


async def test_it_sleeps_whole_and_wakes_with_the_first_request(stage):
    leader = stage.leader()
    assert (await stage.turns(leader, 20))[ATTENTION] == 1
    asleep = {HOT: 0, COLD: 0, ATTENTION: 0, GATEWAY: 1}
    assert await stage.turns(leader, 2) == asleep
    assert await stage.turns(stage.leader(), 1) == asleep, "a successor lets it sleep"
    await stage.bench.admit(stage.bench.request("r"))
    assert await stage.turns(leader, 1) == {HOT: 1, COLD: 1, ATTENTION: 1, GATEWAY: 1}


async def test_a_request_between_two_looks_keeps_it_awake(stage):
    leader = stage.leader()
    for _ in range(5):
        await stage.turns(leader, 10)
        stage.came += 1
    assert (await stage.turns(leader, 1))[ATTENTION] == 1


async def test_targets_stay_while_the_model_sleeps(stage):
    """Neither the queue that grows for want of a wake-up nor workers that do nothing change them."""
    leader = stage.leader()
    before = await stage.turns(leader, 3)
    decided = len(stage.decisions)
    switch = SleepSwitch(stage.bench.user("gateway"), stage.floor.keys, stage.bench.limits)
    await switch.order(1)
    await stage.turns(leader, 40, busy=0.0)
    assert len(stage.decisions) == decided
    await switch.order(0)
    assert await stage.turns(leader, 2) == before, "the sleep is no time without requests"
    assert len(stage.decisions) == decided + 2
