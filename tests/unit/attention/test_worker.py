"""A worker over a real Redis with an engine of known tokens: nothing lost, nothing doubled, whatever is pulled out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
from msgspec import structs
from redis.asyncio import Redis
from testkit.models.stepping import SteppingEngine
from testkit.processes.roles import KEYS, Deployment, RunningWorker
from testkit.queue.client import Client, check, finish
from testkit.queue.redis_server import RedisServer
from testkit.waiting import LIMIT_S, eventually

from services.attention.worker import EngineError, EngineStuck
from services.errors import FingerprintMismatch
from services.queue.scheduler_side import SchedulerQueue
from services.queue.worker_side import WorkerQueue

PROMPTS = [[n, n + 1, n + 2] for n in range(12)]


@dataclass
class Recording(SteppingEngine):
    """Knows after how many steps it heard of each cancel."""

    cancelled_after: list[int] = field(default_factory=list)

    def cancel(self, request_id: str, attempt: int) -> None:
        self.cancelled_after.append(self.steps)
        super().cancel(request_id, attempt)


async def test_assigned_requests_stream_their_tokens_and_return_their_credit(server: RedisServer) -> None:
    async with Deployment(server.url, lease_s=30) as deployment:  # no heartbeat tidies up
        deployment.scheduler()
        worker = deployment.worker()
        client = await deployment.client()
        streams = await client.submit(*PROMPTS, max_tokens=20)
        await finish(streams)
        check(streams, 20)
        await eventually(lambda: not worker.worker.held())
        [state] = await SchedulerQueue(deployment.connection(), KEYS, deployment.limits).workers()
        assert (state.info.id, state.outstanding_tokens, state.outstanding_requests) == (worker.info.id, 0, 0)
        assert worker.refused == []
        assert not any(stream.doubled for stream in streams)


async def test_publishing_overlaps_with_computing(server: RedisServer) -> None:
    """The engine goes on to the last token while the first is on its way to Redis."""
    async with Deployment(server.url) as deployment:
        deployment.scheduler()
        worker = deployment.worker()
        sending, may, slow = asyncio.Event(), asyncio.Event(), worker.worker._publisher._send

        async def send(events: Sequence[object]) -> set[str]:
            sending.set()
            await may.wait()
            return await slow(events)  # type: ignore[arg-type]

        worker.worker._publisher._send = send
        client = await deployment.client()
        [stream] = await client.submit([1], max_tokens=20)
        await sending.wait()
        await eventually(lambda: worker.engine.steps == 20)
        assert stream.tokens == []
        may.set()
        await finish([stream])
        check([stream], 20)


async def test_a_cancel_stops_the_engine_within_a_step_and_frees_the_credit(server: RedisServer) -> None:
    async with Deployment(server.url) as deployment:
        deployment.scheduler()
        worker = deployment.worker(engine=(engine := Recording(step_s=0.02)))
        client = await deployment.client()
        [stream] = await client.submit([1], max_tokens=5000)
        await stream.first_token.wait()
        engine.gate.clear()  # the step under way lasts until the worker has heard
        assert await client.queue.cancel([stream.request.id]) == 1
        await eventually(lambda: not worker.worker.held())
        steps = engine.steps
        engine.gate.set()
        await eventually(lambda: engine.cancelled_after)
        assert engine.cancelled_after[0] <= steps + 1
        assert engine.held() == {}
        await eventually(lambda: not worker.worker.unpublished)
        await asyncio.sleep(0.1)
        assert len(stream.tokens) <= steps + 1
        assert not stream.over  # nobody asked to hear of it


async def test_a_taken_over_request_is_dropped_in_silence(server: RedisServer) -> None:
    """The record moves to a later attempt behind the worker's back: the next publish says so."""
    async with Deployment(server.url, lease_s=30) as deployment:  # no heartbeat helps
        deployment.scheduler()
        worker = deployment.worker(engine=SteppingEngine(step_s=0.01))
        client = await deployment.client()
        [stream] = await client.submit([1], max_tokens=5000)
        await stream.first_token.wait()
        await deployment.connection().hset(KEYS.request(stream.request.id), "attempt", 7)
        await eventually(lambda: worker.engine.cancelled == [(stream.request.id, 1)])
        await eventually(lambda: not worker.worker.held())
        assert worker.refused


async def test_a_stale_idle_attempt_is_found_by_the_heartbeat(server: RedisServer) -> None:
    async with Deployment(server.url, lease_s=2.0) as deployment:
        deployment.scheduler()
        engine = SteppingEngine()
        engine.gate.clear()  # never publishes
        worker = deployment.worker(engine=engine)
        client = await deployment.client()
        [stream] = await client.submit([1])
        await eventually(lambda: worker.worker.held())
        await deployment.connection().delete(KEYS.request(stream.request.id))
        await eventually(lambda: not worker.worker.held())


async def test_assignments_of_earlier_or_equal_attempts_are_ignored(server: RedisServer) -> None:
    async with Deployment(server.url) as deployment:
        worker = deployment.worker(engine=SteppingEngine(step_s=0.01))
        client = await deployment.client()
        [stream] = await client.submit([1], max_tokens=1000)
        queue = SchedulerQueue(deployment.connection(), KEYS, deployment.limits)
        epoch = await queue.campaign("me", 10)
        assert epoch is not None
        await eventually(queue.workers)
        [claim] = await queue.claim(epoch, 1)
        request = claim.request
        await queue.assign(epoch, [(request, worker.info.id)])
        await eventually(lambda: worker.engine.added)
        for attempt in (1, 0, 2):
            await _write_assign(deployment.connection(), worker, structs.replace(request, attempt=attempt))
        await eventually(lambda: len(worker.engine.added) == 2)
        assert worker.engine.added == [(stream.request.id, 1), (stream.request.id, 2)]


async def _write_assign(redis: Redis, worker: RunningWorker, request: object) -> None:
    from services.messages import Assign, encode

    await redis.xadd(KEYS.inbox(worker.info.id), {"m": encode(Assign(request))})  # type: ignore[arg-type]


async def ends_later(redis: Redis, request_id: str, than: float) -> bool:
    return await redis.zscore(KEYS.leases, request_id) > than


async def test_leases_are_kept_while_a_long_step_runs(server: RedisServer) -> None:
    async with Deployment(server.url, lease_s=6.0) as deployment:
        deployment.scheduler()
        worker = deployment.worker()
        worker.engine.gate.clear()
        client, redis = await deployment.client(), deployment.connection()
        streams = await client.submit([1], max_tokens=1)
        await eventually(lambda: worker.engine.added)

        for _ in range(2):
            ends = await redis.zscore(KEYS.leases, streams[0].request.id)
            await eventually(partial(ends_later, redis, streams[0].request.id, ends))
        worker.engine.gate.set()
        await finish(streams)
        check(streams, 1)
        assert streams[0].lost == []
        assert worker.refused == []


async def test_redis_killed_and_started_again_costs_no_token(server: RedisServer) -> None:
    async with Deployment(server.url, lease_s=4.0) as deployment:
        deployment.scheduler()
        deployment.worker(engine=SteppingEngine(step_s=0.01))
        client = await deployment.client()
        streams = await client.submit(*PROMPTS, max_tokens=250)
        await streams[0].first_token.wait()
        server.kill()
        await asyncio.sleep(4.2)  # longer than a lease
        server.start()
        await finish(streams)
        check(streams, 250)
        assert [stream.lost for stream in streams] == [[]] * len(streams)


async def test_the_engine_pauses_when_the_buffer_is_full_and_goes_on(server: RedisServer) -> None:
    async with Deployment(server.url) as deployment:
        deployment.scheduler()
        worker = deployment.worker(buffer_tokens=50, engine=SteppingEngine(step_s=0.002))
        client = await deployment.client()
        streams = await client.submit(*PROMPTS[:4], max_tokens=150)
        await streams[0].first_token.wait()
        server.kill()
        await eventually(lambda: worker.worker.missing() == ["Redis"])  # no answer of before is still to be read
        await eventually(lambda: worker.worker.unpublished >= 50)
        steps = worker.engine.steps
        await asyncio.sleep(0.2)
        assert worker.engine.steps == steps
        assert worker.worker.unpublished < 50 + 4
        server.start()
        await finish(streams)
        check(streams, 150)


async def test_a_drain_lets_running_requests_end_and_takes_no_new_ones(server: RedisServer) -> None:
    async with Deployment(server.url) as deployment:
        deployment.scheduler()
        first = deployment.worker(engine=SteppingEngine(step_s=0.01))
        client = await deployment.client()
        streams = await client.submit([1], [2], max_tokens=80)
        await streams[1].first_token.wait()
        registry = SchedulerQueue(deployment.connection(), KEYS, deployment.limits)
        stopping = asyncio.create_task(first.stop())
        await eventually(partial(without_credit, registry))
        second = deployment.worker()
        later = await client.submit([3], max_tokens=5)
        await finish([*streams, *later])
        await stopping
        check(streams, 80)
        check(later, 5)
        assert [stream.lost for stream in streams] == [[], []]
        assert [name for name, _ in second.engine.added] == [later[0].request.id]


async def without_credit(registry: SchedulerQueue) -> bool:
    return [state.credit_requests for state in await registry.workers()] == [0]


async def test_a_drain_gives_back_what_has_not_begun(server: RedisServer) -> None:
    async with Deployment(server.url) as deployment:
        deployment.scheduler()
        engine = SteppingEngine()
        engine.gate.clear()
        first = deployment.worker(engine=engine)
        client = await deployment.client()
        streams = await client.submit([1], [2], max_tokens=5)
        await eventually(lambda: len(first.worker.held()) == 2)
        stopping = asyncio.create_task(first.stop())
        await eventually(lambda: not first.worker.held())
        second = deployment.worker()
        await finish(streams)
        check(streams, 5)
        assert sorted(second.engine.added) == sorted((stream.request.id, 1) for stream in streams)
        engine.gate.set()
        await stopping


async def test_what_does_not_end_in_time_moves_to_another_worker_without_counting_as_failed(
    server: RedisServer,
) -> None:
    async with Deployment(server.url, max_attempts=1) as deployment:
        deployment.scheduler()
        first = deployment.worker(engine=SteppingEngine(step_s=0.01), drain_s=0.1)
        client = await deployment.client()
        streams = await client.submit(*PROMPTS, max_tokens=100)
        await streams[0].first_token.wait()
        await first.stop()
        deployment.worker()
        await finish(streams)
        check(streams, 100)
        assert any(stream.lost for stream in streams)
        queue = SchedulerQueue(deployment.connection(), KEYS, deployment.limits)
        assert (await queue.depth()).dead_letters == 0


async def test_a_killed_worker_is_replaced_without_a_gap(server: RedisServer) -> None:
    async with Deployment(server.url) as deployment:
        deployment.scheduler()
        first = deployment.worker(engine=SteppingEngine(step_s=0.01))
        client = await deployment.client()
        streams = await client.submit(*PROMPTS, max_tokens=100)
        await streams[0].first_token.wait()
        await first.kill()
        await deployment.lapse(first)
        deployment.worker()
        await finish(streams)
        check(streams, 100)
        assert all(len(stream.lost) == 1 for stream in streams)


async def test_a_worker_that_was_away_for_longer_than_its_lease_comes_back_under_its_id(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    present, renew = asyncio.Event(), WorkerQueue.heartbeat

    async def heartbeat(queue: WorkerQueue, worker_id: str, held: Mapping[str, int]) -> set[str]:
        await present.wait()
        return await renew(queue, worker_id, held)

    monkeypatch.setattr(WorkerQueue, "heartbeat", heartbeat)
    present.set()
    async with Deployment(server.url, lease_s=4.0) as deployment:
        deployment.scheduler()
        worker = deployment.worker(engine=SteppingEngine(step_s=0.01))
        client = await deployment.client()
        [stream] = await client.submit([1], max_tokens=300)
        await stream.first_token.wait()
        present.clear()
        await deployment.lapse(worker)
        await eventually(lambda: stream.lost)
        present.set()
        await finish([stream])
        check([stream], 300)
        assert worker.engine.added == [(stream.request.id, 1), (stream.request.id, 2)]


async def test_a_dead_engine_ends_the_worker_and_its_requests_go_elsewhere(server: RedisServer) -> None:
    async with Deployment(server.url) as deployment:
        deployment.scheduler()
        worker = deployment.worker(engine=SteppingEngine(step_s=0.01))
        client = await deployment.client()
        [stream] = await client.submit([1], max_tokens=500)
        await stream.first_token.wait()
        worker.engine.fail = True
        death = await worker.dies_of(EngineError)
        assert isinstance(death.__cause__, ZeroDivisionError)
        await deployment.lapse(worker)
        deployment.worker()
        await finish([stream])
        check([stream], 500)
        assert len(stream.lost) == 1


async def test_a_step_that_hangs_ends_the_worker_and_its_requests_go_elsewhere(server: RedisServer) -> None:
    async with Deployment(server.url) as deployment:
        deployment.scheduler()
        worker = deployment.worker(engine=SteppingEngine(step_s=0.05), step_timeout_s=3.0)
        client = await deployment.client()
        [stream] = await client.submit([1], max_tokens=500)  # its steps together last longer than one may
        await stream.first_token.wait()
        await asyncio.sleep(3.2)
        assert not worker.task.done()
        worker.engine.gate.clear()
        await worker.dies_of(EngineStuck)
        await deployment.lapse(worker)
        deployment.worker()
        await finish([stream])
        check([stream], 500)
        assert len(stream.lost) == 1
        worker.engine.gate.set()


async def test_a_worker_whose_step_hangs_does_not_hang_in_its_drain(server: RedisServer) -> None:
    async with Deployment(server.url) as deployment:
        deployment.scheduler()
        worker = deployment.worker(step_timeout_s=0.4, drain_s=0.1)
        client = await deployment.client()
        worker.engine.gate.clear()
        await client.submit([1])
        await eventually(lambda: worker.engine.added)
        worker.stop_event.set()
        await worker.dies_of(EngineStuck)
        worker.engine.gate.set()


async def test_another_model_in_the_namespace_is_refused(server: RedisServer) -> None:
    async with Deployment(server.url) as deployment:
        worker = deployment.worker()
        await eventually(lambda: not worker.worker.missing())
        queue = WorkerQueue(deployment.connection(), KEYS, deployment.limits)
        with pytest.raises(FingerprintMismatch):
            await queue.register(
                structs.replace(worker.info, id="x", fingerprint="other"), 1, credit_tokens=1, credit_requests=1
            )


async def test_a_worker_started_before_redis_waits_for_it(server: RedisServer) -> None:
    server.kill()
    async with Deployment(server.url) as deployment:
        deployment.scheduler()
        worker = deployment.worker()
        await asyncio.sleep(0.1)
        assert worker.worker.missing() == ["registration"]
        server.start()
        client: Client = await deployment.client()
        streams = await client.submit([1])
        await finish(streams)
        check(streams, 8)


async def test_stopping_while_redis_is_away_does_not_hang(server: RedisServer) -> None:
    async with Deployment(server.url) as deployment:
        worker = deployment.worker()
        await eventually(lambda: not worker.worker.missing())
        server.kill()
        started = time.monotonic()
        await worker.stop()
        assert time.monotonic() - started < LIMIT_S
