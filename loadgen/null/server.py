"""A null server: OpenAI's completions and chat without a model, whose delays are known to microseconds.

Bytes of HTTP/1.1 come in, answers go out when :mod:`loadgen.null.behaviour` says so. It exists to measure what
measures.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import httptools
import msgspec

from loadgen.null.answers import Asked, text, token
from loadgen.null.behaviour import Behaviour, Luck, Turns
from loadgen.timers import Timers

MODEL = "null"
_KEPT = 100_000
_asked = msgspec.json.Decoder(Asked)
_encode = msgspec.json.Encoder().encode
_END = b"0\r\n\r\n"


@dataclass(kw_only=True, slots=True)
class NullServer:
    """State that all connections share. ``epoch``: second 0 of the stalls, by time.perf_counter; None: when the first
    request comes."""

    behaviour: Behaviour
    timers: Timers
    epoch: float | None = None
    counts: Counter[str] = field(default_factory=Counter)
    turns: Turns = field(init=False)
    luck: Luck = field(init=False)
    keys: set[str] = field(default_factory=set)
    """Idempotency-Keys that came."""
    late: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    """Seconds by which the last writings came after they were due: how far the delays are to be believed."""

    def __post_init__(self) -> None:
        self.turns = Turns(self.behaviour)
        self.luck = Luck(self.behaviour.faults, self.behaviour.seed)

    def connection(self) -> Connection:
        return Connection(self)

    def stats(self) -> dict[str, float]:
        late = sorted(self.late) or [0.0]
        return {**self.counts, "late_p50_ms": late[len(late) // 2] * 1e3, "late_max_ms": late[-1] * 1e3}

    def write_at(self, due: float, write: Callable[[], None], *, behind: bool) -> bool:
        """Have ``write`` called at ``due``, or at once if that is now and it is ``behind`` no other. Returns whether it
        is still to come."""
        if not behind and due <= time.perf_counter():
            write()
            return False
        self.timers.at(due, partial(self._write_late, due, write))
        return True

    def _write_late(self, due: float, write: Callable[[], None]) -> None:
        self.late.append(time.perf_counter() - due)
        write()

    def dues(self, tokens: int) -> list[float]:
        """Returns when the tokens of a request that came now are due, by time.perf_counter."""
        now = time.perf_counter()
        if self.epoch is None:
            self.epoch = now
        return [self.epoch + due for due in self.turns.dues(now - self.epoch, tokens)]


class Connection(asyncio.Protocol):
    """One client's connection, with one request at a time."""

    def __init__(self, server: NullServer) -> None:
        self._server = server
        self._parser: Any = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._url, self._body, self._key = b"", b"", ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self._server.counts["connections"] += 1

    def connection_lost(self, _error: Exception | None) -> None:
        self._transport = self._parser = None

    def data_received(self, data: bytes) -> None:
        self._server.timers.poll()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._close()

    def on_message_begin(self) -> None:
        self._url, self._body, self._key = b"", b"", ""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"idempotency-key":
            self._key = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        match self._url:
            case b"/v1/completions" | b"/v1/chat/completions":
                self._complete(chat=self._url.startswith(b"/v1/chat"))
            case b"/v1/models":
                self._say(200, _encode({"object": "list", "data": [{"id": MODEL, "object": "model"}]}))
            case b"/stats":
                self._say(200, _encode(self._server.stats()))
            case b"/health" | b"/ready":
                self._say(200, b"{}")
            case _:
                self._refuse(404, "there is no such page")

    def _complete(self, *, chat: bool) -> None:
        server = self._server
        server.counts["requests"] += 1
        if self._key:
            server.counts["again"] += self._key in server.keys
            server.keys.add(self._key)
        try:
            asked = _asked.decode(self._body)
        except msgspec.MsgspecError as error:
            self._refuse(400, str(error))
            return
        if asked.tools and not server.behaviour.tools:
            self._refuse(400, "tools are not supported")
            return
        fate = server.luck.draw()
        server.counts[fate] += 1
        if fate in ("refused", "failed"):
            self._refuse(429 if fate == "refused" else 500, "as it was asked for")
            return
        key = asked.key() + (fate == "wrong")
        answer = _Answer(asked, chat, key, self._write if fate != "broken" else self._write_and_break)
        answer.schedule(server, server.dues(max(1, asked.count)))

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def _write_and_break(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data[: len(data) // 2])
        self._close()

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _refuse(self, status: int, message: str) -> None:
        after = self._server.behaviour.faults.retry_after_s
        more = b"" if after is None or status != 429 else b"Retry-After: %d\r\n" % after
        self._say(status, _encode({"error": {"message": message, "code": status}}), more)

    def _say(self, status: int, body: bytes, more: bytes = b"") -> None:
        self._write(head(status, b"application/json", b"Content-Length: %d\r\n" % len(body) + more) + body)


def head(status: int, kind: bytes, more: bytes) -> bytes:
    return b"HTTP/1.1 %d -\r\nServer: null\r\nContent-Type: %s\r\n%s\r\n" % (status, kind, more)


@dataclass(slots=True)
class _Answer:
    asked: Asked
    chat: bool
    key: int
    write: Callable[[bytes], None]

    def schedule(self, server: NullServer, dues: list[float]) -> None:
        """Have the tokens written when they are due; those of one moment in one piece."""
        if not self.asked.stream:
            server.write_at(dues[-1], partial(self.write, self._whole(len(dues))), behind=False)
            return
        begin, behind = 0, False
        while begin < len(dues):
            end = next((at for at in range(begin, len(dues)) if dues[at] != dues[begin]), len(dues))
            write = partial(self.write, self._piece(begin, end, len(dues)))
            behind = server.write_at(dues[begin], write, behind=behind)
            begin = end

    def _choice(self, words: str, ids: list[int], finish: str | None, part: str) -> dict[str, object]:
        content: dict[str, object] = {part: {"content": words}} if self.chat else {"text": words}
        ids_too = {"token_ids": ids} if self.asked.return_token_ids else {}
        return {"index": 0, "finish_reason": finish, **content, **ids_too}

    def _usage(self, count: int) -> dict[str, int]:
        asked = self.asked.prompt_tokens
        return {"prompt_tokens": asked, "completion_tokens": count, "total_tokens": asked + count}

    def _whole(self, count: int) -> bytes:
        ids = [token(self.key, number) for number in range(count)]
        choice = self._choice("".join(map(text, ids)), ids, "length", "message")
        body = _encode({"id": "null", "model": MODEL, "choices": [choice], "usage": self._usage(count)})
        return head(200, b"application/json", b"Content-Length: %d\r\n" % len(body)) + body

    def _piece(self, begin: int, end: int, count: int) -> bytes:
        """Tokens ``begin`` to ``end`` of a stream of ``count``, with what comes before the first and after the last."""
        events = []
        for number in range(begin, end):
            drawn = token(self.key, number)
            finish = "length" if number == count - 1 else None
            events.append(_event({"choices": [self._choice(text(drawn), [drawn], finish, "delta")]}))
        if end == count:
            if self.asked.stream_options and self.asked.stream_options.include_usage:
                events.append(_event({"choices": [], "usage": self._usage(count)}))
            events.append(b"data: [DONE]\n\n")
        data = b"".join(events)
        before = b"" if begin else head(200, b"text/event-stream", b"Transfer-Encoding: chunked\r\n")
        return before + b"%x\r\n%s\r\n" % (len(data), data) + (_END if end == count else b"")


def _event(content: object) -> bytes:
    return b"data: %s\n\n" % _encode(content)


async def serve(
    behaviour: Behaviour,
    *,
    host: str,
    port: int,
    epoch: float | None = None,
    share_port: bool = False,
    on_ready: Callable[[int], None] = lambda _port: None,
) -> None:
    """Serve until cancelled. ``epoch``: in Unix seconds. ``share_port``: with other processes. ``on_ready`` gets the
    port."""
    timers = Timers()
    moment = None if epoch is None else time.perf_counter() + epoch - time.time()
    server = NullServer(behaviour=behaviour, timers=timers, epoch=moment)
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(
        server.connection, host, port, backlog=4096, family=socket.AF_INET, reuse_port=share_port or None
    )
    on_ready(listening.sockets[0].getsockname()[1])
    try:
        await listening.serve_forever()
    finally:
        listening.close()
        timers.close()
