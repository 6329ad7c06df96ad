"""Hosts whose clocks are minutes off Redis's: leases, deadlines, seats and tables go by Redis TIME alone."""

from __future__ import annotations

import asyncio
import time

import pytest
from testkit.fabric.expert_floor import Floor
from testkit.models.stepping import continuation
from testkit.processes.roles import Deployment, eventually
from testkit.queue.client import Stream
from testkit.queue.redis_server import RedisServer

from services.queue.clock import RedisClock

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
        await eventually(lambda: all(stream.finish for stream in streams), 30)
        assert [stream.tokens for stream in streams] == [continuation([n], 50) for n in range(8)]
        assert scheduler.value("reclaimed_leases_total", outcome="lost") == 0


@pytest.mark.usefixtures("skewed")
async def test_a_request_that_has_no_time_left_ends(redis_server: RedisServer) -> None:
    async with Deployment(redis_server.url) as deployment:
        deployment.scheduler()
        client = await deployment.client()
        (stream,) = await client.submit([1], timeout_s=0.3)
        await eventually(lambda: stream.finish, 30)
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
