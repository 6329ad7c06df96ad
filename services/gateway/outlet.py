"""The way of an answer to its client: a piece at a time, for as long as the client keeps reading.

In: pieces of a body. Out: ASGI messages, and the end of the connection where the client reads too slowly: what waits
for it is memory, and to read a little of it now and then would keep all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

PIECE_BYTES = 64 * 1024
_LINE = "expertmesh.line"


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """The connection under a request, as far as its answer may touch it. ``abort`` closes it at once, ``expire`` does
    so and counts its client among those that stalled: it has ``stall_s`` seconds of ``now`` in all to read its answer,
    and one more for each ``least_rate`` bytes."""

    abort: Callable[[], None]
    expire: Callable[[], None]
    now: Callable[[], float]
    stall_s: float
    least_rate: float

    def under(self, scope: Scope) -> None:
        """Names it to whoever answers the request ``scope``."""
        scope[_LINE] = self


class Outlet:
    """Of one answer. ``aborted``: the connection is being closed, and nothing more goes out."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.aborted = False
        self._line: Line = scope[_LINE]
        self._send = send
        self._left_s = self._line.stall_s

    def abort(self) -> None:
        self.aborted = True
        self._line.abort()

    async def write(self, body: bytes, *, more: bool = True) -> None:
        """Sends ``body`` when the one before it is with the client, or nearly."""
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def write_in_time(self, body: bytes, *, more: bool = True) -> None:
        """As :meth:`write`; closes the connection where such writes have taken the client too long in all."""
        due = self._line.now() + self._left_s
        writing = asyncio.ensure_future(self.write(body, more=more))
        try:
            while not writing.done() and (left_s := due - self._line.now()) > 0:
                await asyncio.wait([writing], timeout=left_s)  # anew, if this process stood still meanwhile
            if not writing.done():
                self.aborted = True
                self._line.expire()
            else:
                writing.result()
        finally:
            writing.cancel()
        self._left_s = due - self._line.now() + len(body) / self._line.least_rate


class LongResponse(Response):
    """An answer that is there already, sent so that it is not over before the client has nearly all of it: whatever
    room is kept for it until then is kept for what waits in the connection, too."""

    def __init__(self, content: bytes) -> None:
        super().__init__(media_type="application/json")
        self._content = content
        self.headers["content-length"] = str(len(content))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outlet = Outlet(scope, send)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for start in range(0, len(self._content), PIECE_BYTES):
            await outlet.write_in_time(self._content[start : start + PIECE_BYTES])
            if outlet.aborted:
                break
        else:
            await outlet.write_in_time(b"", more=False)
        if outlet.aborted:
            await until_gone(receive)


async def until_gone(receive: Receive) -> None:
    """Waits for the end of the connection, whatever comes before."""
    while (await receive())["type"] != "http.disconnect":
        pass
