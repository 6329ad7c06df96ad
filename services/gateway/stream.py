"""A job as an HTTP response: whole, or as server-sent events. Notices at once when the client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

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
Abandon = Callable[[Job], None]


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Client:
    """The reader of one response. ``gone`` is set when the connection is lost."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.gone = False

    def lose(self, watch: asyncio.Task[None]) -> None:
        if not watch.cancelled():
            self.gone = True
            self.reader.wake.set()

    async def news(self) -> bool:
        """Waits for something to read; False once the client is gone."""
        await self.reader.wake.wait()
        self.reader.wake.clear()
        return not self.gone


@asynccontextmanager
async def _client_of(job: Job, receive: Receive, abandon: Abandon, *, at_end: bool) -> AsyncIterator[_Client]:
    """Opens a reader; when the last one closes before the job is done, the job is abandoned."""
    client = _Client(job.open(at_end=at_end))
    watch = asyncio.create_task(_until_gone(receive))
    watch.add_done_callback(client.lose)
    try:
        yield client
    finally:
        watch.cancel()
        if job.close(client.reader) and not job.done:
            abandon(job)


class WholeResponse(Response):
    """Answers when the job is over. Raises its error, for the exception handlers."""

    def __init__(self, job: Job, form: Format, abandon: Abandon, offload: Offload) -> None:
        super().__init__()
        self._job = job
        self._format = form
        self._abandon = abandon
        self._offload = offload

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _client_of(self._job, receive, self._abandon, at_end=True) as client:
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
        """Each encoded beside the event loop when its turn comes, and only once the one before it is on its way."""
        await send({"type": "http.response.start", "status": 200, "headers": _JSON_HEADERS})
        pieces = self._format.whole()
        while piece := await self._offload.run(self._job.tenant, lambda: _joined(pieces), owed=True):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            if client.gone:
                return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class EventResponse(Response):
    """Streams. A failure before the first token is an HTTP error; a later one is an event that ends the stream."""

    def __init__(self, job: Job, form: Format, abandon: Abandon, offload: Offload) -> None:
        super().__init__()
        self._job = job
        self._format = form
        self._abandon = abandon
        self._offload = offload

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI
        job = self._job
        async with _client_of(job, receive, self._abandon, at_end=False) as client:
            while not job.started:
                if not await client.news():
                    return
            if job.error is not None and not any(choice.started for choice in job.choices):
                raise job.error
            await send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
            if await self._send_events(client, send):
                await send({"type": "http.response.body", "body": self._ending(), "more_body": False})

    async def _send_events(self, client: _Client, send: Send) -> bool:
        """All of them, as they come; False where the client left."""
        job, cursor = self._job, Cursor(self._job, self._format)
        while True:
            done = job.done  # before looking: what is there then is all
            events = await self._take(cursor) or (_COMMENT if client.reader.poked and not done else b"")
            client.reader.poked = False
            if events:
                await send({"type": "http.response.body", "body": events, "more_body": True})
            if client.gone:
                return False
            if len(events) >= TAKE_BYTES:
                await asyncio.sleep(0)  # others' turn, for one that reads fast never makes this one wait
            elif done:
                return True
            elif not await client.news():
                return False

    async def _take(self, cursor: Cursor) -> bytes:
        if not cursor.heavy:
            return cursor.take()
        try:
            return await self._offload.run(self._job.tenant, cursor.take, owed=True)
        except IndexError:  # it failed meanwhile, and let go of its answer
            if self._job.error is None:
                raise
            return b""

    def _ending(self) -> bytes:
        if self._job.error is not None:
            return error_event(self._job.error)
        return (self._format.usage_event() if self._format.include_usage else b"") + DONE


def _joined(pieces: Iterator[bytes]) -> bytes:
    """The next pieces together, TAKE_BYTES or little more; empty at the end."""
    found: list[bytes] = []
    size = 0
    for piece in pieces:
        found.append(piece)
        size += len(piece)
        if size >= TAKE_BYTES:
            break
    return b"".join(found)
