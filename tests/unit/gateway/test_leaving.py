"""What a load balancer sees of a gateway: when requests may come, and how it leaves without losing one."""

from __future__ import annotations

import asyncio
import os
import time
from types import SimpleNamespace

import pytest
from testkit.http_peer import HEALTH, post
from testkit.waiting import LIMIT_S, eventually

from services.messages import TokenEvent

IDLE_S = 0.3
"""Longer than a connection has to be idle before it is closed."""
ASK = {"model": "tiny", "prompt": "hello", "max_tokens": 2}


async def test_requests_may_come_without_a_worker_but_not_before_redis_answered_once(gateway) -> None:
    gateway.follower.workers = []
    assert (await gateway.http.get("/ready")).status_code == 503
    for up, status in ((False, 503), (True, 200), (False, 200)):  # at last it still answers clients with errors
        gateway.follower.up = up
        answer = await gateway.http.get("/accepting")
        assert answer.status_code == status
        assert "Redis" in answer.text if status == 503 else answer.json() == {"status": "accepting"}


async def test_while_it_leaves_requests_are_served_and_their_connections_closed(gateway) -> None:
    gateway.says([5, 6])
    kept = await gateway.http.post("/v1/completions", json=ASK)
    assert (kept.status_code, kept.headers.get("connection")) == (200, None)
    drain = asyncio.create_task(gateway.drain(delay_s=60).run())
    await asyncio.sleep(0)
    served = await gateway.http.post("/v1/completions", json=ASK)
    assert (served.status_code, served.headers["connection"]) == (200, "close")
    assert (await gateway.http.get("/accepting")).status_code == 503
    assert (await gateway.http.get("/ready")).status_code == 503
    drain.cancel()


async def test_a_kept_connection_is_closed_before_requests_are_refused_and_a_busy_one_after_its_answer(
    gateway, script
) -> None:
    """Whoever keeps one open finds it closed, and asks another gateway; nobody meets the refusal on it."""
    idle = await gateway.connect(HEALTH)
    assert (await idle.said())[0] == 200
    busy, request = await gateway.ask()
    drain = asyncio.create_task(gateway.drain(delay_s=0.01, timeout_s=30).run())
    assert await idle.all() == b""
    await eventually(lambda: gateway.intake.draining)
    refused = await gateway.post()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert refused.headers["connection"] == "close"
    assert (await gateway.http.get("/ready")).status_code == 503
    gateway.queue.emit(*script.events(request, [5, 6]))
    answer = await busy
    assert (answer.status_code, answer.headers["connection"]) == (200, "close")
    async with asyncio.timeout(LIMIT_S):
        await drain
    assert gateway.queue.cancelled == {}


async def test_a_client_that_does_not_know_that_it_leaves_is_served_on_the_same_connection(gateway, script) -> None:
    """A stream that began before says nothing of its connection, so that a client may send its next request there."""
    gateway.queue.answer = lambda request: script.events(request, [5, 6]) if gateway.intake.leaving else []
    peer, request, head = await _streaming(gateway, script)
    assert b"connection: close" not in head.lower()
    delay_s = 0.2  # may pass before the client asks again: with less, a pause of this process were idle time
    drain = asyncio.create_task(gateway.drain(delay_s=delay_s, timeout_s=30).run())
    await asyncio.sleep(3 * delay_s)
    assert not gateway.intake.draining
    gateway.queue.emit(*script.events(request, [5, 6])[1:])
    await peer.until(b"0\r\n\r\n")
    await peer.send(post(ASK))
    answer = await peer.all()
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in answer.lower()
    await drain
    assert gateway.intake.draining


async def test_nobody_waits_for_a_connection_that_sends_what_is_no_request(gateway) -> None:
    """The body of a request that was answered before it was read stops the timer by which idle time is known."""
    head, end, body = post(ASK, path="/v1/nowhere").partition(b"\r\n\r\n")
    peer = await gateway.connect(head + end)
    assert b"404" in await peer.until(end)
    await peer.send(body)
    await asyncio.sleep(IDLE_S)
    assert gateway.server.close_idle(IDLE_S / 2) == 0
    async with asyncio.timeout(LIMIT_S):
        await gateway.drain(delay_s=0.01, timeout_s=60).run()
    assert gateway.intake.draining


async def test_requests_are_refused_after_half_of_the_time_whatever_is_kept_open(gateway, script) -> None:
    """What comes then could not be finished: the other half is for the open ones."""
    peer, request, _ = await _streaming(gateway, script)
    drain = asyncio.create_task(gateway.drain(delay_s=0.01, timeout_s=2).run())
    async with asyncio.timeout(LIMIT_S):
        await eventually(lambda: gateway.intake.draining)
        assert not drain.done()
        gateway.queue.emit(*script.events(request, [5, 6])[1:])
        await peer.until(b"0\r\n\r\n")
        await drain


async def test_a_connection_whose_client_stays_silent_is_closed_after_its_answer(gateway, script) -> None:
    peer, request, _ = await _streaming(gateway, script)
    drain = asyncio.create_task(gateway.drain(delay_s=0.01, timeout_s=30).run())
    await asyncio.sleep(IDLE_S)
    gateway.queue.emit(*script.events(request, [5, 6])[1:])
    async with asyncio.timeout(LIMIT_S):
        assert (await peer.all()).endswith(b"0\r\n\r\n")
        await drain


async def _streaming(gateway, script):  # type: ignore[no-untyped-def]
    """A connection with a stream that has had the first of its two tokens, the request, and the answer's head."""
    peer = await gateway.connect(post(ASK | {"stream": True}))
    [request] = await gateway.queue.wait_for("admitted")
    gateway.queue.emit(*script.events(request, [5, 6])[:1])
    return peer, request, await peer.until(b"\r\n\r\n")


@pytest.mark.parametrize(("every_s", "ends_s"), [(0.4, 3.0), (None, 1.0)])
async def test_it_goes_on_while_requests_come_but_not_for_ever(gateway, monkeypatch, every_s, ends_s) -> None:
    gateway.says([5, 6])
    began = time.monotonic()
    await gateway.http.post("/v1/completions", json=ASK)
    assert gateway.intake.asked_at > began
    now, gateway.intake.asked_at = 0.0, -1.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        gateway.intake.asked_at = -1.0 if every_s is None else now // every_s * every_s

    drain = gateway.drain(delay_s=1.0)
    monkeypatch.setattr("services.gateway.server.time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr("services.gateway.server.asyncio", SimpleNamespace(sleep=sleep))
    await drain._until_quiet()
    assert now == pytest.approx(ends_s)


async def test_a_connection_whose_request_was_not_read_yet_is_not_closed(gateway) -> None:
    """Neither one that rested, nor a new one."""
    late, new = await gateway.connect(HEALTH), await gateway.connect()
    assert (await late.said())[0] == 200
    await asyncio.sleep(IDLE_S)  # by now both connections are taken
    os.write(late.writer.get_extra_info("socket").fileno(), HEALTH)
    gateway.server.close_idle(IDLE_S / 2)
    await new.send(HEALTH)
    for peer in (late, new):
        assert (await peer.said())[0] == 200


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
