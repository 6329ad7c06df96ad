"""A connection that has ended is freed at once, with what belongs to it, and waits for no collection of garbage."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import uvloop
from testkit.http_peer import HEALTH, post, small_window
from testkit.waiting import eventually

from services.errors import ErrorInfo
from services.gateway.connections import Bounds
from services.messages import TokenEvent

BOUNDS = Bounds(look_s=0.05, stall_s=0.3, min_rate=1 << 20, closing_s=0.3, write_buffer=1024)
COUNT = 3
ENDLESS, FAILS = 99, 98
STREAM = {"prompt": "hello", "max_tokens": 90, "stream": True}
LEFT = STREAM | {"max_tokens": ENDLESS}


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    policy: asyncio.AbstractEventLoopPolicy = request.param()
    return policy


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


ENDS = {
    "nothing": (b"", None, "close"),
    "nothing, aborted": (b"", None, "abort"),
    "half a head": (HEALTH[:-2], None, "abort"),
    "probe": (HEALTH, b'"ok"', "close"),
    "probe, aborted": (HEALTH, b'"ok"', "abort"),
    "three probes": (HEALTH * 3, b'"ok"', "abort"),
    "404": (b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"404", "close"),
    "malformed": (b"no request\r\n\r\n", b"400", "close"),
    "refused": (post({"prompt": []}), b'"error"', "close"),
    "half a body": (post({"prompt": "hello"})[:-3], None, "abort"),
    "whole": (post({"prompt": "hello"}), b"usage", "close"),
    "whole, left": (post(LEFT | {"stream": False}), None, "abort"),
    "failed": (post({"prompt": "hello", "max_tokens": FAILS}), b'"error"', "close"),
    "stream, failed": (post(STREAM | {"max_tokens": FAILS}), b'"error"', "abort"),
    "stream": (post(STREAM), b"[DONE]", "close"),
    "stream, left": (post(LEFT), b"data:", "close"),
    "stream, aborted": (post(LEFT), b"data:", "abort"),
    "sent ahead": (post(LEFT) + HEALTH * 2, b"data:", "abort"),
    "chat": (
        post({"messages": [{"role": "user", "content": "hi"}]}, path="/v1/chat/completions"),
        b"usage",
        "close",
    ),
    "tokenize": (post({"prompt": "hello"}, path="/tokenize"), b"tokens", "close"),
}


@pytest.mark.parametrize(("sent", "until", "leaves"), ENDS.values(), ids=ENDS)
async def test_a_connection_is_freed_when_it_ends(start, script, sent, until, leaves):
    gateway = await _answering(start, script)
    for number in range(1, COUNT + 1):
        peer = await gateway.connect()
        await _open(gateway)
        found = _parts(gateway)
        await peer.send(sent)
        if until is not None:
            await peer.until(until)
        elif sent:
            await eventually(lambda: any(one.tally.head_bytes or one.cycle for one in gateway.server._open()))
            if sent.endswith(b"}"):
                await gateway.queue.wait_for("admitted", number)
        found += _parts(gateway)
        (peer.writer.close if leaves == "close" else peer.writer.transport.abort)()
        await _freed(found)


async def test_a_reader_that_was_given_up_is_freed(start, script):
    gateway = await _answering(start, script)
    client = await small_window(gateway.url)
    await asyncio.get_running_loop().sock_sendall(client, post(STREAM | {"n": 64, "logprobs": 20}))
    await _open(gateway)
    await gateway.queue.wait_for("admitted", 64)
    await _freed(_parts(gateway))
    assert gateway.refused("stalled_late") == 1
    client.close()


async def test_a_probe_on_a_spare_place_is_freed(start, script):
    gateway = await _answering(start, script, replace(BOUNDS, connections=1))
    await gateway.connect(post(LEFT))
    await gateway.queue.wait_for("admitted")
    [kept] = gateway.server._open()
    peer = await gateway.connect()
    await _open(gateway, 2)
    found = _parts(gateway, but=kept)
    await peer.send(HEALTH)
    await peer.until(b'"ok"')
    peer.writer.close()
    await _freed(found)


async def _answering(start: Any, script: Any, bounds: Bounds = BOUNDS) -> Any:
    """A gateway whose jobs end, but those with :data:`ENDLESS` tokens; with :data:`FAILS` they fail."""
    gateway = await start(bounds=bounds, max_len=300_000)

    def answer(request: Any) -> Any:
        if request.sampling.max_tokens == ENDLESS:
            return script.events(request, [5], finish=None)
        if request.sampling.max_tokens == FAILS:
            error = ErrorInfo(code="unavailable", message="no worker")
            return [TokenEvent(request_id=request.id, attempt=request.attempt, index=0, finish="error", error=error)]
        return script.events(request, [5] * 90)

    gateway.queue.answer = answer
    return gateway


def _parts(gateway: Any, but: Any = None) -> list[weakref.ref[Any]]:
    """Of all connections that are open, but one."""
    parts = [(one, one.cycle, one.transport) for one in gateway.server._open() if one is not but]
    return [weakref.ref(part) for several in parts for part in several if part is not None]


async def _open(gateway: Any, count: int = 1) -> None:
    await eventually(lambda: len(list(gateway.server._open())) >= count)


async def _freed(parts: list[weakref.ref[Any]]) -> None:
    assert parts
    await eventually(lambda: all(part() is None for part in parts))
