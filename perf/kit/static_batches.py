"""A server with static batches, as they were before iteration-level batching: a proxy before one that has none.

    python -m perf.kit.static_batches http://127.0.0.1:8000 --port 8001 --size 64

The server behind has to end a connection when it is asked to. Requests go on in batches of what waits, at most
``size``; the next batch begins when all of the last one have ended. Tokens come as the server makes them, and nothing
is padded: real static batches are slower than this one.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_CHUNK = 1 << 16


@dataclass(slots=True)
class Batches:
    """Turns of requests. ``size``: of a batch."""

    size: int
    _waiting: deque[asyncio.Event] = field(default_factory=deque)
    _running: int = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits for the batch of this request, and is a part of it while the context is open."""
        begin = asyncio.Event()
        self._waiting.append(begin)
        self._next()
        try:
            await begin.wait()
            yield
        finally:
            if begin.is_set():
                self._running -= 1
            else:
                self._waiting.remove(begin)
            self._next()

    def _next(self) -> None:
        if self._running:
            return
        while self._waiting and self._running < self.size:
            self._running += 1
            self._waiting.popleft().set()


@dataclass(frozen=True, kw_only=True, slots=True)
class Proxy:
    """Passes requests to ``host``: ``port``, a POST when its batch begins. Connections carry one request."""

    host: str
    port: int
    batches: Batches

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the request that comes from ``reader``."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
            request = one_request(head) + await reader.readexactly(int(length[1]) if length else 0)
            if head.startswith(b"POST "):
                async with self.batches.turn():
                    await self._pass_on(request, writer)
            else:
                await self._pass_on(request, writer)
        except asyncio.CancelledError:
            pass  # the proxy ends: Python 3.11 would log it as an error of its own
        except (OSError, asyncio.IncompleteReadError):
            pass  # a client that left, or a server that is not up yet: the connection ends, which says it
        finally:
            writer.close()

    async def _pass_on(self, request: bytes, writer: asyncio.StreamWriter) -> None:
        answers, sending = await asyncio.open_connection(self.host, self.port)
        try:
            sending.write(request)
            while data := await answers.read(_CHUNK):
                writer.write(data)
                await writer.drain()
        finally:
            sending.close()


def one_request(head: bytes) -> bytes:
    """Returns ``head`` for a connection that ends with the answer.

    >>> one_request(b"GET / HTTP/1.1\\r\\nHost: h\\r\\nConnection: keep-alive\\r\\n\\r\\n")
    b'GET / HTTP/1.1\\r\\nHost: h\\r\\nConnection: close\\r\\n\\r\\n'
    """
    return re.sub(rb"(?i)\r\nconnection:[^\r\n]*", b"", head)[:-2] + b"Connection: close\r\n\r\n"


async def serve(upstream: str, port: int, size: int) -> None:
    """Serves on loopback until it is cancelled."""
    to = urlsplit(upstream)
    proxy = Proxy(host=to.hostname or "127.0.0.1", port=to.port or 80, batches=Batches(size))
    async with await asyncio.start_server(proxy.serve, "127.0.0.1", port) as server:
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m perf.kit.static_batches", description=__doc__.split("\n\n")[0])
    parser.add_argument("upstream")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--size", type=int, default=64)
    options = parser.parse_args()
    asyncio.run(serve(options.upstream, options.port, options.size))


if __name__ == "__main__":
    main()
