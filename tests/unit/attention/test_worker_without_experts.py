"""An attention worker whose experts are missing: its attempts are given up, and requests go on where experts are."""

from __future__ import annotations

import asyncio
from functools import partial

from testkit.models.stepping import SteppingEngine
from testkit.processes.roles import KEYS, Deployment, RunningWorker
from testkit.queue.client import check, finish
from testkit.queue.redis_server import RedisServer
from testkit.waiting import eventually

from services.queue.scheduler_side import SchedulerQueue

PROMPTS = [[n, n + 1, n + 2] for n in range(6)]


async def answers_once_experts_come(deployment: Deployment, worker: RunningWorker) -> None:
    """Requests wait while ``worker`` lacks something."""
    client = await deployment.client()
    streams = await client.submit(*PROMPTS, max_tokens=5)
    await asyncio.sleep(0.3)
    assert worker.engine.added == []
    worker.lacks.clear()
    await finish(streams)
    check(streams, 5)


async def credit(deployment: Deployment, wanted: list[int]) -> bool:
    """Whether the workers may be assigned so many requests."""
    registry = SchedulerQueue(deployment.connection(), KEYS, deployment.limits)
    return [state.credit_requests for state in await registry.workers()] == wanted


async def test_what_streams_goes_on_at_a_worker_that_has_experts(server: RedisServer) -> None:
    async with Deployment(server.url, lease_s=30) as deployment:  # no lease ends
        deployment.scheduler()
        first = deployment.worker(engine=SteppingEngine(step_s=0.01))
        client = await deployment.client()
        streams = await client.submit(*PROMPTS, max_tokens=400)
        for stream in streams:
            await stream.first_token.wait()
        first.lacks.append("experts of group 0")
        await eventually(partial(credit, deployment, [0]))
        first.engine.without_experts = True
        await eventually(lambda: not first.worker.held())
        second = deployment.worker()
        await finish(streams)
        check(streams, 400)
        assert [[lost.reason for lost in stream.lost] for stream in streams] == [["experts unavailable"]] * len(streams)
        assert len(second.engine.added) == len(streams)


async def test_what_waits_goes_to_a_worker_that_has_experts_without_counting_as_failed(server: RedisServer) -> None:
    async with Deployment(server.url, lease_s=30, max_attempts=1) as deployment:
        deployment.scheduler()
        first = deployment.worker()
        first.engine.gate.clear()  # a step that waits for experts
        client = await deployment.client()
        streams = await client.submit(*PROMPTS, max_tokens=5)
        await eventually(lambda: len(first.worker.held()) == len(streams))
        first.lacks.append("experts of group 0")
        deployment.worker()
        await finish(streams)
        check(streams, 5)
        first.engine.gate.set()
        await eventually(lambda: not first.worker.held())


async def test_a_worker_without_experts_is_given_nothing_until_they_are_back(server: RedisServer) -> None:
    async with Deployment(server.url, lease_s=30) as deployment:
        deployment.scheduler()
        worker = deployment.worker()
        await eventually(partial(credit, deployment, [64]))
        worker.lacks.append("experts of group 0")
        await eventually(partial(credit, deployment, [0]))
        await answers_once_experts_come(deployment, worker)


async def test_a_worker_that_enters_without_experts_gets_credit_when_they_come(server: RedisServer) -> None:
    async with Deployment(server.url, lease_s=30) as deployment:
        deployment.scheduler()
        worker = deployment.worker()
        worker.lacks.append("experts of group 0")  # before its task first runs
        await eventually(lambda: worker.worker.missing() == [])
        await answers_once_experts_come(deployment, worker)


async def test_at_the_cap_of_attempts_the_request_ends_with_the_typed_error(server: RedisServer) -> None:
    """The experts look as if they could be reached, and fail each time."""
    async with Deployment(server.url, lease_s=30, max_attempts=3) as deployment:
        deployment.scheduler()
        worker = deployment.worker(engine=SteppingEngine(without_experts=True))
        client = await deployment.client()
        streams = await client.submit(*PROMPTS, max_tokens=5)
        await finish(streams)
        for stream in streams:
            assert stream.error is not None
            assert (stream.error.code, stream.error.retry_after_s) == ("expert_unavailable", 3.0)
        assert len(worker.engine.added) == 3 * len(streams)
        queue = SchedulerQueue(deployment.connection(), KEYS, deployment.limits)
        assert (await queue.depth()).dead_letters == 0
        assert [state.outstanding_requests for state in await queue.workers()] == [0]
        worker.engine.without_experts = False
        streams = await client.submit([9], max_tokens=5)
        await finish(streams)
        check(streams, 5)
