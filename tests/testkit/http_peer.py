"""A client of HTTP whose every byte is ours, and the bytes of requests."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

from testkit.waiting import LIMIT_S

URL = "/v1/completions"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def head(*fields: str, path: str = URL, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *fields]
    return "\r\n".join([*lines, "", ""]).encode()


def post(body: Any, *fields: str, path: str = URL) -> bytes:
    """A request with ``body``: bytes as they are, else as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head(*fields, f"Content-Length: {len(content)}", path=path) + content


def address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


async def small_window(url: str) -> socket.socket:
    """A connection for which the kernel holds little that is not read."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, address(url))
    return client


class Peer:
    """A connection to ``url``."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def of(cls, url: str, **options: Any) -> Peer:
        return cls(*await asyncio.open_connection(*address(url), **options))

    async def send(self, *parts: bytes) -> bool:
        """False: the connection broke on the way."""
        try:
            for part in parts:
                self.writer.write(part)
                await self.writer.drain()
        except ConnectionError:
            return False
        return True

    async def all(self) -> bytes:
        """What comes until the connection ends."""
        found = b""
        try:
            async with asyncio.timeout(LIMIT_S):
                while piece := await self.reader.read(65536):
                    found += piece
        except ConnectionError:
            pass
        return found

    async def until(self, end: bytes) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(end), LIMIT_S)

    async def answer(self) -> bytes:
        head = await self.until(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return head + await self.reader.readexactly(length)

    async def said(self) -> tuple[int, Any]:
        """Status and JSON of the next answer."""
        head, _, body = (await self.answer()).partition(b"\r\n\r\n")
        return int(head.split()[1]), json.loads(body)

    def reset(self) -> None:
        """Leaves at once: what is on its way is lost."""
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.writer.transport.abort()
