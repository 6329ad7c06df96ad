"""The queue as a state machine: gateways, workers and leaders come, die, stand still between two calls and lose calls
or replies, Redis's clock goes forth and back, Redis is set back. After each call records, leases and events are the
model's; at the end every request has ended once.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from testkit.queue.machine import LEASE_S, World
from testkit.queue.redis_server import RedisServer
from testkit.queue.steered import Fate

from services.queue.connect import connect

GATEWAY = ["pump", "take_up", "admit"] * 2 + ["cancel", "survey"]
WORKER = ["work"] * 5 + ["beat", "give_up", "leave"]
LEADER = ["claim", "assign"] * 4 + ["reap"] * 3 + ["release", "forget_claims"]
FATES: list[Fate | None] = [*["go"] * 8, "lost before", "reply lost", None, None]  # type: ignore[list-item]
STEPS_MS = [300, 1500, 4000, round(1500 * LEASE_S), -2000, round(-3000 * LEASE_S)]
SEEDS = st.integers(0, 2**32)
"""Of draws that need not shrink."""


def _after(*fates: Fate) -> Callable[[], Fate | None]:
    """The fates of the first calls; the next one waits."""
    left = iter(fates)
    return lambda: next(left, None)


class QueueMachine(RuleBasedStateMachine):
    """Rules choose who acts; ``data`` chooses what becomes of each call."""

    server: RedisServer

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.redis = connect(self.server.url)
        self.world = World(self.redis)
        self._await(self.world.start())
        for seed in range(2):
            self._round(seed, ["pump", "admit"])

    def _await(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def _act(self, kind: str, action: str, seed: int, data: st.DataObject) -> None:
        """An operation of one who is not in the midst of another; two or three calls of it, or parts."""
        world = self.world
        world.draw = random.Random(seed)
        actors = {world.leader.name: world.leader} if kind == "leader" else getattr(world, kind)
        if idle := world.idle(actors):
            actor = actors[world.draw.choice(sorted(idle))]
            self._await(world.run(actor, getattr(world, action)(actor), lambda: data.draw(st.sampled_from(FATES))))

    @rule(action=st.sampled_from(GATEWAY), seed=SEEDS, data=st.data())
    def gateway_acts(self, action: str, seed: int, data: st.DataObject) -> None:
        self._act("gateways", action, seed, data)

    @rule(action=st.sampled_from(WORKER), seed=SEEDS, data=st.data())
    def worker_acts(self, action: str, seed: int, data: st.DataObject) -> None:
        self._act("workers", action, seed, data)

    @rule(action=st.sampled_from(LEADER), seed=SEEDS, data=st.data())
    def leader_acts(self, action: str, seed: int, data: st.DataObject) -> None:
        self._act("leader", action, seed, data)

    @rule(seed=SEEDS)
    def all_goes_well(self, seed: int) -> None:
        self._round(seed, ["pump"])

    def _round(self, seed: int, of_gateways: list[str]) -> None:
        """Without losses, so that requests get on."""
        world = self.world
        world.draw = random.Random(seed)
        for kind, actions in (
            ("leader", ["claim", "assign"]),
            ("workers", ["work", "beat"]),
            ("gateways", of_gateways),
        ):
            actors = {world.leader.name: world.leader} if kind == "leader" else getattr(world, kind)
            for name in world.idle(actors):
                for action in actions:
                    self._await(world.whole(actors[name], getattr(world, action)(actors[name])))

    @rule(kind=st.sampled_from(["workers", "gateways"]), seed=SEEDS)
    def one_stands_still_for_longer_than_its_lease(self, kind: str, seed: int) -> None:
        """It has read what it is to do; meanwhile it is taken for dead."""
        world = self.world
        world.draw = random.Random(seed)
        actors = getattr(world, kind)
        if not (idle := world.idle(actors)) or world.leader.operation is not None:
            return
        actor = actors[world.draw.choice(sorted(idle))]
        work = world.work(actor) if kind == "workers" else world.survey(actor)
        self._await(world.run(actor, work, lambda: None))
        for _ in range(4):
            self._await(world.tick(round(500 * LEASE_S)))
            self._await(world.whole(world.leader, world.reap(world.leader)))
        self._round(seed, ["pump"])
        if actor.operation is not None:
            self._await(world.go_on(actor, lambda: "go"))

    @rule(seed=SEEDS)
    def a_worker_that_stands_still_gets_later_attempts_of_what_it_runs(self, seed: int) -> None:
        world = self.world
        world.draw = random.Random(seed)
        busy = [name for name in world.idle(world.workers) if world.workers[name].held]
        if not busy or world.leader.operation is not None:
            return
        worker = world.workers[world.draw.choice(sorted(busy))]
        self._await(world.run(worker, world.work(worker), lambda: None))
        for gateway in map(world.gateways.__getitem__, world.idle(world.gateways)):
            for name in sorted(set(worker.held) & set(gateway.sim.live)):
                self._await(world.whole(gateway, gateway.sim.resync(name, worker.held[name].attempt)))
        self._await(world.whole(world.leader, world.claim(world.leader)))
        self._await(world.whole(world.leader, world.assign(world.leader, worker.name)))
        if worker.operation is not None:
            self._await(world.go_on(worker, lambda: "go"))

    @rule(seed=SEEDS, what=st.sampled_from(["claim", "assign", "release", "reap"]), after=st.integers(0, 4))
    def a_leader_stands_still_while_another_comes(self, seed: int, what: str, after: int) -> None:
        """The later one may be the same process, with what it claimed before."""
        world, former = self.world, self.world.leader
        world.draw = random.Random(seed)
        if former.operation is not None:
            return
        self._await(world.whole(former, world.claim(former)))
        claimed = list(former.claimed)
        self._await(world.run(former, getattr(world, what)(former), _after(*["go"] * after)))
        self._await(world.new_leader())
        if former.operation is not None:
            self._await(world.go_on(former, lambda: "go"))
        world.leader.claimed = claimed
        self._await(world.whole(world.leader, getattr(world, world.draw.choice(["assign", "release"]))(world.leader)))

    @rule(seed=SEEDS)
    def a_client_comes_back_elsewhere_in_the_midst_of_its_answer(self, seed: int) -> None:
        self._round(seed, ["admit"])
        self._round(seed, ["pump"])
        world = self.world
        for heir in map(world.gateways.__getitem__, world.idle(world.gateways)):
            self._await(world.whole(heir, world.take_up(heir, begun=True)))

    @rule(seed=SEEDS)
    def two_workers_run_one_attempt_where_redis_was_set_back(self, seed: int) -> None:
        world = self.world
        world.draw = random.Random(seed)
        idle = sorted(world.idle(world.workers))
        if len(idle) < 2 or world.leader.operation is not None:
            return
        first, second = (world.workers[name] for name in world.draw.sample(idle, 2))
        self._await(world.whole(world.leader, world.claim(world.leader)))
        claimed = list(world.leader.claimed)
        self._await(world.save())
        self._await(world.whole(world.leader, world.assign(world.leader, first.name)))
        self._await(world.whole(first, world.read(first)))
        self._await(world.rewind())
        world.leader.claimed = claimed
        self._await(world.whole(world.leader, world.assign(world.leader, second.name)))
        for action in world.draw.sample(["beat", "work", "give_up"], 2):
            self._await(world.whole(first, getattr(world, action)(first)))

    def _bereaved(self, seed: int) -> bool:
        """Whether a worker died that held requests."""
        self._round(seed, ["admit"])
        busy = [name for name, worker in self.world.workers.items() if worker.held]
        if busy:
            self._await(self.world.notice_death(self.world.workers[self.world.draw.choice(sorted(busy))]))
            self._await(self.world.add_worker())
        return bool(busy)

    @rule(seed=SEEDS)
    def a_lost_attempt_is_never_resubmitted(self, seed: int) -> None:
        """Its gateway lives, but does not read."""
        world = self.world
        if world.leader.operation is not None or not self._bereaved(seed):
            return
        for _ in range(5):
            self._await(world.tick(round(500 * LEASE_S)))
            for gateway in map(world.gateways.__getitem__, world.idle(world.gateways)):
                self._await(world.whole(gateway, gateway.queue.heartbeat(LEASE_S)))
            self._await(world.whole(world.leader, world.reap(world.leader)))
        self._round(seed, ["pump"])

    @rule(seed=SEEDS)
    def a_resubmission_comes_again_when_its_attempt_is_lost(self, seed: int) -> None:
        """Its reply was lost."""
        self._round(seed, ["admit"])
        world = self.world
        own = [(g, r) for g in world.idle(world.gateways) for r in sorted(world.gateways[g].sim.live)]
        if not own or world.leader.operation is not None or not (idle := world.idle(world.workers)):
            return
        gateway, name = world.gateways[(choice := world.draw.choice(own))[0]], choice[1]
        resync = gateway.sim.resync(name, gateway.sim.live[name].attempt)
        self._await(world.run(gateway, resync, _after("go", "reply lost")))
        for _ in range(3):
            self._await(world.whole(world.leader, world.claim(world.leader)))
            self._await(world.whole(world.leader, world.assign(world.leader, idle[0])))
        self._await(world.notice_death(world.workers[idle[0]]))
        self._await(world.add_worker())
        if gateway.operation is not None:
            self._await(world.go_on(gateway, lambda: "go"))

    @rule(seed=SEEDS, data=st.data())
    def one_goes_on(self, seed: int, data: st.DataObject) -> None:
        if parked := self.world.parked:
            actor = random.Random(seed).choice(parked)
            self._await(self.world.go_on(actor, lambda: data.draw(st.sampled_from(FATES))))

    @rule(what=st.sampled_from(["kill worker", "notice death", "kill gateway", "add", "new leader"]), seed=SEEDS)
    def come_and_go(self, what: str, seed: int) -> None:
        world = self.world
        world.draw = random.Random(seed)
        if what == "new leader":
            self._await(world.new_leader())
        elif what == "add":
            self._await(world.add_worker() if len(world.workers) < 3 else world.add_gateway())
        elif what == "kill gateway" and len(world.gateways) > 1:
            self._await(world.kill(world.gateways[world.draw.choice(sorted(world.gateways))]))
        elif what != "kill gateway" and world.workers:
            worker = world.workers[world.draw.choice(sorted(world.workers))]
            self._await(world.kill(worker) if what == "kill worker" else world.notice_death(worker))

    @rule(ms=st.sampled_from(STEPS_MS))
    def time_passes_or_steps_back(self, ms: int) -> None:
        self._await(self.world.tick(ms))

    @rule(back=st.booleans())
    def redis_is_saved_or_set_back(self, back: bool) -> None:
        self._await(self.world.rewind() if back else self.world.save())

    def teardown(self) -> None:
        world = self.world
        try:
            self._await(world.finish())
            self._await(world.check_end())
            ends = {ends[0] for ends in world.ends.values()}
            assert ends <= {"stop", "cancelled", "gateway died", "refused", "unavailable"}
        finally:
            self._await(world.close())
            self._await(self.redis.aclose())
            self.loop.close()


def _run(server: RedisServer, examples: int, steps: int) -> None:
    QueueMachine.server = server
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
    run_state_machine_as_test(
        QueueMachine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=checks
        ),
    )


def test_every_call_does_what_the_model_does(redis_server: RedisServer) -> None:
    _run(redis_server, 5, 24)


@pytest.mark.night("services/queue", "tests/testkit/queue")
@pytest.mark.timeout(2400)
def test_every_call_does_what_the_model_does_all_night(redis_server: RedisServer) -> None:
    _run(redis_server, 80, 80)
