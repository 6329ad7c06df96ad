"""A job in, an HTTP response out: whole, or as server-sent events. A response ends at once when its client leaves.

A body goes out through an :class:`Outlet`, a piece at a time, while the client keeps reading. The time for reading is
bounded, because an answer takes memory for as long as its client reads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.budget import Holdings
from services.gateway.job import Job, Reader
from services.gateway.offload import Offload
from services.gateway.openai_format import DONE, TAKE_BYTES, Cursor, Format, error_event

_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_JSON_HEADERS = [(b"content-type", b"application/json")]
_COMMENT = b": waiting\n\n"
_SMALL = 4096
"""Pieces up to this size are not counted: they are within what any connection may take."""
Abandon = Callable[[Job], None]


class _Client:
    """The reader of one response, and the memory that it takes. ``gone`` is set when the connection is lost."""

    def __init__(self, job: Job, reader: Reader, outlet: Outlet, holdings: Holdings) -> None:
        self.reader = reader
        self.gone = False
        self._job = job
        self._outlet = outlet
        self._holdings = holdings
        self._own = 0  # bytes of the reader itself
        self._last = 0  # bytes of the piece that may still be in the connection
        self._counted = 0

    def lose(self, watch: asyncio.Task[None]) -> None:
        if not watch.cancelled():
            self.gone = True
            self.reader.wake.set()

    async def news(self) -> bool:
        """Waits for something to read; False once the client is gone."""
        await self.reader.wake.wait()
        self.reader.wake.clear()
        return not self.gone

    async def send(self, body: bytes, *, more: bool = True) -> bool:
        """Sends ``body``; its time is unbounded while the job runs, and bounded afterwards. False once the client is
        gone."""
        write = self._outlet.write_in_time if self._job.done else self._outlet.write
        size = len(body) if len(body) > _SMALL else 0
        self._count(self._own + self._last + size)
        self.reader.give_up = self._outlet.abort
        try:
            await write(body, more=more)
        finally:
            self.reader.give_up = None
        self._last = size
        self._count(self._own + size)
        if self._outlet.aborted:
            await self.leave()
        return not self.gone

    def hold(self, size: int) -> None:
        """Counts ``size`` bytes of the reader itself, until it is closed."""
        self._own = size
        self._count(size)

    def close(self) -> None:
        self._count(0)

    def _count(self, size: int) -> None:
        if size != self._counted:
            self._holdings.grow(self._job, size - self._counted)
            self._counted = size

    async def leave(self) -> None:
        """Closes the connection at once."""
        self._outlet.abort()
        while not self.gone:
            await self.news()


@asynccontextmanager
async def _client_of(
    job: Job, receive: Receive, outlet: Outlet, abandon: Abandon, holdings: Holdings, *, at_end: bool
) -> AsyncIterator[_Client]:
    """Opens a reader. When the last reader closes before the job is done, the job is abandoned."""
    client = _Client(job, job.open(at_end=at_end), outlet, holdings)
    watch = asyncio.create_task(until_gone(receive))
    watch.add_done_callback(client.lose)
    try:
        yield client
    finally:
        watch.cancel()
        client.close()
        if job.close(client.reader) and not job.done:
            abandon(job)


class _JobResponse(Response):
    """Base of both responses to a job."""

    def __init__(
        self,
        job: Job,
        form: Format,
        abandon: Abandon,
        offload: Offload,
        holdings: Holdings,
        on_delivery: Callable[[float], None] = lambda _: None,
    ) -> None:
        """``on_delivery`` gets the seconds from the publication of tokens until they were written to the client."""
        super().__init__()
        self._on_delivery = on_delivery
        self._job = job
        self._format = form
        self._abandon = abandon
        self._offload = offload
        self._holdings = holdings

    async def _encoded(self, encode: Callable[[], bytes]) -> bytes:
        """Returns the result of ``encode``, run in a thread; empty where the job has dropped its answer meanwhile."""
        try:
            return await self._offload.run(self._job.tenant, encode, owed=True)
        except Exception:
            if self._job.error is None:
                raise
            return b""


class WholeResponse(_JobResponse):
    """Answers when the job is over. Raises the job's error, for the exception handlers."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outlet = Outlet(scope, send)
        async with _client_of(self._job, receive, outlet, self._abandon, self._holdings, at_end=True) as client:
            while not self._job.done:
                if not await client.news():
                    return
            if self._job.error is not None:
                raise self._job.error
            if not self._format.heavy:
                await Response(b"".join(self._format.whole()), media_type="application/json")(scope, receive, send)
                return
            await self._send_pieces(client, send)

    async def _send_pieces(self, client: _Client, send: Send) -> None:
        """Sends a long answer. Each piece is encoded in a thread, once the piece before it is in the connection."""
        await send({"type": "http.response.start", "status": 200, "headers": _JSON_HEADERS})
        pieces = self._format.whole()
        while (piece := await self._encoded(lambda: _joined(pieces))) and self._job.error is None:
            if not await client.send(piece):
                return
        if self._job.error is None:
            await client.send(b"", more=False)
        elif not client.gone:
            await client.leave()  # only a closed connection says that the answer is incomplete


class EventResponse(_JobResponse):
    """Streams a job. A failure before the first token is an HTTP error; a later one is the last event of the stream."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        job, outlet = self._job, Outlet(scope, send)
        async with _client_of(job, receive, outlet, self._abandon, self._holdings, at_end=False) as client:
            while not job.started:
                if not await client.news():
                    return
            if job.error is not None and not any(choice.started for choice in job.choices):
                raise job.error
            await send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
            if await self._send_events(client):
                await client.send(self._ending(), more=False)

    async def _send_events(self, client: _Client) -> bool:
        """Sends all events as they come. False where the client left."""
        job, cursor = self._job, Cursor(self._job, self._format)
        client.hold(cursor.nbytes)
        while True:
            done = job.done  # read before the events, which are complete then
            events = await self._encoded(cursor.take) if cursor.heavy else cursor.take()
            events = events or (_COMMENT if client.reader.poked and not done else b"")
            client.reader.poked = False
            published, job.published_at = job.published_at, None
            if client.gone or (events and not await client.send(events)):
                return False
            if published is not None and events:
                self._on_delivery(time.monotonic() - published)
            if len(events) >= TAKE_BYTES:
                await asyncio.sleep(0)  # lets other tasks run: a fast reader never makes this one wait
            elif done:
                return True
            elif not await client.news():
                return False

    def _ending(self) -> bytes:
        if self._job.error is not None:
            return error_event(self._job.error)
        return (self._format.usage_event() if self._format.include_usage else b"") + DONE


def _joined(pieces: Iterator[bytes]) -> bytes:
    """Returns the next pieces together, TAKE_BYTES or little more; empty at the end."""
    found: list[bytes] = []
    size = 0
    for piece in pieces:
        found.append(piece)
        size += len(piece)
        if size >= TAKE_BYTES:
            break
    return b"".join(found)


PIECE_BYTES = 64 * 1024
_LINE = "expertmesh.line"


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """What an answer needs of its connection. ``abort`` closes the connection at once; ``expire`` does so and counts
    the client as stalled. A client has ``stall_s`` seconds, by the clock ``now``, to read its answer, and one more for
    each ``min_rate`` bytes."""

    abort: Callable[[], None]
    expire: Callable[[], None]
    now: Callable[[], float]
    stall_s: float
    min_rate: float

    def under(self, scope: Scope) -> None:
        """Makes the connection known to the answer of the request ``scope``."""
        scope[_LINE] = self


class Outlet:
    """Writes one answer. ``aborted`` says that the connection is being closed, so nothing more goes out."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.aborted = False
        self._line: Line = scope[_LINE]
        self._send = send
        self._left_s = self._line.stall_s

    def abort(self) -> None:
        self.aborted = True
        self._line.abort()

    async def write(self, body: bytes, *, more: bool = True) -> None:
        """Sends ``body``, once the client has nearly all of the piece before it."""
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def write_in_time(self, body: bytes, *, more: bool = True) -> None:
        """Sends as :meth:`write`; closes the connection where all such writes have taken too long together."""
        due = self._line.now() + self._left_s
        writing = asyncio.ensure_future(self.write(body, more=more))
        try:
            while not writing.done() and (left_s := due - self._line.now()) > 0:
                await asyncio.wait([writing], timeout=left_s)  # again, if this process stood still meanwhile
            if not writing.done():
                self.aborted = True
                self._line.expire()
            else:
                writing.result()
        finally:
            writing.cancel()
        self._left_s = due - self._line.now() + len(body) / self._line.min_rate


class LongResponse(Response):
    """An answer that is complete already. It ends only when the client has nearly all of it, so that room which is held
    until the end covers the bytes in the connection, too."""

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
    """Waits for the end of the connection and ignores all other messages."""
    while (await receive())["type"] != "http.disconnect":
        pass
