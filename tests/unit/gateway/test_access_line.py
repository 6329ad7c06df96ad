"""A gateway's log lines about a request: the one that it ends with, and those about its attempts."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from msgspec import structs
from testkit.http_peer import URL, bearer
from testkit.waiting import eventually

from services.errors import QueueFull

NAMED = {"X-Request-Id": "slow-1"}


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    """The fields of lines with a message, by which tests find them."""
    caplog.set_level(logging.DEBUG, logger="services.gateway")

    def found(message: str = "request") -> list[dict[str, Any]]:
        return [vars(record) for record in caplog.records if record.getMessage() == message]

    return found


async def last(lines: Any) -> dict[str, Any]:
    """The line of the request, which is written once its client has the answer."""
    await eventually(lines)
    (line,) = lines()
    return line


def part(line: dict[str, Any], *names: str) -> list[Any]:
    return [line.get(name) for name in names]


async def test_the_line_says_whose_request_it_was_and_what_became_of_it(start, lines):
    gateway = await start(tenants=("alice",))
    ids = gateway.says("the fox", finish="stop")
    answer = await gateway.http.post(URL, json={"prompt": "hello"}, headers=NAMED | bearer("alice"))
    line, usage = await last(lines), answer.json()["usage"]
    assert part(line, "method", "path", "status", "tenant", "model") == ["POST", URL, 200, "alice", "tiny"]
    assert part(line, "prompt_tokens", "completion_tokens") == [usage["prompt_tokens"], len(ids)]
    assert part(line, "attempts", "finish", "error", "why") == [1, "stop", None, None]
    assert 0 < line["ttft_ms"] <= line["ms"]
    assert line["completion"] == answer.json()["id"]
    (request,) = gateway.queue.admitted
    assert request.id == line["completion"].removeprefix("cmpl-") + "-0"
    assert request.id.startswith("slow-1."), "other roles get the client's id, too"


async def test_a_stream_has_the_same_line(gateway, lines):
    gateway.says("the fox")
    chat = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    answer = await gateway.http.post("/v1/chat/completions", json=chat)
    line = await last(lines)
    assert part(line, "status", "finish", "attempts") == [200, "length", 1]
    assert line["completion"].startswith("chatcmpl-")
    assert line["completion"] in answer.text
    assert line["completion"].endswith(answer.headers["x-request-id"]), "an id that is made is the completion's"


async def test_time_in_the_queue_is_that_of_all_attempts(gateway, lines, script):
    task, request = await gateway.ask()
    first, second = script.events(request, [70, 71], finish=None)
    gateway.queue.emit(structs.replace(first, queued_ms=40), second, script.lost(request, 2))
    (again,) = await gateway.queue.wait_for("resubmitted")
    gateway.queue.emit(*(structs.replace(event, queued_ms=5) for event in script.events(again, [72], start=2)))
    assert (await task).status_code == 200
    assert part(await last(lines), "queue_ms", "attempts", "completion_tokens") == [45, 2, 3]


async def test_a_lost_attempt_has_lines_with_the_ids(gateway, lines, script):
    asking, request = await gateway.ask()
    gateway.queue.emit(*script.events(request, [70], finish=None), script.lost(request, 2))
    (again,) = await gateway.queue.wait_for("resubmitted")
    gateway.queue.emit(*script.events(again, [71], start=1))
    identity = (await asking).headers["x-request-id"]
    ids = [identity, f"{identity}-0"]
    (lost,), (resubmitted,) = lines("lost an attempt"), lines("resubmitted")
    assert part(lost, "request_id", "sequence", "attempt", "why") == [*ids, 1, "lease_expired"]
    assert part(resubmitted, "request_id", "sequence", "attempt", "delivered") == [*ids, 2, 1]
    (admitted,) = lines("admitted")
    assert part(admitted, "request_id", "sequence", "attempt") == [*ids, 1]


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({"prompt": "a", "max_tokens": -1}, 400, "invalid_request", "max_tokens"),
        ({"prompt": "a", "model": "x" * 999}, 404, "model_not_found", "model"),
        ({"prompt": "a " * 999}, 400, "context_length_exceeded", "prompt"),
    ],
)
async def test_a_refusal_says_why(gateway, lines, body, status, code, param):
    answer = await gateway.http.post(URL, json=body, headers=NAMED)
    line = await last(lines)
    assert part(line, "status", "error", "param") == [answer.status_code, code, param] == [status, code, param]
    assert line["why"] == answer.json()["error"]["message"][:200]
    assert part(line, "tenant", "completion", "finish") == ["default", None, None]


async def test_what_the_queue_refuses_and_what_fails_later_says_why(gateway, lines, script):
    gateway.queue.refusal = QueueFull("9 requests wait already.", retry_after_s=3)
    await gateway.post()
    assert part(await last(lines), "status", "error", "why") == [429, "queue_full", "9 requests wait already."]
    gateway.queue.refusal = None
    asking, request = await gateway.ask(stream=True)
    gateway.queue.emit(*script.events(request, [70], finish=None))
    await eventually(lambda: gateway.table.jobs()[0].choices[0].generated)
    gateway.follower.fail(gateway.table.jobs()[0], QueueFull("Of a sudden."))
    assert (await asking).status_code == 200
    await eventually(lambda: len(lines()) == 2)
    names = ("status", "finish", "error", "why", "completion_tokens")
    assert part(lines()[1], *names) == [200, "error", "queue_full", "Of a sudden.", 1]


async def test_a_client_that_returns_reads_the_job_under_its_first_name(gateway, lines):
    gateway.says("the fox")
    for name in ("first", "second"):
        headers = {"X-Request-Id": name, "Idempotency-Key": "k"}
        assert (await gateway.http.post(URL, json={"prompt": "a"}, headers=headers)).headers["x-request-id"] == name
    await eventually(lambda: len(lines()) == 2)
    assert len({line["completion"] for line in lines()}) == 1
    assert lines()[0]["completion"].startswith("cmpl-first.")
