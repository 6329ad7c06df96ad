"""HTTP as those speak it who do not keep to it: raw connections, bodies that never end, answers that nobody reads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

_KEPT = 1 << 16
_PIECE = 1 << 16


@dataclass(kw_only=True, slots=True)
class Answer:
    """``kind``: the status and the code of its error, such as "200" or "400 invalid_request"; or "reset", "silence",
    "cut off" (an answer that began and did not end), "untyped 500". ``body``: its first 64 KiB; ``size`` of all."""

    kind: str
    seconds: float
    body: bytes = b""
    size: int = 0
    head: bytes = b""

    @property
    def status(self) -> int:
        return int(self.kind.split()[0]) if self.kind[:1].isdigit() else 0

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(kw_only=True, slots=True)
class Answers:
    """What an attack got."""

    kinds: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0

    def note(self, answer: Answer) -> Answer:
        self.kinds[answer.kind] += 1
        self.slowest = max(self.slowest, answer.seconds)
        return answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialer:
    """Where to knock, and with which key."""

    port: int
    key: str | None = None
    host: str = "127.0.0.1"

    def head(self, method: str, path: str, headers: Mapping[str, str] | None = None) -> bytes:
        """A request's head up to and with the empty line."""
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost"]
        lines += [f"Authorization: Bearer {self.key}"] if self.key else []
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def request(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> bytes:
        """A whole POST. ``body`` as JSON unless it is bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        extra = {"Content-Type": "application/json", "Content-Length": str(len(data))}
        return self.head("POST", path, extra | dict(headers or {})) + data

    async def post(
        self, path: str, body: Any, headers: Mapping[str, str] | None = None, *, timeout_s: float = 60.0
    ) -> Answer:
        asked = self.request(path, body, {"Connection": "close"} | dict(headers or {}))
        return await self.send(asked, timeout_s=timeout_s)

    async def get(self, path: str, headers: Mapping[str, str] | None = None, *, timeout_s: float = 60.0) -> Answer:
        return await self.send(
            self.head("GET", path, {"Connection": "close"} | dict(headers or {})), timeout_s=timeout_s
        )

    async def send(self, head: bytes, pieces: Iterable[bytes] = (), *, timeout_s: float = 60.0) -> Answer:
        """Sends while it reads: some answers come before everything was sent, and outlive the sending."""
        began = time.monotonic()
        answer = Answer(kind="silence", seconds=timeout_s)
        try:
            async with asyncio.timeout(timeout_s), self.socket() as sock:
                sending = asyncio.create_task(push(sock, [head, *pieces]))
                try:
                    answer = await read_answer(sock)
                finally:
                    sending.cancel()
        except TimeoutError:
            pass
        except OSError:
            answer = Answer(kind="reset", seconds=0.0)
        answer.seconds = time.monotonic() - began
        return answer

    @contextlib.asynccontextmanager
    async def socket(self, receive_buffer: int | None = None) -> AsyncIterator[socket.socket]:
        """A connection; with ``receive_buffer``, one whose kernel takes in no more than that for a slow reader."""
        with socket.socket() as sock:
            sock.setblocking(False)
            if receive_buffer:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            await asyncio.get_running_loop().sock_connect(sock, (self.host, self.port))
            yield sock


async def push(sock: socket.socket, pieces: Iterable[bytes]) -> None:
    """Sends ``pieces`` as fast as they are taken; a reset by the peer is left to the reader."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError), sock.dup() as out:  # asyncio's loop confuses who sends and who reads on one
        for piece in pieces:
            for start in range(0, len(piece), _PIECE):
                await loop.sock_sendall(out, piece[start : start + _PIECE])


async def read_answer(sock: socket.socket) -> Answer:
    """Until its end: the connection's, or what Content-Length says. Raises OSError where none begins."""
    loop, head = asyncio.get_running_loop(), b""
    while b"\r\n\r\n" not in head:
        if not (piece := await loop.sock_recv(sock, _PIECE)):
            raise ConnectionResetError("closed without an answer")
        head += piece
    head, _, rest = head.partition(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), None)
    body, size, last = bytearray(rest[:_KEPT]), len(rest), rest[-5:]
    with contextlib.suppress(OSError):
        while (length is None or size < length) and last != b"0\r\n\r\n":
            if not (piece := await loop.sock_recv(sock, _PIECE)):
                break
            size += len(piece)
            body += piece[: max(0, _KEPT - len(body))]
            last = (last + piece)[-5:]
    whole = size == length if length is not None else last == b"0\r\n\r\n"
    status = int(head[9:12])
    kind = _kind(status, bytes(body)) if whole else "cut off"
    return Answer(kind=kind, seconds=0.0, body=bytes(body), size=size, head=head)


def _kind(status: int, body: bytes) -> str:
    if status == 200:
        return _of_events(body) or "200"
    with contextlib.suppress(ValueError, KeyError, TypeError):
        error = json.loads(body[body.index(b"{") : body.rindex(b"}") + 1])["error"]
        return f"{status} {error['code']}" if error["type"] and error["message"] else f"untyped {status}"
    return f"untyped {status}"


def _of_events(body: bytes) -> str | None:
    """The error that ended a stream, if one did and it was a short one."""
    if (at := body.rfind(b'data: {"error"')) >= 0:
        with contextlib.suppress(ValueError, KeyError, IndexError):
            event = body[at + 6 :].split(b"\n\n")[0]
            return f"200 {json.loads(event)['error']['code']}"
    return None
