"""Hosts whose clocks are minutes off Redis's, and a Redis whose own clock steps: leases, deadlines, seats and tables go
by Redis TIME alone, and outlast a step."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

import pytest
from testkit.fabric.expert_floor import Floor
from testkit.models.stepping import SteppingEngine, continuation
from testkit.processes.roles import Deployment
from testkit.queue.client import Stream, check
from testkit.queue.redis_server import RedisServer
from testkit.waiting import eventually

from services.errors import ConcurrencyLimited, RateLimited
from services.queue.clock import RedisClock
from services.queue.gateway_side import FIRST_ID
from services.queue.limits import TenantLimits

if TYPE_CHECKING:
    from contract.conftest import Bench

OFF_S = 600.0


@pytest.fixture(params=[-OFF_S, OFF_S])
def skewed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """All of this process is that many seconds ahead of Redis."""
    real, off = time.time, float(request.param)
    monkeypatch.setattr(time, "time", lambda: real() + off)
    monkeypatch.setattr(time, "time_ns", lambda: int((real() + off) * 1e9))
    return off


async def test_a_clock_is_right_once_it_asked(skewed: float, floor: Floor) -> None:
    clock = RedisClock(floor.redis)
    seconds, _ = await floor.redis.time()
    assert abs(clock.now_ms() / 1000 - seconds - skewed) < 30
    await clock.sync()
    assert abs(clock.now_ms() / 1000 - seconds) < 30


@pytest.mark.usefixtures("skewed", "redis")
async def test_requests_run_to_their_end(redis_server: RedisServer) -> None:
    async with Deployment(redis_server.url) as deployment:
        scheduler = deployment.scheduler()
        deployment.worker()
        client = await deployment.client()
        streams: list[Stream] = await client.submit(*[[n] for n in range(8)], max_tokens=50, timeout_s=60)
        await eventually(lambda: all(stream.finish for stream in streams))
        assert [stream.tokens for stream in streams] == [continuation([n], 50) for n in range(8)]
        assert scheduler.value("reclaimed_leases_total", outcome="lost") == 0


@pytest.mark.usefixtures("skewed")
async def test_a_request_that_has_no_time_left_ends(redis_server: RedisServer) -> None:
    async with Deployment(redis_server.url) as deployment:
        deployment.scheduler()
        client = await deployment.client()
        (stream,) = await client.submit([1], timeout_s=0.3)
        await eventually(lambda: stream.finish)
        assert stream.error is not None
        assert stream.error.code == "deadline_exceeded"


@pytest.mark.usefixtures("skewed")
async def test_seats_live_by_redis_and_tables_go_on(floor: Floor) -> None:
    before = await floor.publish()
    numbers = await floor.join("e1", "e2")
    assert (await floor.registry.reap(floor.e)).seats == ()
    await floor.lapse("e1")
    assert (await floor.registry.reap(floor.e)).seats == (numbers[0],)
    after = await floor.publish("e2")
    assert after.epoch > before.epoch
    assert await asyncio.wait_for(floor.reader.enter("w", 60.0), 5) == after


HOUR_S = 3600


@pytest.mark.night  # at each step back, calls that Redis holds end by their timeout alone: 5 s
async def test_requests_and_their_members_outlast_steps_of_redis_own_clock(
    stepping: tuple[RedisServer, Bench],
) -> None:
    server, _ = stepping
    async with Deployment(server.url, lease_s=0.8, max_attempts=100, stream_s=10 * HOUR_S) as deployment:
        deployment.scheduler()
        workers = [deployment.worker(engine=SteppingEngine(step_s=0.01)) for _ in range(2)]
        client = await deployment.client()
        streams = await client.submit(*[[n] for n in range(4)], max_tokens=60, timeout_s=3 * HOUR_S)
        for seen, ahead in ((5, HOUR_S), (15, -HOUR_S), (25, -2 * HOUR_S), (35, 0)):
            await eventually(lambda seen=seen: all(len(stream.tokens) >= seen for stream in streams), limit_s=300)
            server.set_clock(ahead)
        await eventually(lambda: all(stream.finish for stream in streams), limit_s=300)
        check(streams, 60)
        (late,) = await client.submit([9], max_tokens=5, timeout_s=60)
        await eventually(lambda: late.finish, limit_s=300)
        check([late], 5)
        assert all(not worker.task.done() for worker in workers)


@pytest.mark.parametrize("step_s", [-HOUR_S, HOUR_S])
async def test_a_step_of_redis_clock_keeps_nobody_out(stepping: tuple[RedisServer, Bench], step_s: int) -> None:
    """What a key may ask for, how fast the queue is said to drain, how long requests are said to take, and whether one
    that waited was assigned."""
    server, bench = stepping
    rate, alone = TenantLimits(requests_per_minute=6, burst=1), TenantLimits(concurrency=0)
    await bench.add_worker("w", requests=1)
    await bench.gateway.charge("t", rate)
    (first,) = await bench.run_on("w", bench.request())
    await bench.admit(bench.request())
    (second,) = await bench.claim()
    server.set_clock(step_s)
    await bench.worker.heartbeat("w", {first.id: 1})
    await bench.worker.publish("w", [bench.token(first, 0, finish="stop")])
    assert all(await bench.scheduler.assign(bench.epoch, [(second, "w")]))
    drain = await bench.redis.hgetall(bench.keys.prefix + "drain")
    assert 0 < float(drain[b"rate"]) <= 2 * 12 / 30_000
    assert float(drain[b"service"]) >= 0
    with pytest.raises(ConcurrencyLimited) as refusal:
        await bench.gateway.admit([bench.request()], timeout_s=60, tenant_limits=alone)
    assert refusal.value.retry_after_s >= 1
    for _ in range(2):
        with contextlib.suppress(RateLimited):
            await bench.gateway.charge("t", rate)
    with pytest.raises(RateLimited) as refusal:
        await bench.gateway.charge("t", rate)
    assert refusal.value.retry_after_s <= 10


async def test_a_stream_that_began_again_behind_what_was_read_is_read(stepping: tuple[RedisServer, Bench]) -> None:
    """Redis forgot it, and its clock stepped back: the ids of its entries are below those that the reader knows."""
    server, bench = stepping
    await bench.add_worker("w")
    (request,) = await bench.run_on("w", bench.request())
    await bench.worker.publish("w", [bench.token(request, 0)])
    last_id, events = await bench.gateway.follow(FIRST_ID, 0)
    assert len(events) == 1
    await eventually(lambda: trimmed(bench, last_id))
    await bench.redis.delete(bench.keys.results("g1"))
    server.set_clock(-HOUR_S)
    for index in (1, 2):
        await bench.worker.publish("w", [bench.token(request, index)])
        last_id, (event,) = await bench.gateway.follow(last_id, 0)
        assert event.index == index
        assert await bench.gateway.follow(last_id, 0) == (last_id, [])


async def trimmed(bench: Bench, last_id: str) -> bool:
    """Whether the reader has trimmed all that it has read up to there; what it reads meanwhile is nothing."""
    assert await bench.gateway.follow(last_id, 0) == (last_id, [])
    return bool(await bench.redis.get(bench.keys.handled("g1")) == last_id.encode())
