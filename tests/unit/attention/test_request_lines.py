"""An attention worker's log lines about requests: when an attempt starts, ends, is given up or handed over."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from testkit.models.stepping import SteppingEngine
from testkit.processes.roles import Deployment
from testkit.queue.client import finish
from testkit.queue.redis_server import RedisServer
from testkit.waiting import eventually

from services.attention.request_log import log_attempts, log_end
from services.attention.worker import EngineError
from services.errors import ErrorInfo
from services.messages import TokenEvent

IDS = ("request_id", "sequence", "attempt")


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    """The lines that begin so."""
    caplog.set_level(logging.DEBUG, logger="services.attention")

    def found(beginning: str) -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.getMessage().startswith(beginning)]

    return found


def fields(record: logging.LogRecord, *names: str) -> list[Any]:
    return [vars(record)[name] for name in names]


async def test_a_request_that_goes_well_has_two_lines_at_debug_and_none_for_its_tokens(
    server: RedisServer, said: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with Deployment(server.url) as deployment:
        deployment.scheduler()
        worker = deployment.worker()
        client = await deployment.client()
        [stream] = await client.submit([1, 2, 3], max_tokens=20)
        await finish([stream])
        await eventually(lambda: not worker.worker.held())
    (started,), (ended,) = said("started"), said("ended")
    name = stream.request.id
    assert fields(started, "sequence", "attempt", "prompt_tokens", "delivered") == [name, 1, 3, 0]
    assert fields(ended, "sequence", "attempt", "finish", "completion_tokens") == [name, 1, "length", 20]
    about = [record for record in caplog.records if hasattr(record, "sequence")]
    assert [record.levelname for record in about if record.name.startswith("services.attention")] == ["DEBUG"] * 2


async def test_what_a_worker_holds_when_its_engine_fails_has_a_line_each(server: RedisServer, said: Any) -> None:
    class Failing(SteppingEngine):
        def step(self) -> list[TokenEvent]:
            raise RuntimeError("no memory")

    async with Deployment(server.url) as deployment:
        deployment.scheduler()
        worker = deployment.worker(engine=Failing())
        client = await deployment.client()
        [stream] = await client.submit([1])
        await worker.dies_of(EngineError)
    (lost,) = said("lost an attempt: its worker ends")
    assert fields(lost, "sequence", "attempt", "levelname") == [stream.request.id, 1, "INFO"]


async def test_a_drain_says_which_attempts_are_handed_over(server: RedisServer, said: Any) -> None:
    async with Deployment(server.url) as deployment:
        deployment.scheduler()
        worker = deployment.worker(engine=SteppingEngine(step_s=0.01), drain_s=0.1)
        client = await deployment.client()
        [stream] = await client.submit([1], max_tokens=5000)
        await stream.first_token.wait()
        await worker.stop()
    (over,) = said("handed over an attempt")
    assert fields(over, "sequence", "attempt", "levelname") == [stream.request.id, 1, "INFO"]


def test_a_failure_is_a_line_at_info_with_its_reason(said: Any) -> None:
    error = ErrorInfo(code="internal_error", message="A step failed.")
    log_end(TokenEvent(request_id="slow-1.ab-0", attempt=2, index=7, finish="error", error=error))
    (ended,) = said("ended")
    assert fields(ended, *IDS, "levelname") == ["slow-1", "slow-1.ab-0", 2, "INFO"]
    assert fields(ended, "finish", "completion_tokens", "error", "why") == [
        "error", 7, "internal_error", "A step failed.",
    ]  # fmt: skip


def test_attempts_have_a_line_each(said: Any) -> None:
    log_attempts("gave up an attempt", {"a.1-0": 1, "b.2-0": 3})
    assert [fields(record, *IDS) for record in said("gave")] == [["a", "a.1-0", 1], ["b", "b.2-0", 3]]
