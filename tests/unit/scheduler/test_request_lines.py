"""A scheduler's log lines about requests: whom each attempt went to, and what ended here."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from testkit.models.stepping import SteppingEngine
from testkit.processes.roles import Deployment
from testkit.queue.client import finish
from testkit.queue.redis_server import RedisServer
from testkit.waiting import eventually

IDS = ("request_id", "sequence", "attempt")


def ids_of(stream: Any, attempt: int) -> list[Any]:
    base, _, _ = stream.request.id.rpartition("-")
    return [base or stream.request.id, stream.request.id, attempt]


def fields(record: logging.LogRecord, *names: str) -> list[Any]:
    return [vars(record)[name] for name in names]


async def test_assignments_and_lost_attempts_are_logged_with_their_ids(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="services")

    def said(beginning: str) -> list[logging.LogRecord]:
        records = (record for record in caplog.records if not record.name.startswith("services.gateway"))
        return [record for record in records if record.getMessage().startswith(beginning)]

    async with Deployment(server.url, max_attempts=2) as deployment:
        deployment.scheduler()
        client = await deployment.client()
        [stream] = await client.submit([1], max_tokens=1000)
        workers = []
        for attempt in (1, 2):
            worker = deployment.worker()
            worker.engine.gate.clear()
            await eventually(lambda attempt=attempt, worker=worker: (stream.request.id, attempt) in worker.engine.added)
            await worker.kill()
            await deployment.lapse(worker)
            workers.append(worker.info.id)
        await stream.ended.wait()
        await eventually(lambda: said("ended a request"))
        first, second = said("assigned")
        assert fields(first, *IDS, "worker", "levelname") == [*ids_of(stream, 1), workers[0], "DEBUG"]
        assert fields(second, *IDS, "worker", "levelname") == [*ids_of(stream, 2), workers[1], "INFO"]
        assert all(record.queue_ms >= 0 for record in (first, second))
        (lost,), (dead,) = said("lost an attempt"), said("ended a request: too many attempts failed")
        assert fields(lost, *IDS, "worker", "levelname") == [*ids_of(stream, 1), workers[0], "INFO"]
        assert fields(dead, *IDS, "worker", "levelname") == [*ids_of(stream, 2), workers[1], "INFO"]


async def test_a_request_that_ends_in_the_queue_has_a_line_that_says_why(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="services")
    async with Deployment(server.url) as deployment:
        deployment.scheduler()
        client = await deployment.client()
        [late] = await client.submit([1], timeout_s=0.2)
        await finish([late])
        deployment.worker(engine=SteppingEngine(), credit_tokens=100)
        [big] = await client.submit([1], max_tokens=5000)
        await finish([big])
        await client.submit([2], max_tokens=5)
        ended = [record for record in caplog.records if record.getMessage().startswith("ended a request")]
        assert [fields(record, *IDS) for record in ended] == [ids_of(late, 1), ids_of(big, 1)]
        assert "its deadline passed in the queue" in ended[0].getMessage()
        assert fields(ended[1], "why") == [big.error.message if big.error else None]
