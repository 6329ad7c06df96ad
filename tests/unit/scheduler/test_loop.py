"""Schedulers over a real Redis with workers of known tokens: leadership, dispatch, credit, repair."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from itertools import takewhile

import pytest
from redis.asyncio import Redis
from testkit.models.stepping import SteppingEngine
from testkit.processes.roles import KEYS, Deployment, RunningScheduler
from testkit.queue.client import check, finish
from testkit.queue.redis_server import RedisServer
from testkit.waiting import LIMIT_S, eventually

from services.errors import StaleLeader
from services.queue.scheduler_side import SchedulerQueue
from services.scheduler.loop import Intervals

PROMPTS = [[n, n + 1, n + 2] for n in range(16)]


def leads(scheduler: RunningScheduler) -> bool:
    return scheduler.value("scheduler_leader") == 1


async def calls(deployment: Deployment) -> int:
    """Calls that Redis has answered; what scripts do inside does not count."""
    stats = await deployment.connection().info("commandstats")
    return sum(stats[name]["calls"] for name in ("cmdstat_evalsha", "cmdstat_blpop", "cmdstat_info") if name in stats)


async def calls_a_second(deployment: Deployment) -> float:
    before, began = await calls(deployment), time.monotonic()
    await asyncio.sleep(1.0)
    return (await calls(deployment) - before) / (time.monotonic() - began)


@pytest.mark.parametrize("lease_s", [0.1, 1.0, 6.0, 3600.0])
def test_intervals_leave_a_killed_leader_three_seconds_or_a_lease(lease_s: float) -> None:
    intervals = Intervals.of(lease_s)
    assert intervals.lock_ttl + intervals.poll <= min(lease_s, 3.0)
    assert intervals.renew + intervals.tick < intervals.lock_ttl
    assert intervals.reap < lease_s


def intervals(monkeypatch: pytest.MonkeyPatch, **others: float) -> None:
    real = Intervals.of
    monkeypatch.setattr(Intervals, "of", lambda lease_s: replace(real(lease_s), **others))


async def test_a_request_to_an_idle_system_is_dispatched_at_once(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    intervals(monkeypatch, tick=2 * LIMIT_S, lock_ttl=3600)  # nobody but a request wakes the loop
    async with Deployment(server.url) as deployment:
        scheduler = deployment.scheduler()
        worker = deployment.worker()
        client = await deployment.client()
        await eventually(lambda: leads(scheduler) and not worker.worker.missing())
        for n in range(5):
            await asyncio.sleep(0.03)
            await finish(await client.submit([n], max_tokens=1))
        assert scheduler.value("request_queue_seconds_count") == 5


async def _lives_for(redis: Redis, milliseconds: int) -> bool:
    return int(await redis.pttl(KEYS.leader)) > milliseconds


class Stuck:
    """A placement that takes for ever, or that meets another leader."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.turns = error, 0

    async def turn(self, _epoch: int) -> bool:
        self.turns += 1
        if self.error is not None:
            raise self.error
        await asyncio.Event().wait()
        return False


async def test_requests_do_not_wait_for_the_placement_of_experts(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    intervals(monkeypatch, lock_ttl=30, renew=0.2)
    async with Deployment(server.url) as deployment:
        stuck = Stuck()
        scheduler = deployment.scheduler(lambda: stuck)
        deployment.worker()
        await eventually(lambda: stuck.turns == 1)
        streams = await (await deployment.client()).submit(*PROMPTS, max_tokens=3)
        await finish(streams)
        check(streams, 3)
        redis = deployment.connection()
        await redis.pexpire(KEYS.leader, 20_000)
        await eventually(partial(_lives_for, redis, 25_000))  # its lock is renewed
        assert leads(scheduler)
        assert stuck.turns == 1
        await scheduler.stop()
        assert not leads(scheduler)


async def test_a_placement_that_meets_another_leader_ends_the_term(server: RedisServer) -> None:
    async with Deployment(server.url) as deployment:
        deposed = Stuck(StaleLeader("Another scheduler leads."))
        scheduler = deployment.scheduler(lambda: deposed)
        await eventually(lambda: deposed.turns > 2)
        deposed.error = RuntimeError("a fault")
        await scheduler.dies_of(RuntimeError, match="a fault")


async def test_of_two_schedulers_one_leads_both_sleep_and_a_resignation_is_succeeded_at_once(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    intervals(monkeypatch, lock_ttl=3600)  # nobody waits for its end
    async with Deployment(server.url, lease_s=6.0) as deployment:
        schedulers = [deployment.scheduler(), deployment.scheduler()]
        await eventually(lambda: any(map(leads, schedulers)))
        assert await calls_a_second(deployment) < 60
        assert [leads(scheduler) for scheduler in schedulers].count(True) == 1
        leader, standby = sorted(schedulers, key=leads, reverse=True)
        await leader.stop()
        await eventually(lambda: leads(standby))
        assert not leads(leader)


async def test_a_standby_takes_over_from_a_killed_leader_and_nothing_is_lost(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Deployment(server.url) as deployment:
        leader = deployment.scheduler()
        await eventually(lambda: leads(leader))
        standby = deployment.scheduler()
        deployment.worker(engine=SteppingEngine(step_s=0.01), credit_requests=2)
        client = await deployment.client()
        streams = await client.submit(*PROMPTS, max_tokens=20)
        await streams[0].first_token.wait()
        intervals, redis = Intervals.of(deployment.lease_s), deployment.connection()
        campaigns, campaign = [], SchedulerQueue.campaign

        async def watched(queue, token, ttl_s):
            left_ms = await redis.pttl(KEYS.leader)
            campaigns.append((left_ms, ttl_s, await campaign(queue, token, ttl_s)))
            return campaigns[-1][2]

        monkeypatch.setattr(SchedulerQueue, "campaign", watched)
        await leader.kill()
        assert await redis.pttl(KEYS.leader) <= intervals.lock_ttl * 1000, "it ends in the time that intervals say"
        await eventually(lambda: leads(standby))
        refused = list(takewhile(lambda tried: tried[2] is None, campaigns))
        gone_ms = -2  # what Redis says of a key that is not there; a lock in its last millisecond has 0 left
        assert all(left_ms > gone_ms for left_ms, _, _ in refused), "the first one after the lock's end takes it"
        assert campaigns[len(refused)][1] == intervals.lock_ttl
        await finish(streams)
        check(streams, 20)
        assert not any(stream.lost or stream.doubled for stream in streams)


async def test_claims_of_a_killed_leader_go_back_to_the_queue(server: RedisServer) -> None:
    async with Deployment(server.url) as deployment:
        client = await deployment.client()
        streams = await client.submit(*PROMPTS, max_tokens=3)
        queue = SchedulerQueue(deployment.connection(), KEYS, deployment.limits)
        epoch = await queue.campaign("dies now", 0.2)
        assert epoch is not None
        assert len(await queue.claim(epoch, 10)) == 10
        deployment.worker()
        deployment.scheduler()
        await finish(streams)
        check(streams, 3)


async def test_a_leader_that_was_deposed_steps_down(server: RedisServer) -> None:
    async with Deployment(server.url) as deployment:
        scheduler = deployment.scheduler()
        await eventually(lambda: leads(scheduler))
        connection = deployment.connection()
        async with connection.pipeline(transaction=True) as both:  # the leader renews its lock meanwhile
            both.set(KEYS.leader, "usurper", px=60_000)
            both.incrby(KEYS.leader + ":epoch", 1)
            await both.execute()
        await eventually(lambda: not leads(scheduler))
        await connection.delete(KEYS.leader)
        await eventually(lambda: leads(scheduler))


@pytest.mark.parametrize(
    ("credit", "requests", "most"),
    [({"credit_requests": 3}, 16, 3), ({"credit_tokens": 50}, 6, 2)],  # 23 tokens each: two at a time
    ids=["requests", "tokens"],
)
async def test_credit_is_never_exceeded_and_all_of_it_is_used(
    server: RedisServer, credit: dict[str, int], requests: int, most: int
) -> None:
    async with Deployment(server.url) as deployment:
        deployment.scheduler()
        worker = deployment.worker(engine=SteppingEngine(step_s=0.005), **credit)
        client = await deployment.client()
        streams = await client.submit(*PROMPTS[:requests], max_tokens=20)
        peak = 0
        async with asyncio.timeout(LIMIT_S):
            while not all(stream.finish for stream in streams):
                peak = max(peak, len(worker.worker.held()))
                await asyncio.sleep(0.001)
        assert peak == most
        await finish(streams)
        check(streams, 20)


async def test_while_all_credit_is_used_the_loop_sleeps_and_its_gauges_vanish_with_leadership(
    server: RedisServer,
) -> None:
    async with Deployment(server.url, lease_s=6.0) as deployment:
        scheduler = deployment.scheduler()
        engine = SteppingEngine()
        engine.gate.clear()
        worker = deployment.worker(engine=engine, credit_requests=1)
        client = await deployment.client()
        streams = await client.submit(*PROMPTS, max_tokens=7)
        await eventually(lambda: worker.worker.held())
        await eventually(lambda: scheduler.value("queue_requests") == 15)
        assert scheduler.value("queue_tokens") == 150
        assert scheduler.value("workers") == 1
        assert scheduler.value("worker_outstanding_tokens", worker=worker.info.id) == 10
        assert await calls_a_second(deployment) < 60
        engine.gate.set()
        await finish(streams)
        check(streams, 7)
        await scheduler.stop()
        assert scheduler.value("workers") == 0
        outstanding = "expertmesh_worker_outstanding_tokens"
        assert scheduler.registry.get_sample_value(outstanding, {"worker": worker.info.id}) is None


async def test_work_is_spread_over_workers_and_a_shared_prompt_goes_where_it_was_computed(server: RedisServer) -> None:
    async with Deployment(server.url) as deployment:
        scheduler = deployment.scheduler()
        workers = [deployment.worker(engine=SteppingEngine(step_s=0.01)) for _ in range(2)]
        await eventually(lambda: not any(worker.worker.missing() for worker in workers))
        client = await deployment.client()
        streams = await client.submit(*PROMPTS, max_tokens=30)
        await finish(streams)
        check(streams, 30)
        assert [len(worker.engine.added) for worker in workers] == [8, 8]
        assert scheduler.value("dispatched_requests_total", affinity="load") == 16
        for n in range(6):
            streams = await client.submit([*range(200), n], max_tokens=2)
            await finish(streams)
            check(streams, 2)
        assert sorted(len(worker.engine.added) for worker in workers) == [8, 14]
        assert scheduler.value("dispatched_requests_total", affinity="prefix") == 5


async def test_a_request_that_cannot_be_run_or_waits_too_long_fails_by_name_and_blocks_nobody(
    server: RedisServer,
) -> None:
    async with Deployment(server.url) as deployment:
        scheduler = deployment.scheduler()
        client = await deployment.client()
        [late] = await client.submit([1], timeout_s=0.2)
        await finish([late])
        await eventually(lambda: scheduler.value("reclaimed_leases_total", outcome="expired") == 1)
        deployment.worker(credit_tokens=100)
        [big] = await client.submit([1], max_tokens=500)
        small = await client.submit([2], max_tokens=5)
        await finish([big, *small])
        check(small, 5)
        assert [stream.error and stream.error.code for stream in (late, big)] == [
            "deadline_exceeded",
            "context_length_exceeded",
        ]


async def test_without_redis_nobody_is_ready_and_after_it_was_away_nothing_is_reclaimed_for_a_lease(
    server: RedisServer,
) -> None:
    async with Deployment(server.url, lease_s=0.8) as deployment:
        schedulers = [deployment.scheduler() for _ in range(2)]

        def lack_redis() -> list[bool]:
            return [running.scheduler.missing() == ["Redis"] for running in schedulers]

        assert all(lack_redis())
        await eventually(lambda: not any(running.scheduler.missing() for running in schedulers), "leading or not")
        worker = deployment.worker(engine=SteppingEngine(step_s=0.02))
        client = await deployment.client()
        [stream] = await client.submit([1], max_tokens=1000)
        await stream.first_token.wait()
        server.kill()
        await eventually(lambda: all(lack_redis()) and not any(map(leads, schedulers)))
        await worker.kill()
        await asyncio.sleep(1.0)
        server.start()
        back = time.monotonic()
        await eventually(lambda: stream.lost)
        assert time.monotonic() - back >= 0.8
        await eventually(lambda: any(map(leads, schedulers)))


async def test_a_request_that_fails_on_every_worker_is_dead_lettered(server: RedisServer) -> None:
    async with Deployment(server.url, max_attempts=2) as deployment:
        scheduler = deployment.scheduler()
        client = await deployment.client()
        [stream] = await client.submit([1], max_tokens=1000)
        for attempt in (1, 2):
            worker = deployment.worker()
            worker.engine.gate.clear()  # no token before its death
            await eventually(lambda attempt=attempt, worker=worker: (stream.request.id, attempt) in worker.engine.added)
            await worker.kill()
            await deployment.lapse(worker)
        await stream.ended.wait()
        assert stream.error is not None
        assert stream.error.code == "attempts_exhausted"
        await eventually(lambda: scheduler.value("dead_letters") == 1)
        assert scheduler.value("reclaimed_leases_total", outcome="lost") == 1
        assert scheduler.value("reclaimed_leases_total", outcome="dead") == 1
