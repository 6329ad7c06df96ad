"""Random walks: gateways, schedulers and workers come, go, die and forget, Redis is set back, its clock steps; every
request still ends exactly once with its whole text, and no counter leaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from testkit.queue.indexes import check
from testkit.queue.world import World, ended_well, finish

from services.queue.limits import QueueLimits

LIMITS = QueueLimits(max_requests=30, quantum=16, max_attempts=10**6, max_stuck=10**6)
CALM = (
    ["admit"] * 6 + ["claim", "assign"] * 8 + ["work"] * 10 + ["pump"] * 6 + ["beat", "release", "cancel", "reap"] * 2
)
WILD = [
    *CALM, "kill_worker", "add_worker", "leave_worker", "kill_gateway", "add_gateway", "take_up", "take_up",
    "new_leader", "give_up", "forget_claims", "expire_leases", "survey",
]  # fmt: skip


async def begin(bench, seed: int) -> World:
    world = World(bench, seed)
    for _ in range(2):
        await world.add_gateway()
        await world.add_worker()
    return world


async def walk(world: World, steps: int, actions: Sequence[str]) -> None:
    for step in range(steps):
        await world.act(world.draw.choice(actions))
        if step % 4 == 0:
            await check(world.bench)
    await finish(world)


@pytest.mark.parametrize("queue_limits", [LIMITS])
@pytest.mark.parametrize("seed", range(2))
async def test_undisturbed_every_request_finishes(bench, seed):
    world = await begin(bench, seed)
    await walk(world, 120, CALM)
    await ended_well(world)


@pytest.mark.parametrize("queue_limits", [LIMITS])
@pytest.mark.parametrize("seed", range(5))
async def test_deaths_and_moves_end_every_request_once(bench, seed):
    world = await begin(bench, seed)
    await walk(world, 200, WILD)
    await ended_well(world, "gateway died", "refused")


@pytest.mark.parametrize("queue_limits", [LIMITS])
@pytest.mark.parametrize("seed", range(5))
async def test_a_redis_that_was_set_back_loses_no_request(bench, seed):
    """An append-only file may lack the last second: all keys go back to an earlier moment, the processes do not."""
    world = await begin(bench, seed)
    for _ in range(4):
        for _ in range(world.draw.randint(5, 40)):
            await world.act(world.draw.choice(WILD))
        saved = await world.snapshot()
        for _ in range(world.draw.randint(1, 12)):
            await world.act(world.draw.choice([*CALM, "kill_worker", "add_worker", "expire_leases", "survey"]))
        await world.rewind(saved)
        await check(bench)
    await finish(world)
    await ended_well(world, "gateway died", "refused")


@pytest.mark.parametrize("queue_limits", [replace(LIMITS, lease_s=0.2, stream_s=7200)])
@pytest.mark.parametrize("seed", range(2))
async def test_a_clock_that_steps_loses_no_request(stepping, seed):
    """By up to half an hour, both ways: leases of ten minutes lapse at once, members renew them, in any order with the
    leader's looks. Entries of streams keep their order."""
    server, bench = stepping
    world = await begin(bench, seed)
    for _ in range(6):
        for _ in range(world.draw.randint(5, 25)):
            await world.act(world.draw.choice(WILD))
        server.set_clock(world.draw.choice([-900, -300, 300, 900]))
        for action in world.draw.sample(["reap", "survey", "beat"], 3):
            await world.act(action)
        await check(bench)
    await finish(world)
    await ended_well(world, "gateway died", "refused")
