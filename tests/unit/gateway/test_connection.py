"""What a peer may send, hold and leave on one connection, with both event loops that there are."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
import uvloop
from testkit.http_peer import HEALTH, URL, head, post, small_window
from testkit.waiting import LIMIT_S, eventually

from services.gateway.connections import Bounds, Wait

GOOD = json.dumps({"prompt": "hello", "max_tokens": 90}).encode()
CHUNKED = head("Transfer-Encoding: chunked")
SHORT = Bounds(
    head_s=0.4,
    body_s=0.4,
    min_rate=1 << 20,
    stall_s=0.6,
    keep_alive_s=0.5,
    closing_s=0.5,
    look_s=0.05,
    body_bytes=4096,
)
"""As in production, but sooner."""
SLOW_CLOSE = Bounds(look_s=0.05, closing_s=600)


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    """The former is what Windows has, the latter what runs."""
    policy: asyncio.AbstractEventLoopPolicy = request.param()
    return policy


def held(gateway: Any) -> int:
    """Bytes that the process keeps for its connections."""
    total = 0
    for connection in gateway.server._open():
        cycle = connection.cycle
        total += connection.tally.head_bytes + (len(cycle.body) if cycle is not None else 0)
        total += len(connection.url or b"") if hasattr(connection, "url") else 0
        total += sum(len(name) + len(value) for name, value in connection.headers or ())
    return total


MANY = 6 << 20


def _times(piece: bytes) -> bytes:
    return piece * (MANY // len(piece))


PASS_A_BOUND = {
    "fields": (head(method="GET", path="/health")[:-2] + _times(b"a:b\r\n"), 431, "head_fields"),
    "url": (b"GET /" + _times(b"u"), 431, "head_bytes"),
    "value": (b"GET / HTTP/1.1\r\nx: " + _times(b"v"), 431, "head_bytes"),
    "name": (b"GET / HTTP/1.1\r\n" + _times(b"n"), 431, "head_bytes"),
    "empty lines": (_times(b"\r\n"), 431, "head_bytes"),
    "trailers": (CHUNKED + b"2\r\n{}\r\n0\r\n" + _times(b"a:b\r\n"), 431, "head_fields"),
    "trailer": (CHUNKED + b"2\r\n{}\r\n0\r\nx: " + _times(b"v"), 400, "framing"),
    "extension": (CHUNKED + b"2;" + _times(b"e"), 400, "framing"),
    "chunks of 1": (CHUNKED + _times(b"1\r\nx\r\n"), 400, "framing"),
    "chunks of 5": (CHUNKED + _times(b"5\r\nxxxxx\r\n"), 400, "framing"),
    "size": (CHUNKED + _times(b"0"), 400, "framing"),
    "http2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _times(b"\0"), 400, "malformed"),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00" + _times(b"\0"), 400, "malformed"),
    "connect": (b"CONNECT a:1 HTTP/1.1\r\n\r\n", 400, "malformed"),
    "length": (b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n", 400, "malformed"),
}


@pytest.mark.parametrize(("sent", "status", "reason"), PASS_A_BOUND.values(), ids=PASS_A_BOUND)
async def test_what_passes_a_bound_is_answered_once_and_kept_nowhere(start, sent, status, reason):
    gateway = await start(bounds=SLOW_CLOSE)
    peer = await gateway.connect()
    sending = asyncio.create_task(peer.send(sent))
    answer = await peer.answer()
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert b"connection: close" in answer.lower()
    assert held(gateway) < 256 * 1024
    assert gateway.refused(reason) == 1
    assert await asyncio.wait_for(sending, 20), "what comes is thrown away, not left in the socket"
    peer.writer.close()
    await eventually(lambda: not list(gateway.server._open()))
    assert (await gateway.http.get("/health")).status_code == 200


FRAMINGS = [
    "Content-Length: 15\r\nContent-Length: 15",
    "Content-Length: 15\r\nContent-Length: 16",
    "Content-Length: 15, 15",
    "Content-Length: +15",
    "Content-Length: 0xf",
    "Content-Length: -1",
    "Content-Length: 99999999999999999999999",
    "Content-Length : 15",
    "Content-Length: 15\nx: y",
    "x: y\rContent-Length: 15",
    "x: \0\r\nContent-Length: 15",
    "x: y\r\n Content-Length: 5\r\nContent-Length: 15",
    "Transfer-Encoding: chunked\r\nContent-Length: 15",
    "Content-Length: 15\r\nTransfer-Encoding: chunked",
    "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
    "Transfer-Encoding: chunked, identity",
    "Transfer-Encoding: xchunked",
    "Transfer-Encoding: identity\r\nContent-Length: 15",
]


async def test_a_body_that_two_servers_could_read_differently_is_read_by_none(start):
    """Else what a proxy takes for a body would be another client's request here."""
    gateway = await start()
    for framing in FRAMINGS:
        for body in (b'{"prompt":"ab"}', b'f\r\n{"prompt":"ab"}\r\n0\r\n\r\n'):
            peer = await gateway.connect(head(framing), body, HEALTH)
            answer = await peer.answer()
            assert answer.startswith(b"HTTP/1.1 400 "), (framing, answer)
            assert b"connection: close" in answer.lower(), framing
            peer.writer.write_eof()
            assert await peer.all() == b"", framing
    assert gateway.queue.admitted == []


async def test_what_follows_a_body_is_no_part_of_the_head(start):
    gateway = await start(bounds=SLOW_CLOSE)
    await gateway.connect(CHUNKED, b"%x\r\n%b\r\n0\r\nx-trailer: 1\r\n\r\n" % (len(GOOD), GOOD))
    await gateway.queue.wait_for("admitted")
    [connection] = gateway.server._open()
    assert connection.tally.head_fields == 4
    assert [name for name, _ in connection.headers] == [b"host", b"content-type", b"transfer-encoding"]


async def test_heads_up_to_the_bounds_are_served(start):
    gateway = await start(bounds=SLOW_CLOSE)
    for fields in ([f"x-{i}: y" for i in range(120)], [f"x: {'v' * 60_000}"]):
        for pieces in (1, 7):
            peer = await gateway.connect()
            raw = head(*fields, path="/health", method="GET")
            step = len(raw) // pieces + 1
            for at in range(0, len(raw), step):
                await peer.send(raw[at : at + step])
                await asyncio.sleep(0)
            assert (await peer.answer()).startswith(b"HTTP/1.1 200 ")


async def test_all_large_heads_together_are_bounded(start):
    gateway = await start(bounds=Bounds(large_head=1024, large_heads=100_000, look_s=0.05))
    half = b"GET /health HTTP/1.1\r\nHost: localhost\r\nx: " + b"v" * 40_000
    peers = [await gateway.connect() for _ in range(4)]
    for peer in peers[:2]:
        await peer.send(half)
    await eventually(lambda: gateway.connections._large_sum > 60_000)
    await peers[2].send(half)
    assert (await peers[2].answer()).startswith(b"HTTP/1.1 431 ")
    await peers[3].send(HEALTH)
    assert (await peers[3].answer()).startswith(b"HTTP/1.1 200 ")
    await peers[0].send(b"\r\n\r\n")
    assert (await peers[0].answer()).startswith(b"HTTP/1.1 200 ")
    await eventually(lambda: gateway.connections._large_sum < 50_000)


async def test_a_connection_that_rests_keeps_nothing_of_what_was_sent(start):
    gateway = await start(bounds=SLOW_CLOSE)
    large = f"x: {'v' * 50_000}"
    peer = await gateway.connect(head(large, path="/health", method="GET"))
    await peer.answer()
    await peer.send(post(b"b" * 200_000, large, path="/nothing"))
    assert (await peer.answer()).startswith(b"HTTP/1.1 404 ")
    [connection] = gateway.server._open()
    await eventually(lambda: connection.waited_s >= 0)
    assert (connection.url, connection.headers, bytes(connection.cycle.body)) == (b"", [], b"")
    assert not connection.scope
    assert gateway.connections._large_sum == 0
    await peer.send(HEALTH)
    assert (await peer.answer()).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"", "head_late"),
        (b"GET /hea", "head_late"),
        (HEALTH[:-2], "head_late"),
        (head("Content-Length: 1000") + b"{", "body_late"),
        (CHUNKED + b"5\r\n", "body_late"),
    ],
    ids=["nothing", "a line", "a head", "a body", "a chunk"],
)
async def test_a_head_or_body_that_does_not_come_ends_its_connection(start, sent, reason):
    gateway = await start(bounds=SHORT)
    answer = await (await gateway.connect(sent)).all()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
    assert gateway.refused(reason) == 1


async def test_a_head_that_trickles_ends_its_connection(start):
    """Each byte in time, but not the whole of it."""
    gateway = await start(bounds=SHORT)
    peer = await gateway.connect(b"GET /")

    async def trickle() -> None:
        while await peer.send(b"x"):
            await asyncio.sleep(0.02)

    trickling = asyncio.create_task(trickle())
    assert (await peer.all()).startswith(b"HTTP/1.1 408 ")
    trickling.cancel()


@pytest.mark.parametrize(
    ("sent", "word"), [(HEALTH[:9], b"HTTP/1.1 408 "), (b"\r\n", b"")], ids=["a head", "no request"]
)
async def test_a_kept_connection_has_as_long_from_the_first_byte_of_a_head_and_ends_without_a_word(start, sent, word):
    gateway = await start(bounds=SHORT)
    peer = await gateway.connect(HEALTH)
    await peer.answer()
    await asyncio.sleep(0.2)
    await peer.send(sent)
    answer = await peer.all()
    assert answer.startswith(word) if word else answer == b""
    assert gateway.refused("head_late") == bool(word)


async def test_a_large_body_has_longer_by_its_size(start):
    """0.1 s and 2 s of its bytes at the least rate."""
    gateway = await start(bounds=Bounds(body_s=0.1, min_rate=100_000, look_s=0.05), max_len=300_000)
    gateway.says([5])
    peer = await gateway.connect()
    body = json.dumps({"prompt": "a" * 200_000, "max_tokens": 1}).encode()
    await peer.send(head(f"Content-Length: {len(body)}"), body[:100])
    await asyncio.sleep(0.8)
    await peer.send(body[100:])
    assert (await peer.answer()).startswith(b"HTTP/1.1 200 ")


async def test_what_was_answered_before_its_body_came_is_thrown_away_within_bounds(start):
    gateway = await start(bounds=Bounds(body_s=0.4, min_rate=1 << 20, rest_bytes=1 << 20, look_s=0.05))
    for path in ("/nothing", URL):
        finished, endless, silent = [await gateway.connect() for _ in range(3)]
        size = 500_000 if path == "/nothing" else 2 << 20
        await finished.send(head(f"Content-Length: {min(size, 900_000)}", path="/nothing"), b"x" * min(size, 900_000))
        assert (await finished.answer()).startswith(b"HTTP/1.1 404 ")
        await finished.send(HEALTH)
        assert (await finished.answer()).startswith(b"HTTP/1.1 200 "), "the connection is kept"
        before = gateway.refused("rest_bytes"), gateway.refused("rest_late")
        await endless.send(head("Content-Length: 100000000", path=path), *[b"x" * 65536] * 64)
        await endless.all()
        assert gateway.refused("rest_bytes") == before[0] + 1
        await silent.send(head("Content-Length: 100000000", path=path))
        await silent.all()
        assert gateway.refused("rest_late") == before[1] + 1


async def test_a_refusal_reaches_a_client_that_sends_first_and_reads_then_even_if_it_wants_no_other(start):
    gateway = await start(bounds=SLOW_CLOSE, max_body_bytes=4096)
    peer = await gateway.connect(head("Connection: close", "Content-Length: 3000000"), *[b"x" * 100_000] * 29)
    answer = await peer.answer()
    assert answer.startswith(b"HTTP/1.1 413 ")
    await asyncio.sleep(0.02)
    assert not peer.reader.at_eof(), "it is not closed before all has come"
    await peer.send(b"x" * 100_000)
    assert await peer.all() == b""
    assert gateway.refused("ahead") == 0


async def test_requests_sent_ahead_are_answered_in_order_and_few_may_be(start):
    gateway = await start(bounds=SLOW_CLOSE)
    few = await gateway.connect(HEALTH * 3)
    for _ in range(3):
        assert (await few.answer()).startswith(b"HTTP/1.1 200 ")
    answers = await (await gateway.connect(HEALTH * 10_000)).all()
    assert 1 <= answers.count(b"HTTP/1.1 200 ") <= 6
    assert gateway.refused("ahead") == 1


async def test_what_is_sent_ahead_of_an_answer_is_bounded_and_costs_the_answer_nothing(start, script):
    gateway = await start(bounds=SLOW_CLOSE)
    peer = await gateway.connect(post(GOOD))
    [request] = await gateway.queue.wait_for("admitted")
    await peer.send(*[b"\r\n" * 10_000] * 50)
    await eventually(lambda: gateway.refused("ahead") == 1)
    gateway.queue.emit(*script.events(request, [5]))
    answer = await peer.answer()
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in answer.lower()
    assert gateway.queue.cancelled == {}


async def test_bodies_sent_ahead_back_to_back_are_counted(start):
    """Each piece that is read may hold the end of one and the head of the next."""
    gateway = await start(bounds=SLOW_CLOSE)
    peer = await gateway.connect(post(GOOD))
    await gateway.queue.wait_for("admitted")
    await peer.send(post(b"x" * 61_000) * 4 + b"POST")
    await eventually(lambda: gateway.refused("ahead") == 1 or sum(ahead_of(gateway)) == 4 * 61_000)
    assert gateway.refused("ahead") == 1
    other = await gateway.connect(post(b"x" * 200_000), HEALTH * 2)
    for status in (b"400", b"200", b"200"):
        assert (await other.answer()).startswith(b"HTTP/1.1 " + status), "the body before it is not sent ahead"


def ahead_of(gateway: Any) -> list[int]:
    return [len(cycle.body) for connection in gateway.server._open() for cycle, _ in connection.pipeline]


async def test_all_heads_of_a_connection_count_until_it_rests(start, script):
    gateway = await start(bounds=SLOW_CLOSE)
    large = "X: " + "v" * 50_000
    peer = await gateway.connect(post(GOOD, large))
    [request] = await gateway.queue.wait_for("admitted")
    await peer.send(head(large, path="/health", method="GET"))
    await eventually(lambda: gateway.connections._large_sum > 90_000)
    gateway.queue.emit(*script.events(request, [5]))
    for _ in range(2):
        assert (await peer.answer()).startswith(b"HTTP/1.1 200 ")
    await eventually(lambda: gateway.connections._large_sum == 0)


async def test_a_client_that_leaves_after_a_request_sent_ahead_ends_the_one_before(start):
    gateway = await start(bounds=SLOW_CLOSE)
    peer = await gateway.connect(post(GOOD))
    await gateway.queue.wait_for("admitted")
    await peer.send(HEALTH)
    await eventually(lambda: any(connection.pipeline for connection in gateway.server._open()))
    peer.writer.transport.abort()
    await gateway.queue.wait_for("cancelled")


async def test_a_beginning_of_another_request_does_not_end_a_stream(start, script):
    gateway = await start(bounds=SHORT)
    peer = await gateway.connect(post({"prompt": "hello", "max_tokens": 90, "stream": True}))
    [request] = await gateway.queue.wait_for("admitted")
    await peer.send(HEALTH[:9])
    await eventually(lambda: gateway.refused("head_late"))
    gateway.queue.emit(*script.events(request, [5, 6]))
    assert b"[DONE]" in await peer.all()


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
async def test_another_protocol_is_not_spoken_and_the_request_answered(start, protocol):
    gateway = await start(bounds=SLOW_CLOSE)
    fields = ("Connection: Upgrade", f"Upgrade: {protocol}", "Sec-WebSocket-Key: x")
    peer = await gateway.connect(head(*fields, path="/health", method="GET"), *[b"\x81\x05hello" * 10_000] * 10)
    answer = await peer.all()
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in answer.lower()
    assert answer.count(b"HTTP/1.1") == 1
    assert (gateway.refused("upgrade"), gateway.refused("malformed")) == (1, 0)


async def test_a_reader_that_stops_is_given_up_and_its_job_with_it(start, script):
    gateway = await start(bounds=SHORT)
    client = await small_window(gateway.url)
    body = {"prompt": "hello", "max_tokens": 90, "n": 4, "stream": True, "logprobs": 20}
    await asyncio.get_running_loop().sock_sendall(client, post(body))
    requests = await gateway.queue.wait_for("admitted", 4)
    index = 0
    while not gateway.connections._waits[Wait.STALL] and index < 90:
        for request in requests:
            gateway.queue.emit(*script.events(request, [5], start=index, finish=None))
        index += 1
        await asyncio.sleep(0.01)
    await eventually(lambda: gateway.refused("stalled_late") == 1)
    await gateway.queue.wait_for("cancelled", 4)
    assert len(gateway.table) == 0
    await eventually(lambda: not list(gateway.server._open()))
    client.close()


async def test_a_reader_that_two_give_up_is_counted_once(start):
    """The house, which looks at all connections, and the answer, which waits for its own."""
    gateway = await start(bounds=SLOW_CLOSE)
    peer = await gateway.connect()
    await eventually(lambda: list(gateway.server._open()))
    [connection] = gateway.server._open()
    connection.expire(Wait.STALL)
    connection.expire(Wait.STALL)
    assert await peer.all() == b""
    assert gateway.refused("stalled_late") == 1


async def test_a_reader_that_is_slow_has_longer_by_what_waits_for_it(start):
    """A megabyte that takes seconds, where a byte that takes 0.1 s is too slow."""
    bounds = Bounds(stall_s=0.1, min_rate=50_000, look_s=0.05)
    gateway = await start(bounds=bounds, max_body_bytes=4 << 20, max_len=1_000_000)
    peer = await gateway.connect(limit=1 << 16)
    await peer.send(post({"prompt": "ab " * 60_000, "return_token_strs": True}, path="/tokenize"))
    found = b""
    async with asyncio.timeout(LIMIT_S):
        while not found.endswith(b'"]}'):
            piece = await peer.reader.read(40_000)
            assert piece, "it was given up"
            found += piece
            await asyncio.sleep(0.05)
    assert gateway.refused("stalled_late") == 0


async def test_a_peer_that_does_not_take_its_last_answer_does_not_stay(start):
    """What waits for it in the process is below every mark."""
    gateway = await start(bounds=replace(SHORT, write_buffer=1 << 24))
    client, loop = await small_window(gateway.url), asyncio.get_running_loop()
    await eventually(lambda: list(gateway.server._open()))
    [connection] = gateway.server._open()
    state, answered = gateway.server._server.server_state, 0
    while not connection._inner.get_write_buffer_size():
        await loop.sock_sendall(client, HEALTH)
        answered += 1
        await eventually(lambda: state.total_requests == answered)  # noqa: B023 - waited for before it changes
    await eventually(lambda: not list(gateway.server._open()))
    assert gateway.refused("stalled_late") == 0
    client.close()
