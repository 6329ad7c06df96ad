"""Serves /metrics, /health and /ready over plain HTTP for roles without a web app. Reads one registry."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from prometheus_client import CollectorRegistry

from services.errors import PortInUse
from services.metrics import PageFormat, format_for

_REQUEST_TIMEOUT_S = 10.0
_MAX_HEAD_BYTES = 16_384
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}
_Answer = tuple[int, str, bytes]
_TEXT = "text/plain; charset=utf-8"


class MetricsServer:
    """Serves ``registry``. While ``missing`` names anything that the role waits for, /ready answers 503. ``joined``
    adds series of other processes to a page in a format."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        missing: Callable[[], Sequence[str]] = tuple,
        joined: Callable[[str, PageFormat], Awaitable[str]] | None = None,
    ) -> None:
        self._registry = registry
        self._host = host
        self._port = port
        self._missing = missing
        self._joined = joined
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        """Listen, and return the port: the one that was asked for, or a free one for 0.

        Raises:
            PortInUse: another process listens there.
        """
        try:
            self._server = await asyncio.start_server(self._serve, self._host, self._port, limit=_MAX_HEAD_BYTES)
        except OSError as error:
            raise PortInUse(
                f"Cannot listen on {self._host}:{self._port} for metrics ({error.strerror or error}).",
                hint="Choose another --metrics-port; 0 picks a free one.",
            ) from error
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, then close the connection: scrapes come seconds after one another."""
        with suppress(ConnectionError, TimeoutError):  # the client's affair
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                status, kind, body = await self._answer(await _read_head(reader))
                head = (
                    f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                )
                writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
                await writer.drain()
        writer.close()

    async def _answer(self, head: str) -> _Answer:
        line, _, fields = head.partition("\r\n")
        words = line.split(" ")
        if len(words) != 3:
            return 400, _TEXT, b"not an HTTP request\n"
        method, target, _ = words
        if method != "GET":
            return 405, _TEXT, b"only GET\n"
        return await self._page(target.partition("?")[0], _header(fields, "accept"))

    async def _page(self, path: str, accept: str) -> _Answer:
        if path == "/metrics":
            form = format_for(accept)
            own = form.encode(self._registry)
            page = own if self._joined is None else (await self._joined(own.decode(), form)).encode()
            return 200, form.content_type, page
        if path == "/health":
            return 200, _TEXT, b"ok\n"
        if path == "/ready":
            missing = list(self._missing())
            return (503, _TEXT, f"waiting for {', '.join(missing)}\n".encode()) if missing else (200, _TEXT, b"ready\n")
        return 404, _TEXT, b"there is /metrics, /health and /ready\n"


async def _read_head(reader: asyncio.StreamReader) -> str:
    try:
        return (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return ""


def _header(fields: str, name: str) -> str:
    for field in fields.split("\r\n"):
        key, _, value = field.partition(":")
        if key.strip().lower() == name:
            return value.strip()
    return ""
