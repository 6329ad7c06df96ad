"""The way of an answer to its client: a piece at a time, for as long as the client keeps reading.

In: pieces of a body. Out: ASGI messages, and the end of the connection where the client reads too slowly: what waits
for it is memory, and to read a little of it now and then would keep all of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import Scope, Send

_LINE = "expertmesh.line"


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """The connection under a request, as far as its answer may touch it. ``abort`` closes it at once; a client has
    ``stall_s`` seconds in all to read its answer, and one more for each ``least_rate`` bytes."""

    abort: Callable[[], None]
    stall_s: float
    least_rate: float

    def under(self, scope: Scope) -> None:
        """Names it to whoever answers the request ``scope``."""
        scope[_LINE] = self


class Outlet:
    """Of one answer. ``aborted``: the connection is being closed, and nothing more goes out."""

    def __init__(self, scope: Scope, send: Send, clock: Callable[[], float] = time.monotonic) -> None:
        self.aborted = False
        self._line: Line = scope[_LINE]
        self._send = send
        self._clock = clock
        self._left_s = self._line.stall_s

    def abort(self) -> None:
        self.aborted = True
        self._line.abort()

    async def write(self, body: bytes, *, more: bool = True) -> None:
        """Sends ``body`` when the one before it is with the client, or nearly."""
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def write_in_time(self, body: bytes, *, more: bool = True) -> None:
        """As :meth:`write`; closes the connection where such writes have taken the client too long in all."""
        began = self._clock()
        try:
            async with asyncio.timeout(self._left_s):
                await self.write(body, more=more)
        except TimeoutError:
            self.abort()
        self._left_s += len(body) / self._line.least_rate - (self._clock() - began)
