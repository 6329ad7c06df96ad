"""HTTP as bytes, below the app: the length of a body, answers without the app, and how a connection closes."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable, Iterable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from services.errors import RequestError
from services.gateway.errors_http import error_response

Fields = Iterable[tuple[bytes, bytes]]


def declared_length(headers: Fields) -> int | None:
    """Returns the length of the body; None for a body in chunks."""
    for name, value in headers:
        if name == b"transfer-encoding":
            return None
        if name == b"content-length":
            return int(value)  # the parser has refused values that are no numbers
    return 0


def raw_answer(error: RequestError, headers: Fields) -> bytes:
    """Returns ``error`` in OpenAI's shape, as the last answer of its connection."""
    answer = error_response(error, {"connection": "close"})
    fields = b"".join(b"%b: %b\r\n" % field for field in [*headers, *answer.raw_headers])
    return b"%b%b\r\n%b" % (STATUS_LINE[error.status], fields, bytes(answer.body))


def unread(transport: asyncio.Transport) -> bool:
    """Says whether bytes of the peer wait in the socket."""
    socket = transport.get_extra_info("socket")
    if socket is None:
        return False
    waiting = select.poll()
    waiting.register(socket.fileno(), select.POLLIN)
    return bool(waiting.poll(0))


class Exit(asyncio.Transport):
    """The transport that uvicorn gets. Its close calls ``leave``, which may wait for the peer; no write follows."""

    def __init__(self, inner: asyncio.Transport, leave: Callable[[], None]) -> None:
        super().__init__()
        self._inner = inner
        self._leave = leave
        self._closed = False

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if not self._closed:
            self._inner.write(data)

    def close(self) -> None:
        self._closed = True
        self._leave()

    def abort(self) -> None:
        self._closed = True
        self._inner.abort()

    def untie(self) -> None:
        """Drops ``leave`` when the connection has ended."""
        self._closed, self._leave = True, self._inner.close

    def is_closing(self) -> bool:
        return self._closed or self._inner.is_closing()

    def pause_reading(self) -> None:
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        if not self._inner.is_closing():
            self._inner.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._inner.get_extra_info(name, default)
