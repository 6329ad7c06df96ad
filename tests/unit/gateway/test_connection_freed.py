"""A connection that has ended is freed at once, with what belongs to it, and waits for no collection of garbage."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import uvloop
from testkit.waiting import LIMIT_S, eventually

from services.errors import ErrorInfo
from services.gateway.connections import Bounds
from services.messages import TokenEvent

BOUNDS = Bounds(look_s=0.05, stall_s=0.3, min_rate=1 << 20, closing_s=0.3, write_buffer=1024)
COUNT = 3
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
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


def post(body: dict[str, Any], path: str = "/v1/completions", *, cut: int = 0) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    return head.encode() + b"\r\n\r\n" + data[: len(data) - cut]


@pytest.mark.parametrize(
    ("sent", "until", "leaves"),
    [
        (b"", None, "close"),
        (b"", None, "abort"),
        (HEALTH[:-2], None, "abort"),
        (HEALTH, b'"ok"', "close"),
        (HEALTH, b'"ok"', "abort"),
        (HEALTH * 3, b'"ok"', "abort"),
        (b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"404", "close"),
        (b"no request\r\n\r\n", b"400", "close"),
        (post({"prompt": []}), b'"error"', "close"),
        (post({"prompt": "hello"}, cut=3), None, "abort"),
        (post({"prompt": "hello"}), b"usage", "close"),
        (post(LEFT | {"stream": False}), None, "abort"),
        (post({"prompt": "hello", "max_tokens": FAILS}), b'"error"', "close"),
        (post(STREAM | {"max_tokens": FAILS}), b'"error"', "abort"),
        (post(STREAM), b"[DONE]", "close"),
        (post(LEFT), b"data:", "close"),
        (post(LEFT), b"data:", "abort"),
        (post(LEFT) + HEALTH * 2, b"data:", "abort"),
        (post({"messages": [{"role": "user", "content": "hello"}]}, "/v1/chat/completions"), b"usage", "close"),
        (post({"prompt": "hello"}, "/tokenize"), b"tokens", "close"),
    ],
    ids=[
        *("nothing", "nothing, aborted", "half a head", "probe", "probe, aborted", "three probes", "404", "malformed"),
        *("refused", "half a body", "whole", "whole, left", "failed", "stream, failed"),
        *("stream", "stream, left", "stream, aborted", "sent ahead", "chat", "tokenize"),
    ],
)
async def test_a_connection_is_freed_when_it_ends(start, script, sent, until, leaves):
    gateway = await _answering(start, script)
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    for number in range(1, COUNT + 1):
        reader, writer = await asyncio.open_connection(host, int(port))
        await _open(gateway)
        found = _parts(gateway)
        writer.write(sent)
        if until is not None:
            await asyncio.wait_for(reader.readuntil(until), 20)
        elif sent:
            await _when(lambda: any(one.tally.head_bytes or one.cycle for one in gateway.server._open()))
            if sent.endswith(b"}"):
                await gateway.queue.wait_for("admitted", number)
        found += _parts(gateway)
        (writer.close if leaves == "close" else writer.transport.abort)()
        await _freed(found)


async def test_a_reader_that_was_given_up_is_freed(start, script):
    gateway = await _answering(start, script)
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    client, loop = socket.socket(), asyncio.get_running_loop()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await loop.sock_connect(client, (host, int(port)))
    await loop.sock_sendall(client, post(STREAM | {"n": 64, "logprobs": 20}))
    await _open(gateway)
    await gateway.queue.wait_for("admitted", 64)
    await _freed(_parts(gateway))
    assert gateway.registry.get_sample_value("expertmesh_gateway_refused_total", {"reason": "stalled_late"}) == 1
    client.close()


async def test_a_probe_on_a_spare_place_is_freed(start, script):
    gateway = await _answering(start, script, replace(BOUNDS, connections=1))
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    _, served = await asyncio.open_connection(host, int(port))
    served.write(post(LEFT))
    await gateway.queue.wait_for("admitted")
    [kept] = gateway.server._open()
    reader, writer = await asyncio.open_connection(host, int(port))
    await _open(gateway, 2)
    found = _parts(gateway, but=kept)
    writer.write(HEALTH)
    await asyncio.wait_for(reader.readuntil(b'"ok"'), 20)
    writer.close()
    await _freed(found)
    served.transport.abort()


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
    await _when(lambda: len(list(gateway.server._open())) >= count)


async def _when(condition: Callable[[], object]) -> None:
    await eventually(condition)


async def _freed(parts: list[weakref.ref[Any]]) -> None:
    assert parts
    try:
        async with asyncio.timeout(LIMIT_S):
            while any(part() is not None for part in parts):
                await asyncio.sleep(0.005)
    except TimeoutError:
        pytest.fail(f"these stay: {[type(part()).__name__ for part in parts if part() is not None]}")
