"""A client that goes away frees its request at once; one that returns with its key gets the same answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from testkit.http_peer import post
from testkit.queue.scripted import ScriptedQueue
from testkit.waiting import LIMIT_S, eventually

from services.errors import QueueFull
from services.gateway.connections import Connections
from services.gateway.job import MAX_READERS

STREAM = {"prompt": "hello", "max_tokens": 90, "stream": True}


async def until_delivered(gateway: Any, count: int) -> None:
    """So many tokens of each sequence of the one job."""
    [job] = gateway.table.jobs()
    await eventually(lambda: all(len(choice.generated) == count for choice in job.choices))


async def until_read_by(gateway: Any, clients: int) -> None:
    [job] = gateway.table.jobs()
    await eventually(lambda: len(job._readers) == clients)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("running", [True, False])
async def test_a_disconnect_cancels_at_once(start, script, monkeypatch, stream, running):
    """Nothing that is done now and then finds it: that is not done here."""
    monkeypatch.setattr(Connections, "watch", lambda _: asyncio.sleep(LIMIT_S))
    gateway = await start()
    peer = await gateway.connect(post(STREAM | {"n": 2, "stream": stream}))
    requests = await gateway.queue.wait_for("admitted", 2)
    if running:
        for request in requests:
            gateway.queue.emit(*script.events(request, [5, 6], finish=None))
        await until_delivered(gateway, 2)
    peer.reset()
    await gateway.queue.wait_for("cancelled", 2)
    delivered = 2 if running else 0
    assert gateway.queue.cancelled == {request.id: delivered for request in requests}
    assert len(gateway.table) == 0
    assert gateway.value("requests_total", finish="cancelled") == 2
    assert gateway.value("request_errors_total", code="unavailable") == 0


async def test_an_answer_learns_of_it_in_its_turn(gateway, monkeypatch):
    """Thousands that leave together would block the event loop: Connections notifies a few of them at a time."""
    waiting: list[Callable[[], None]] = []
    monkeypatch.setattr(Connections, "notify_soon", lambda _, notify: waiting.append(notify))
    peer = await gateway.connect(post(STREAM))
    await gateway.queue.wait_for("admitted", 1)
    peer.reset()
    await eventually(lambda: waiting)
    for _ in range(20):
        await asyncio.sleep(0)
    assert (len(waiting), len(gateway.table)) == (1, 1)
    waiting[0]()
    await gateway.queue.wait_for("cancelled", 1)


async def test_an_answered_request_is_not_cancelled(gateway):
    gateway.says("done")
    peer = await gateway.connect(post(STREAM))
    await peer.until(b"[DONE]")
    peer.reset()
    await asyncio.sleep(0.05)
    assert gateway.queue.cancelled == {}


async def test_the_same_key_attaches_to_the_job_in_flight_from_its_start(gateway, script):
    first, request = await gateway.ask(key="k", stream=True)
    ids = gateway.ids("the lazy dog")
    gateway.queue.emit(*script.events(request, ids[:2], finish=None))
    await until_delivered(gateway, 2)
    second = asyncio.create_task(gateway.post(key="k", stream=True))
    await until_read_by(gateway, 2)
    gateway.queue.emit(*script.events(request, ids[2:], start=2))
    for task in (first, second):
        lines = [line[6:] for line in (await task).text.split("\n\n") if line.startswith("data: {")]
        assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == "the lazy dog"
    assert len(gateway.queue.admitted) == 1


async def test_a_key_is_bound_to_the_first_body_that_is_admitted_and_its_answer_is_replayed(gateway):
    gateway.queue.refusal = QueueFull("full", retry_after_s=2)
    assert (await gateway.post(key="k", max_tokens=9)).status_code == 429
    gateway.queue.refusal = None
    gateway.says("once")
    first, second = await gateway.post(key="k"), await gateway.post(key="k")
    assert first.json()["choices"][0]["text"] == "once"
    assert first.json() == second.json()
    other = await gateway.post(key="k", max_tokens=5)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_conflict")
    assert len(gateway.queue.admitted) == 1


async def test_one_client_leaving_does_not_end_the_job_of_the_other(gateway, script):
    first, request = await gateway.ask(key="k")
    second = asyncio.create_task(gateway.post(key="k"))
    await until_read_by(gateway, 2)
    first.cancel()
    await until_read_by(gateway, 1)
    assert gateway.queue.cancelled == {}
    gateway.queue.emit(*script.events(request, gateway.ids("still")))
    assert (await second).json()["choices"][0]["text"] == "still"


async def test_one_too_many_for_a_job_is_refused_and_the_others_read_on(gateway, script):
    readers = [asyncio.create_task(gateway.post(key="k")) for _ in range(MAX_READERS)]
    [request] = await gateway.queue.wait_for("admitted")
    await until_read_by(gateway, MAX_READERS)
    refused = await gateway.post(key="k")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "work_limit_exceeded")
    assert refused.headers["retry-after"]
    gateway.queue.emit(*script.events(request, gateway.ids("for all")))
    answers = await asyncio.gather(*readers)
    assert {answer.json()["choices"][0]["text"] for answer in answers} == {"for all"}
    assert (await gateway.post(key="k")).status_code == 200


async def test_a_restarted_gateway_takes_the_job_up_with_its_id_and_seed(start):
    queue = ScriptedQueue()
    old = await start(queue=queue)
    waiting, request = await old.ask(key="k")
    waiting.cancel()
    new = await start(queue=ScriptedQueue("another", other=queue))
    new.says("again")
    assert (await new.post(key="k")).json()["choices"][0]["text"] == "again"
    assert new.queue.admitted == []
    (taken,) = new.queue.taken_up
    assert (taken.id, taken.sampling.seed) == (request.id, request.sampling.seed)


async def test_a_cancelled_job_runs_again_for_the_same_key(gateway):
    """The queue learns which of its sequences were charged on arrival."""
    first, _ = await gateway.ask(key="k", n=3)
    first.cancel()
    await gateway.queue.wait_for("cancelled", 3)
    gateway.says("again")
    choices = (await gateway.post(key="k", n=3)).json()["choices"]
    assert [choice["text"] for choice in choices] == ["again"] * 3
    assert [taken.id for taken in gateway.queue.taken_up] == [request.id for request in gateway.queue.admitted]
    assert gateway.queue.places == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize("key", ["", "é", "x" * 256])
async def test_unusable_keys_are_refused(gateway, key):
    headers = [(b"idempotency-key", key.encode("latin-1"))]
    assert (await gateway.http.post("/v1/completions", json=STREAM, headers=headers)).status_code == 400


async def test_keys_of_two_tenants_are_separate(start):
    gateway = await start(tenants=("a", "b"))
    asked = [await gateway.ask(tenant=tenant, key="k") for tenant in ("a", "b")]
    assert [request.tenant for _, request in asked] == ["a", "b"]
    assert len({request.id for _, request in asked}) == 2
    for task, _ in asked:
        task.cancel()
