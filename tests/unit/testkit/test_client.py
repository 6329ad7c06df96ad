"""The kit's clients and roles look until they have ended: nothing that goes wrong after the last assertion passes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from testkit.processes.background import ended
from testkit.processes.roles import Running
from testkit.queue.client import Stream
from testkit.queue.gateway import Gateway
from testkit.queue.scripted import ScriptedQueue

from services.messages import AttemptLost, GenerateRequest, SamplingParams, TokenEvent

REQUEST = GenerateRequest(
    id="r", attempt=1, token_ids=[1], prompt_len=1, sampling=SamplingParams(max_tokens=9), deadline_ms=0, priority=5,
    tenant="t", reply_to="gw",
)  # fmt: skip


def event(index: int, token_id: int, finish: Any = None) -> TokenEvent:
    return TokenEvent(request_id="r", attempt=1, index=index, token_id=token_id, finish=finish)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (event(2, 7), "after the end"),
        (AttemptLost(request_id="r", attempt=2, reason="lease_expired"), "after the end"),
        (event(0, 8), "another draw"),
    ],
)
async def test_what_comes_after_the_end_ends_the_client_that_hears_it(more: Any, says: str) -> None:
    stream, queue = Stream(), ScriptedQueue()
    gateway = Gateway(queue, hear=stream.hear)
    running = asyncio.create_task(gateway.follower.run())
    job = await gateway.admit(REQUEST)
    job.when_done(stream.ended.set)
    queue.emit(event(0, 5), event(1, 6, "length"))
    await asyncio.wait_for(stream.ended.wait(), 20)
    queue.emit(more)
    await asyncio.wait([running], timeout=20)
    with pytest.raises(AssertionError, match=says):
        await ended([running])


def test_a_gap_is_heard() -> None:
    with pytest.raises(AssertionError, match="gap"):
        Stream().hear(event(1, 5))


@pytest.mark.parametrize(("error", "says"), [(ValueError("a fault"), "a fault"), (None, "nobody stopped it")])
async def test_a_role_that_died_or_left_fails_the_test_that_kills_it(error: Exception | None, says: str) -> None:
    async def role() -> None:
        if error is not None:
            raise error

    running = Running(redis=None, task=asyncio.create_task(role()), stop_event=asyncio.Event())  # type: ignore[arg-type]
    await asyncio.wait([running.task])
    with pytest.raises((ValueError, AssertionError), match=says):
        await running.kill()
    if error is not None:
        await running.dies_of(ValueError)
        await running.kill()
