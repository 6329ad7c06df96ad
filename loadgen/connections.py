"""HTTP/1.1 over connections that are kept: bytes of a request out, pieces of its answer in as they come.

A client written for this: a request is on the wire when :meth:`Session.send` returns, if a connection is idle, and no
task runs for it. A request takes 36 us of CPU, with aiohttp 91 to 143 (docs/log/2026-11.md).
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

IDLE_S = 4.0
"""A connection that was idle for longer is not used again: servers close them after 5 s and more."""


class Broken(ConnectionError):
    """The connection did not come about, or ended before the answer did."""


class TimedOut(TimeoutError):
    """The answer, or its next byte, did not come in time."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a URL leads. ``prefix``: its path, without a slash at the end."""

    host: str
    port: int
    secure: bool
    prefix: str
    authority: str

    @staticmethod
    @lru_cache(maxsize=256)
    def of(url: str) -> Origin:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no URL of HTTP")
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        return Origin(parts.hostname, port, secure, parts.path.rstrip("/"), parts.netloc.rpartition("@")[2])


def _nothing(_: object) -> None: ...


@dataclass(slots=True, eq=False)
class Exchange:
    """A request and its answer. ``on_data`` gets each piece of the body when it comes. Times are by
    ``time.perf_counter``: ``sent`` is None until the request has been written."""

    origin: Origin
    request: bytes
    on_head: Callable[[Exchange], None]
    on_data: Callable[[bytes], None]
    ended: asyncio.Future[None]
    started: float
    sent: float | None = None
    heard: float = 0.0
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    """Names in small letters."""
    connection: _Connection | None = None
    timers: list[asyncio.TimerHandle] = field(default_factory=list)

    def finish(self, error: Exception | None = None) -> None:
        self.connection = None
        self.on_head, self.on_data = _nothing, _nothing  # those who asked know this exchange: a cycle
        for timer in self.timers:
            timer.cancel()
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)

    def abort(self, error: Exception | None = None) -> None:
        """Hang up: nothing more comes."""
        connection = self.connection
        self.finish(error or Broken("the client left"))
        if connection is not None:
            connection.drop()

    async def end(self) -> None:
        """Return when the whole answer has come. Who cancels this hangs up.

        Raises:
            Broken, TimedOut: it does not come.
        """
        try:
            await self.ended
        except asyncio.CancelledError:
            self.abort()
            self.ended.cancelled() or self.ended.exception()
            raise


class _Connection(asyncio.Protocol):
    def __init__(self, session: Session, origin: Origin) -> None:
        self._session = session
        self.origin = origin
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._until_closed = False
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def send(self, exchange: Exchange) -> None:
        assert self._transport is not None
        self._exchange, exchange.connection = exchange, self
        self._until_closed = False
        exchange.sent = exchange.heard = time.perf_counter()
        self._transport.write(exchange.request)

    @property
    def usable(self) -> bool:
        return (
            self._transport is not None
            and not self._transport.is_closing()
            and time.perf_counter() - self.idle_since < IDLE_S
        )

    def drop(self) -> None:
        """Close at once. What was on its way is lost."""
        self._exchange = None
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            self.drop()  # bytes that nobody asked for
            return
        self._session.between()
        exchange.heard = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(Broken(f"the answer is no HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self._session.lost(self)
        self._parser = None  # which knows this connection: a cycle
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        if self._until_closed and error is None:
            exchange.finish()
        else:
            exchange.finish(Broken(str(error) if error else "the server closed the connection"))

    def _fail(self, error: Exception) -> None:
        exchange = self._exchange
        self.drop()
        if exchange is not None:
            exchange.finish(error)

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._exchange is not None
        self._exchange.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        exchange = self._exchange
        assert exchange is not None
        exchange.status = self._parser.get_status_code()
        headers = exchange.headers
        self._until_closed = "content-length" not in headers and "transfer-encoding" not in headers
        exchange.on_head(exchange)

    def on_body(self, body: bytes) -> None:
        if self._exchange is not None:
            self._exchange.on_data(body)

    def on_message_complete(self) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        if exchange.status < 200:  # 100 Continue: the answer follows
            return
        self._exchange = None
        if self._parser.should_keep_alive() and not self._until_closed:
            self.idle_since = time.perf_counter()
            self._session.idle(self)
        else:
            self.close()
        exchange.finish()


class Session:
    """Connections to servers, as many as requests are under way. ``connect_s``, ``silence_s`` (without a byte of the
    answer) and ``total_s`` bound the waiting, None does not. ``between`` is called before each piece of an answer is
    looked at, so that what is due is not late. Use as an async context manager."""

    def __init__(
        self,
        *,
        connect_s: float | None = None,
        silence_s: float | None = None,
        total_s: float | None = None,
        tls: ssl.SSLContext | None = None,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._connect_s, self._silence_s, self._total_s = connect_s, silence_s, total_s
        self._tls = tls
        self.between = between
        self._idle: dict[Origin, list[_Connection]] = {}
        self._all: set[_Connection] = set()
        self._none_left = asyncio.Event()
        self._connecting: set[asyncio.Task[None]] = set()
        self.opened = 0

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_: object) -> None:
        connecting = list(self._connecting)
        for task in connecting:
            task.cancel()
        await asyncio.gather(*connecting, return_exceptions=True)
        for connection in list(self._all):
            connection.drop()
        self._none_left.clear()
        if self._all:
            await self._none_left.wait()

    def send(
        self,
        method: str,
        url: str,
        path: str,
        *,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        on_head: Callable[[Exchange], None] = lambda _exchange: None,
        on_data: Callable[[bytes], None] = lambda _data: None,
    ) -> Exchange:
        """Send a request to ``path`` below ``url``, at once if a connection is idle. Await the exchange's ``end``."""
        origin = Origin.of(url)
        request = request_bytes(origin, method, path, body, headers or {})
        exchange = Exchange(origin, request, on_head, on_data, self._loop.create_future(), time.perf_counter())
        if self._total_s is not None:
            exchange.timers.append(self._loop.call_later(self._total_s, self._late, exchange, "the answer"))
        idle = self._idle.get(origin, [])
        while idle:
            connection = idle.pop()
            if connection.usable:
                connection.send(exchange)
                self._watch_silence(exchange)
                return exchange
            connection.close()
        task = self._loop.create_task(self._connect(exchange))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return exchange

    def idle(self, connection: _Connection) -> None:
        self._idle.setdefault(connection.origin, []).append(connection)

    def lost(self, connection: _Connection) -> None:
        self._all.discard(connection)
        if not self._all:
            self._none_left.set()
        if connection in (idle := self._idle.get(connection.origin, [])):
            idle.remove(connection)

    async def _connect(self, exchange: Exchange) -> None:
        origin = exchange.origin
        if origin.secure and self._tls is None:
            self._tls = ssl.create_default_context()  # once: it reads all certificates of the machine
        tls = self._tls if origin.secure else None
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await self._loop.create_connection(
                    lambda: _Connection(self, origin), origin.host, origin.port, ssl=tls
                )
        except TimeoutError:
            exchange.finish(TimedOut("no connection in time"))
            return
        except OSError as error:
            exchange.finish(Broken(f"no connection to {origin.authority}: {error.strerror or error}"))
            return
        self.opened += 1
        self._all.add(connection)
        if exchange.ended.done():
            connection.close()
        else:
            connection.send(exchange)
            self._watch_silence(exchange)

    def _watch_silence(self, exchange: Exchange) -> None:
        if self._silence_s is not None:
            left = exchange.heard + self._silence_s - time.perf_counter()
            if left <= 0:
                self._late(exchange, "the next byte")
            else:
                exchange.timers[1:] = [self._loop.call_later(left, self._watch_silence, exchange)]

    def _late(self, exchange: Exchange, what: str) -> None:
        exchange.abort(TimedOut(f"{what} did not come in time"))


def request_bytes(origin: Origin, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    """Returns a request as it goes over the wire."""
    lines = [f"{method} {origin.prefix}{path} HTTP/1.1", f"Host: {origin.authority}", "Accept: */*"]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
