"""The queue as a state machine: gateways, workers and leaders come, die, stand still between two calls and lose calls
or replies, Redis's clock goes forth and back, Redis is set back. After each call records, leases and events are the
model's; at the end every request has ended once.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from testkit.queue.machine import LEASE_S, Actor, World
from testkit.queue.redis_server import RedisServer
from testkit.queue.steered import Fate

from services.queue.connect import connect

if TYPE_CHECKING:
    from contract.conftest import Bench

ACTIONS = {
    "gateways": ["pump", "take_up", "admit"] * 2 + ["cancel", "survey"],
    "workers": ["work"] * 5 + ["beat", "give_up", "leave"],
    "leader": ["claim", "assign"] * 4 + ["reap"] * 3 + ["release", "forget_claims"],
}
COMINGS = ["kill_worker", "kill_gateway", "add", "new_leader"]
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
            self._round(seed, "pump", "admit")

    def _await(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def _act(self, kind: str, seed: int, data: st.DataObject) -> None:
        """Two or three calls of an operation, or parts."""
        self.world.draw = random.Random(seed)
        action = data.draw(st.sampled_from(ACTIONS[kind]))
        self._await(self.world.act(kind, action, lambda: data.draw(st.sampled_from(FATES))))

    @rule(seed=SEEDS, data=st.data())
    def a_gateway_acts(self, seed: int, data: st.DataObject) -> None:
        self._act("gateways", seed, data)

    @rule(seed=SEEDS, data=st.data())
    def a_worker_acts(self, seed: int, data: st.DataObject) -> None:
        self._act("workers", seed, data)

    @rule(seed=SEEDS, data=st.data())
    def the_leader_acts(self, seed: int, data: st.DataObject) -> None:
        self._act("leader", seed, data)

    @rule(seed=SEEDS)
    def all_goes_well(self, seed: int) -> None:
        self._round(seed, "pump")

    def _round(self, seed: int, *of_gateways: str) -> None:
        """Without losses, so that requests get on."""
        self.world.draw = random.Random(seed)
        self._all("leader", "claim", "assign")
        self._all("workers", "work", "beat")
        self._all("gateways", *of_gateways)

    def _all(self, kind: str, *actions: str) -> None:
        self._await(self.world.all_act(kind, *actions))

    def _whole(self, actor: Actor, work: Coroutine[Any, Any, None]) -> None:
        self._await(self.world.whole(actor, work))

    def _go_on(self, actor: Actor) -> None:
        """To the end of what it stood still in."""
        if actor.operation is not None:
            self._await(self.world.go_on(actor, lambda: "go"))

    def _choice(self, kind: str, seed: int, *, busy: bool = False) -> Any:
        """One who is not in the midst of an operation, if the leader is not either; ``busy``: who holds requests."""
        self.world.draw = random.Random(seed)
        idle = [actor for actor in self.world.idle(kind) if not busy or actor.held]
        return self.world.draw.choice(idle) if idle and self.world.leader.operation is None else None

    @rule(kind=st.sampled_from(["workers", "gateways"]), seed=SEEDS)
    def one_stands_still_for_longer_than_its_lease(self, kind: str, seed: int) -> None:
        """It has read what it is to do; meanwhile it is taken for dead."""
        world = self.world
        if (actor := self._choice(kind, seed)) is None:
            return
        work = world.work(actor) if kind == "workers" else world.survey(actor)
        self._await(world.run(actor, work, lambda: None))
        for _ in range(4):
            self._await(world.tick(round(500 * LEASE_S)))
            self._all("leader", "reap")
        self._round(seed, "pump")
        self._go_on(actor)

    @rule(seed=SEEDS)
    def a_worker_that_stands_still_gets_later_attempts_of_what_it_runs(self, seed: int) -> None:
        world = self.world
        if (worker := self._choice("workers", seed, busy=True)) is None:
            return
        self._await(world.run(worker, world.work(worker), lambda: None))
        for front in world.idle("gateways"):
            for name in sorted(set(worker.held) & set(front.gateway.live)):
                self._whole(front, front.gateway.resync(name))
        self._all("leader", "claim")
        self._whole(world.leader, world.assign(world.leader, worker.name))
        self._go_on(worker)

    @rule(seed=SEEDS, what=st.sampled_from(["claim", "assign", "release", "reap"]), after=st.integers(0, 4))
    def a_leader_stands_still_while_another_comes(self, seed: int, what: str, after: int) -> None:
        """The later one may be the same process, with what it claimed before."""
        world = self.world
        if (former := self._choice("leader", seed)) is None:
            return
        self._all("leader", "claim")
        claimed = list(former.claimed)
        self._await(world.run(former, getattr(world, what)(former), _after(*["go"] * after)))
        self._await(world.new_leader())
        self._go_on(former)
        world.leader.claimed = claimed
        self._all("leader", world.draw.choice(["assign", "release"]))

    @rule(seed=SEEDS)
    def a_client_comes_back_elsewhere_in_the_midst_of_its_answer(self, seed: int) -> None:
        self._round(seed, "admit")
        self._round(seed, "pump")
        for heir in self.world.idle("gateways"):
            self._whole(heir, self.world.take_up(heir, begun=True))

    @rule(seed=SEEDS)
    def two_workers_run_one_attempt_where_redis_was_set_back(self, seed: int) -> None:
        world = self.world
        first = self._choice("workers", seed)
        others = [worker for worker in world.idle("workers") if worker is not first]
        if first is None or not others:
            return
        self._all("leader", "claim")
        claimed = list(world.leader.claimed)
        self._await(world.save())
        self._whole(world.leader, world.assign(world.leader, first.name))
        self._whole(first, world.read(first))
        self._await(world.rewind())
        world.leader.claimed = claimed
        self._whole(world.leader, world.assign(world.leader, world.draw.choice(others).name))
        for action in world.draw.sample(["beat", "work", "give_up"], 2):
            self._whole(first, getattr(world, action)(first))

    @rule(seed=SEEDS)
    def a_lost_attempt_is_never_resubmitted(self, seed: int) -> None:
        """Its worker died. Its gateway lives, but does not read."""
        self._round(seed, "admit")
        busy = [worker for _, worker in sorted(self.world.workers.items()) if worker.held]
        if self.world.leader.operation is not None or not busy:
            return
        self._await(self.world.notice_death(self.world.draw.choice(busy)))
        self._await(self.world.add_worker())
        for _ in range(5):
            self._await(self.world.tick(round(500 * LEASE_S)))
            self._all("gateways", "keep_lease")
            self._all("leader", "reap")
        self._round(seed, "pump")

    @rule(seed=SEEDS)
    def a_resubmission_comes_again_when_its_attempt_is_lost(self, seed: int) -> None:
        """Its reply was lost."""
        self._round(seed, "admit")
        world = self.world
        own = [(front, name) for front in world.idle("gateways") for name in sorted(front.gateway.live)]
        if not own or (worker := self._choice("workers", seed)) is None:
            return
        front, name = world.draw.choice(own)
        self._await(world.run(front, front.gateway.resync(name), _after("go", "reply lost")))
        for _ in range(3):
            self._all("leader", "claim")
            self._whole(world.leader, world.assign(world.leader, worker.name))
        self._await(world.notice_death(worker))
        self._await(world.add_worker())
        self._go_on(front)

    @rule(seed=SEEDS, data=st.data())
    def one_goes_on(self, seed: int, data: st.DataObject) -> None:
        if parked := self.world.parked:
            actor = random.Random(seed).choice(parked)
            self._await(self.world.go_on(actor, lambda: data.draw(st.sampled_from(FATES))))

    @rule(what=st.sampled_from([*COMINGS, "see_a_worker_die"]), seed=SEEDS)
    def come_and_go(self, what: str, seed: int) -> None:
        self.world.draw = random.Random(seed)
        self._await(getattr(self.world, what)())

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
            self._await(world.check_end("gateway died", "refused", "unavailable"))
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


@pytest.mark.parametrize("seed", range(2))
async def test_a_clock_that_steps_loses_no_request(stepping: tuple[RedisServer, Bench], seed: int) -> None:
    """Both ways: leases lapse at once, members renew them, in any order with the leader's looks; entries of streams
    keep their order."""
    server, bench = stepping
    world = World(bench.redis, server)
    world.draw = random.Random(seed)
    await world.start()
    actions = [(kind, name) for kind, names in ACTIONS.items() for name in names]
    for _ in range(6):
        for _ in range(world.draw.randint(15, 40)):
            kind, action = world.draw.choice(actions)
            await world.act(kind, action)
        await getattr(world, world.draw.choice(COMINGS))()
        await world.tick(1000 * world.draw.choice([-900, -300, 300, 900]))
        for kind, action in world.draw.sample([("leader", "reap"), ("gateways", "survey"), ("workers", "beat")], 3):
            await world.act(kind, action)
    await world.finish()
    await world.check_end("gateway died", "refused", "unavailable")
    await world.close()
