"""An attention worker whose experts are missing: its attempts are given up, and requests go on where experts are."""

from __future__ import annotations

import asyncio

import pytest
from testkit.models.stepping import SteppingEngine
from testkit.processes.roles import Deployment, RunningWorker
from testkit.queue.client import Client, complete, finish
from testkit.waiting import eventually

PROMPTS = [[n, n + 1, n + 2] for n in range(6)]


async def answers_once_experts_come(client: Client, worker: RunningWorker) -> None:
    """Requests wait while ``worker`` lacks something."""
    streams = await client.submit(*PROMPTS, max_tokens=5)
    await asyncio.sleep(0.3)
    assert worker.engine.added == []
    worker.lacks.clear()
    await complete(streams, 5)


async def test_what_streams_goes_on_at_a_worker_that_has_experts(
    deployment: Deployment, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="services.attention")
    first = deployment.worker(engine=SteppingEngine(step_s=0.01))
    streams = await client.submit(*PROMPTS, max_tokens=400)
    for stream in streams:
        await stream.first_token.wait()
    first.lacks.append("experts of group 0")
    await eventually(lambda: deployment.has_credit(0))
    first.engine.without_experts = True
    await eventually(lambda: not first.worker.held())
    second = deployment.worker()
    await complete(streams, 400)
    assert [[lost.reason for lost in stream.lost] for stream in streams] == [["experts unavailable"]] * len(streams)
    assert len(second.engine.added) == len(streams)
    given_up = [vars(each) for each in caplog.records if each.getMessage().startswith("gave up an attempt")]
    assert sorted((line["sequence"], line["attempt"]) for line in given_up) == sorted(
        (s.request.id, 1) for s in streams
    )


@pytest.mark.parametrize("deployment", [{"max_attempts": 1}], indirect=True)
async def test_what_waits_goes_to_a_worker_that_has_experts_without_counting_as_failed(
    deployment: Deployment, client: Client
) -> None:
    first = deployment.worker()
    first.engine.gate.clear()  # a step that waits for experts
    streams = await client.submit(*PROMPTS, max_tokens=5)
    await eventually(lambda: len(first.worker.held()) == len(streams))
    first.lacks.append("experts of group 0")
    deployment.worker()
    await complete(streams, 5)
    first.engine.gate.set()
    await eventually(lambda: not first.worker.held())


async def test_a_worker_without_experts_is_given_nothing_until_they_are_back(
    deployment: Deployment, client: Client
) -> None:
    worker = deployment.worker()
    await eventually(lambda: deployment.has_credit(64))
    worker.lacks.append("experts of group 0")
    await eventually(lambda: deployment.has_credit(0))
    await answers_once_experts_come(client, worker)


async def test_a_worker_that_enters_without_experts_gets_credit_when_they_come(
    deployment: Deployment, client: Client
) -> None:
    worker = deployment.worker()
    worker.lacks.append("experts of group 0")  # before its task first runs
    await eventually(lambda: worker.worker.missing() == [])
    await answers_once_experts_come(client, worker)


async def test_at_the_cap_of_attempts_the_request_ends_with_the_typed_error(
    deployment: Deployment, client: Client
) -> None:
    """The experts look as if they could be reached, and fail each time."""
    worker = deployment.worker(engine=SteppingEngine(without_experts=True))
    streams = await client.submit(*PROMPTS, max_tokens=5)
    await finish(streams)
    for stream in streams:
        assert stream.error is not None
        assert (stream.error.code, stream.error.retry_after_s) == ("expert_unavailable", 3.0)
    assert len(worker.engine.added) == 3 * len(streams)
    assert (await deployment.queue.depth()).dead_letters == 0
    assert [state.outstanding_requests for state in await deployment.queue.workers()] == [0]
    worker.engine.without_experts = False
    streams = await client.submit([9], max_tokens=5)
    await complete(streams, 5)
