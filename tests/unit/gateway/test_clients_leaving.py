"""A client that goes away frees its request at once; one that returns with its key gets the same answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from testkit.waiting import LIMIT_S, eventually

from services.gateway.connections import Connections
from services.gateway.job import MAX_READERS

BODY = {"prompt": "hello", "max_tokens": 90, "temperature": 0.5}


async def raw_request(gateway: Any, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    port = httpx.URL(gateway.url).port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return reader, writer


async def until_delivered(gateway: Any, count: int) -> None:
    """So many tokens of each sequence of the one job."""
    [job] = gateway.table.jobs()
    await eventually(lambda: all(len(choice.generated) == count for choice in job.choices))


async def until_read_by(gateway: Any, clients: int) -> None:
    [job] = gateway.table.jobs()
    await eventually(lambda: len(job._readers) == clients)


async def reset(writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.transport.abort()


@pytest.mark.parametrize("stream", [b"true", b"false"])
@pytest.mark.parametrize("running", [True, False])
async def test_a_disconnect_cancels_at_once(start, script, monkeypatch, stream, running):
    """Nothing that is done now and then finds it: that is not done here."""
    monkeypatch.setattr(Connections, "watch", lambda _: asyncio.sleep(LIMIT_S))
    gateway = await start()
    _, writer = await raw_request(gateway, b'{"prompt":"hello","max_tokens":90,"n":2,"stream":' + stream + b"}")
    requests = await gateway.queue.wait_for("admitted", 2)
    if running:
        for request in requests:
            gateway.queue.emit(*script.events(request, [5, 6], finish=None))
        await until_delivered(gateway, 2)
    await reset(writer)
    await gateway.queue.wait_for("cancelled", 2)
    delivered = 2 if running else 0
    assert gateway.queue.cancelled == {request.id: delivered for request in requests}
    assert len(gateway.table) == 0
    assert gateway.registry.get_sample_value("expertmesh_requests_total", {"finish": "cancelled"}) == 2
    assert gateway.registry.get_sample_value("expertmesh_request_errors_total", {"code": "unavailable"}) is None


async def test_an_answer_learns_of_it_in_its_turn(gateway, monkeypatch):
    """Thousands that leave together would block the event loop: Connections notifies a few of them at a time."""
    waiting: list[Callable[[], None]] = []
    monkeypatch.setattr(Connections, "notify_soon", lambda _, notify: waiting.append(notify))
    _, writer = await raw_request(gateway, b'{"prompt":"hello","max_tokens":90,"stream":true}')
    await gateway.queue.wait_for("admitted", 1)
    await reset(writer)
    await eventually(lambda: waiting)
    for _ in range(20):
        await asyncio.sleep(0)
    assert (len(waiting), len(gateway.table)) == (1, 1)
    waiting[0]()
    await gateway.queue.wait_for("cancelled", 1)


async def test_an_answered_request_is_not_cancelled(gateway, script):
    gateway.queue.answer = lambda request: script.events(request, gateway.ids("done"))
    reader, writer = await raw_request(gateway, b'{"prompt":"hello","stream":true}')
    await reader.readuntil(b"[DONE]")
    await reset(writer)
    await asyncio.sleep(0.05)
    assert gateway.queue.cancelled == {}


async def post(gateway: Any, key: str, body: dict[str, Any] = BODY) -> httpx.Response:
    return await gateway.http.post("/v1/completions", json=body, headers={"Idempotency-Key": key})


async def test_the_same_key_attaches_to_the_job_in_flight_from_its_start(gateway, script):
    first = asyncio.create_task(post(gateway, "k", {**BODY, "stream": True}))
    request = (await gateway.queue.wait_for("admitted"))[0]
    ids = gateway.ids("the lazy dog")
    gateway.queue.emit(*script.events(request, ids[:2], finish=None))
    await until_delivered(gateway, 2)
    second = asyncio.create_task(post(gateway, "k", {**BODY, "stream": True}))
    await until_read_by(gateway, 2)
    gateway.queue.emit(*script.events(request, ids[2:], start=2))
    texts = [_streamed(await task) for task in (first, second)]
    assert texts == ["the lazy dog", "the lazy dog"]
    assert len(gateway.queue.admitted) == 1


def _streamed(answer: httpx.Response) -> str:
    import json

    lines = [line[6:] for line in answer.text.split("\n\n") if line.startswith("data: {")]
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


async def test_a_finished_job_is_replayed(gateway, script):
    gateway.queue.answer = lambda request: script.events(request, gateway.ids("once"))
    first, second = await post(gateway, "k"), await post(gateway, "k")
    assert first.json() == second.json()
    assert len(gateway.queue.admitted) == 1


async def test_one_client_leaving_does_not_end_the_job_of_the_other(gateway, script):
    first = asyncio.create_task(post(gateway, "k"))
    request = (await gateway.queue.wait_for("admitted"))[0]
    second = asyncio.create_task(post(gateway, "k"))
    await until_read_by(gateway, 2)
    first.cancel()
    await until_read_by(gateway, 1)
    assert gateway.queue.cancelled == {}
    gateway.queue.emit(*script.events(request, gateway.ids("still")))
    assert (await second).json()["choices"][0]["text"] == "still"


async def test_one_too_many_for_a_job_is_refused_and_the_others_read_on(gateway, script):
    readers = [asyncio.create_task(post(gateway, "k")) for _ in range(MAX_READERS)]
    [request] = await gateway.queue.wait_for("admitted")
    await until_read_by(gateway, MAX_READERS)
    refused = await post(gateway, "k")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "work_limit_exceeded")
    assert refused.headers["retry-after"]
    gateway.queue.emit(*script.events(request, gateway.ids("for all")))
    answers = await asyncio.gather(*readers)
    assert {answer.json()["choices"][0]["text"] for answer in answers} == {"for all"}
    assert (await post(gateway, "k")).status_code == 200


async def test_another_body_under_the_same_key_is_a_conflict(gateway, script):
    gateway.queue.answer = lambda request: script.events(request, gateway.ids("once"))
    await post(gateway, "k")
    answer = await post(gateway, "k", {**BODY, "max_tokens": 5})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "idempotency_conflict")


async def test_a_restarted_gateway_takes_the_job_up_with_its_id_and_seed(start, script):
    queue = script.queue()
    old = await start(queue=queue)
    waiting = asyncio.create_task(post(old, "k"))
    request = (await queue.wait_for("admitted"))[0]
    waiting.cancel()
    new_queue = script.queue("another", other=queue)
    new_queue.answer = lambda taken: script.events(taken, new.ids("again"))
    new = await start(queue=new_queue)
    answer = await post(new, "k")
    assert answer.json()["choices"][0]["text"] == "again"
    assert new_queue.admitted == []
    (taken,) = new_queue.taken_up
    assert (taken.id, taken.sampling.seed) == (request.id, request.sampling.seed)


async def test_a_cancelled_job_runs_again_for_the_same_key(gateway, script):
    first = asyncio.create_task(post(gateway, "k"))
    request = (await gateway.queue.wait_for("admitted"))[0]
    first.cancel()
    await gateway.queue.wait_for("cancelled")
    gateway.queue.answer = lambda taken: script.events(taken, gateway.ids("again"))
    assert (await post(gateway, "k")).json()["choices"][0]["text"] == "again"
    assert [taken.id for taken in gateway.queue.taken_up] == [request.id]


async def test_the_queue_learns_which_of_a_jobs_sequences_were_charged_on_arrival(gateway, script):
    body = {**BODY, "n": 3}
    first = asyncio.create_task(post(gateway, "k", body))
    await gateway.queue.wait_for("admitted")
    first.cancel()
    await gateway.queue.wait_for("cancelled")
    gateway.queue.answer = lambda taken: script.events(taken, gateway.ids("again"))
    await post(gateway, "k", body)
    assert gateway.queue.places == [(0, 3), (1, 3), (2, 3)]


async def test_a_refused_admission_frees_the_key(gateway, script):
    from services.errors import QueueFull

    gateway.queue.refusal = QueueFull("full", retry_after_s=2)
    assert (await post(gateway, "k")).status_code == 429
    gateway.queue.refusal = None
    gateway.queue.answer = lambda request: script.events(request, gateway.ids("in"))
    assert (await post(gateway, "k")).json()["choices"][0]["text"] == "in"


@pytest.mark.parametrize("key", ["", "é", "x" * 256])
async def test_unusable_keys_are_refused(gateway, key):
    answer = await gateway.http.post(
        "/v1/completions", json=BODY, headers=[(b"idempotency-key", key.encode("latin-1"))]
    )
    assert answer.status_code == 400


async def test_keys_of_two_tenants_are_separate(gateway):
    from services.gateway.idempotency import KeyedJobs, Origin

    keyed, origins = KeyedJobs(gateway.table.holdings, keep_s=60), []

    async def start(origin: Origin) -> Any:
        origins.append(origin)
        raise ValueError("enough")

    for tenant in ("a", "b"):
        with pytest.raises(ValueError, match="enough"):
            await keyed.run(tenant, "k", "body", start)
    assert origins[0].base_id != origins[1].base_id
