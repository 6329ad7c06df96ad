"""What a load balancer sees of a gateway: when requests may come, and how it leaves without losing one."""

from __future__ import annotations

import asyncio
import json
import os
import time

import pytest

from services.gateway.server import Drain
from services.messages import TokenEvent

IDLE_S = 0.3
"""Longer than a connection has to be idle before it is closed."""
ASK = {"model": "tiny", "prompt": "hello", "max_tokens": 2}


def _drain(gateway, delay_s: float, timeout_s: float = 0.2) -> Drain:
    close_idle = gateway.server.close_idle
    return Drain(gateway.intake, gateway.table, gateway.follower, timeout_s, delay_s, close_idle=close_idle)


async def test_requests_may_come_while_no_worker_runs(gateway) -> None:
    gateway.follower.workers = []
    assert (await gateway.http.get("/ready")).status_code == 503
    assert (await gateway.http.get("/accepting")).json() == {"status": "accepting"}


async def test_none_may_come_before_redis_answered_and_then_for_ever(gateway) -> None:
    gateway.follower.up = False
    refused = await gateway.http.get("/accepting")
    assert (refused.status_code, "Redis" in refused.text) == (503, True)
    gateway.follower.up = True
    assert (await gateway.http.get("/accepting")).status_code == 200
    gateway.follower.up = False  # this gateway still answers clients with errors
    assert (await gateway.http.get("/accepting")).status_code == 200


async def test_while_it_leaves_requests_are_served_and_their_connections_closed(gateway, script) -> None:
    gateway.queue.answer = lambda request: script.events(request, [5, 6])
    kept = await gateway.http.post("/v1/completions", json=ASK)
    assert (kept.status_code, kept.headers.get("connection")) == (200, None)
    drain = asyncio.create_task(_drain(gateway, delay_s=60).run())
    await asyncio.sleep(0)
    served = await gateway.http.post("/v1/completions", json=ASK)
    assert (served.status_code, served.headers["connection"]) == (200, "close")
    assert (await gateway.http.get("/accepting")).status_code == 503
    assert (await gateway.http.get("/ready")).status_code == 503
    drain.cancel()


async def test_after_that_requests_are_refused(gateway) -> None:
    held: list[TokenEvent] = []
    gateway.queue.answer = lambda _: held
    await _drain(gateway, delay_s=0.01).run()
    refused = await gateway.http.post("/v1/completions", json=ASK)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert refused.headers["connection"] == "close"


async def test_a_kept_connection_is_closed_before_requests_are_refused_and_a_busy_one_after_its_answer(
    gateway, script
) -> None:
    """Whoever keeps one open finds it closed, and asks another gateway; nobody meets the refusal on it."""
    address = gateway.url.removeprefix("http://").split(":")
    idle, to_idle = await asyncio.open_connection(*address)
    to_idle.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await idle.readuntil(b"}")).startswith(b"HTTP/1.1 200")
    busy = asyncio.create_task(gateway.http.post("/v1/completions", json=ASK))
    [request] = await gateway.queue.wait_for("admitted")
    drain = asyncio.create_task(_drain(gateway, delay_s=0.01, timeout_s=30).run())
    async with asyncio.timeout(10):
        assert await idle.read() == b""
    while not gateway.intake.draining:
        await asyncio.sleep(0.001)
    refused = await gateway.http.post("/v1/completions", json=ASK)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    gateway.queue.emit(*script.events(request, [5, 6]))
    answer = await busy
    assert (answer.status_code, answer.headers["connection"]) == (200, "close")
    await drain
    to_idle.close()


async def test_a_client_that_does_not_know_that_it_leaves_is_served_on_the_same_connection(gateway, script) -> None:
    """A stream that began before says nothing of its connection, so that a client may send its next request there."""
    gateway.queue.answer = lambda request: script.events(request, [5, 6]) if gateway.intake.leaving else []
    reader, writer, request, head = await _streaming(gateway, script)
    assert b"connection: close" not in head.lower()
    delay_s = 0.2  # may pass before the client asks again: with less, a pause of this process were idle time
    drain = asyncio.create_task(_drain(gateway, delay_s=delay_s, timeout_s=30).run())
    await asyncio.sleep(3 * delay_s)
    assert not gateway.intake.draining
    gateway.queue.emit(*script.events(request, [5, 6])[1:])
    async with asyncio.timeout(10):
        await reader.readuntil(b"0\r\n\r\n")
        writer.write(_post(ASK))
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in answer.lower()
    await drain
    assert gateway.intake.draining
    writer.close()


async def test_nobody_waits_for_a_connection_that_sends_what_is_no_request(gateway) -> None:
    """The body of a request that was answered before it was read stops the timer by which idle time is known."""
    reader, writer = await asyncio.open_connection(*gateway.url.removeprefix("http://").split(":"))
    head, _, body = _post(ASK).replace(b"/v1/completions", b"/v1/nowhere").partition(b"\r\n\r\n")
    writer.write(head + b"\r\n\r\n")
    assert b"404" in await reader.readuntil(b"\r\n\r\n")
    writer.write(body)
    await asyncio.sleep(IDLE_S)
    assert gateway.server.close_idle(IDLE_S / 2) == 0
    async with asyncio.timeout(5):
        await _drain(gateway, delay_s=0.01, timeout_s=60).run()
    assert gateway.intake.draining
    writer.close()


async def test_requests_are_refused_after_half_of_the_time_whatever_is_kept_open(gateway, script) -> None:
    """What comes then could not be finished: the other half is for the open ones."""
    reader, writer, request, _ = await _streaming(gateway, script)
    drain = asyncio.create_task(_drain(gateway, delay_s=0.01, timeout_s=2).run())
    async with asyncio.timeout(10):
        while not gateway.intake.draining:
            await asyncio.sleep(0.01)
        assert not drain.done()
        gateway.queue.emit(*script.events(request, [5, 6])[1:])
        await reader.readuntil(b"0\r\n\r\n")
        await drain
    writer.close()


async def test_a_connection_whose_client_stays_silent_is_closed_after_its_answer(gateway, script) -> None:
    reader, writer, request, _ = await _streaming(gateway, script)
    drain = asyncio.create_task(_drain(gateway, delay_s=0.01, timeout_s=30).run())
    await asyncio.sleep(IDLE_S)
    gateway.queue.emit(*script.events(request, [5, 6])[1:])
    async with asyncio.timeout(10):
        assert (await reader.read()).endswith(b"0\r\n\r\n")
        await drain
    writer.close()


async def _streaming(gateway, script):  # type: ignore[no-untyped-def]
    """A connection with a stream that has had the first of its two tokens: its ends, the request, the answer's head."""
    reader, writer = await asyncio.open_connection(*gateway.url.removeprefix("http://").split(":"))
    writer.write(_post(ASK | {"stream": True}))
    [request] = await gateway.queue.wait_for("admitted")
    gateway.queue.emit(*script.events(request, [5, 6])[:1])
    return reader, writer, request, await reader.readuntil(b"\r\n\r\n")


def _post(body: dict[str, object]) -> bytes:
    text = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(text)}"
    return head.encode() + b"\r\n\r\n" + text


@pytest.mark.parametrize(("keeps_asking", "delays"), [(True, 3.0), (False, 1.0)])
async def test_it_goes_on_while_requests_come_but_not_for_ever(gateway, script, keeps_asking, delays) -> None:
    gateway.queue.answer = lambda request: script.events(request, [5, 6])
    began, delay_s = time.monotonic(), 1.0  # a machine that does other work asks seldom
    drain = asyncio.create_task(_drain(gateway, delay_s=delay_s).run())
    await asyncio.sleep(0)
    answers = []
    while keeps_asking and not gateway.intake.draining:
        answers.append(await gateway.http.post("/v1/completions", json=ASK))
    await drain
    if keeps_asking:
        *served, last = answers  # the last one may have come as the others began to be refused
        assert served
        assert {answer.status_code for answer in served} == {200}
        assert last.status_code == 200 or (last.status_code, last.json()["error"]["code"]) == (503, "draining")
    assert time.monotonic() - began >= delays * delay_s
    assert keeps_asking or time.monotonic() - began < 3 * delay_s


async def test_a_connection_with_a_request_that_was_not_read_yet_is_not_closed(gateway) -> None:
    address = gateway.url.removeprefix("http://").split(":")
    late, to_late = await asyncio.open_connection(*address)
    to_late.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await late.readuntil(b"}")).startswith(b"HTTP/1.1 200")
    await asyncio.sleep(IDLE_S)
    os.write(to_late.get_extra_info("socket").fileno(), b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    gateway.server.close_idle(IDLE_S / 2)
    async with asyncio.timeout(10):
        assert (await late.readuntil(b"}")).startswith(b"HTTP/1.1 200")
    to_late.close()


async def test_a_connection_whose_first_request_is_on_its_way_is_not_closed(gateway) -> None:
    late, to_late = await asyncio.open_connection(*gateway.url.removeprefix("http://").split(":"))
    await gateway.http.get("/health")  # by now the connection is taken
    gateway.server.close_idle(IDLE_S / 2)
    to_late.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    async with asyncio.timeout(10):
        assert (await late.readuntil(b"}")).startswith(b"HTTP/1.1 200")
    to_late.close()


async def test_it_ends_although_a_command_swallowed_the_cancellation(gateway, monkeypatch) -> None:
    swallowed = []

    async def follow(last_id: str, _block_ms: int) -> tuple[str, list[TokenEvent]]:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if swallowed:
                raise
            swallowed.append(last_id)  # as asyncio.wait_for does whose result comes with it
        return last_id, []

    monkeypatch.setattr(gateway.queue, "follow", follow)
    gateway.queue.emit()
    following = gateway.tasks[0]
    await asyncio.sleep(0.05)
    for _ in range(3):  # as end_tasks asks, but that would wait for ever
        following.cancel()
        await asyncio.wait({following}, timeout=5)
    assert swallowed
    assert following.cancelled()
