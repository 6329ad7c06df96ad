"""One connection of a client: uvicorn's HTTP protocol with bounds on everything that a peer can send, hold or leave.

In: bytes of anybody, before any key is checked. Out: requests for the app; what passes a bound is answered in OpenAI's
shape where an answer can still be written, counted by reason, and closed. uvicorn bounds none of it: its parser keeps
one field's value whole however long it grows, and nothing there has a deadline before the first answer.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, cast

import httptools
from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from services.errors import HeadTooLarge, InvalidRequest, RequestError, RequestTimedOut
from services.gateway.connections import Connections, Tally, Wait
from services.gateway.raw_http import Exit, declared_length, raw_answer, unread
from services.gateway.stream import Line

_HEAD_PIECE = 4096
"""A head is parsed in pieces of so many bytes, which is how exactly its size is known."""
_BODY_PIECE = 64 * 1024
"""A body, as far as its length is known: its last piece ends where it does, so that no head is in it."""


class _Refused(Exception):
    """Raised inside the parser's callbacks to stop it."""


class Connection(HttpToolsProtocol):
    """``spare``: on a place of those beyond the bound; ``probes`` is the app that answers there."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        *,
        connections: Connections,
        spare: bool,
        probes: ASGIApp,
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._connections = connections
        self._bounds = connections.bounds
        self._spare = spare
        if spare:
            self.app = probes
        self._inner: asyncio.Transport = None  # type: ignore[assignment] # until connection_made
        self._reads: Wait | None = None  # HEAD, BODY, REST or IDLE; None: what is sent ahead of an answer
        self._serving: RequestResponseCycle | None = None
        self._deaf = False  # what comes is thrown away
        self._leaving = False
        self._given_up = False
        self._refusal: tuple[str, RequestError | None] | None = None
        self.tally = Tally(connections.bounds)
        self._rests_since = 0.0
        self._turns = 0  # changes of what it reads
        self._due = 0  # bytes that are still to come of a body with a length

    # What the transport tells

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._inner = cast(asyncio.Transport, transport)  # uvloop's is none by its type
        self._inner.set_write_buffer_limits(high=self._bounds.write_buffer)
        self._exit = Exit(self._inner, self.leave)
        super().connection_made(self._exit)
        bounds, late = self._bounds, partial(self.expire, Wait.STALL)
        self._line = Line(
            abort=self._inner.abort,
            expire=late,
            now=self._connections.time.now,
            stall_s=bounds.stall_s,
            least_rate=bounds.least_rate,
        )
        self._connections.enter(self, spare=self._spare)
        self._read(Wait.HEAD, self._bounds.spare_head_s if self._spare else self._bounds.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.leave(self)
        self._deaf = self._leaving = True
        super().connection_lost(exc)
        for cycle in (self._serving, *(cycle for cycle, _ in self.pipeline)):  # uvicorn tells the newest one alone
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._untie()

    def data_received(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest and not self._deaf:
            size = self._piece()
            self._feed(rest[:size])
            rest = rest[size:]
        if self.tally.throw_away(len(rest)):
            self._inner.abort()

    def eof_received(self) -> None:
        self._connections.wait(self, Wait.CLOSING, self._write_timeout_s())

    def pause_writing(self) -> None:
        super().pause_writing()
        self._connections.wait(self, Wait.STALL, self._write_timeout_s())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._connections.done(self, Wait.STALL)

    def shutdown(self) -> None:
        """The server ends."""
        if self._leaving:
            self._close()
        else:
            super().shutdown()

    # What the connections asks and says

    @property
    def unread(self) -> bool:
        """Whether bytes wait in its socket: to close it now would break a request that a client has sent."""
        return unread(self._inner)

    @property
    def paused(self) -> bool:
        return bool(self.flow.read_paused)

    @property
    def waited_s(self) -> float:
        """For how long it has waited for another request; -1: it does not, or had none yet."""
        return self._connections.time.now() - self._rests_since if self._reads is Wait.IDLE else -1.0

    @property
    def stays(self) -> bool:
        """Whether it outlives the answer whose head it has sent. One that has sent a part of something afterwards is
        not waited for: nobody knows whether that is a request."""
        cycle = self._serving
        if cycle is None or not cycle.response_started or self.transport.is_closing():
            return False
        return bool(cycle.keep_alive and (not cycle.response_complete or self._reads is Wait.IDLE))

    def expire(self, wait: Wait) -> None:
        if wait is Wait.HEAD:
            self._refuse("head_late", RequestTimedOut("The request's head took too long."), silent=True)
        elif wait is Wait.BODY:
            self._refuse("body_late", RequestTimedOut("The body took too long.", hint="Send it faster."), silent=True)
        elif wait is Wait.IDLE:
            self.leave()  # in order, and nobody's fault
        elif not self._given_up:  # by the other one of those that look: an answer and the connections
            self._given_up = True
            if wait is not Wait.CLOSING:  # which was told before
                self._connections.refusals.note(
                    f"{wait.value}_late", f"gave up a connection: {wait.value} for too long"
                )
            self._inner.abort()

    def give_way(self) -> None:
        self._inner.abort()

    def leave(self) -> None:
        """Closes when the request has come whole and the answer is with the peer, both within bounds: to close before
        would make its kernel throw the answer away."""
        if self._leaving:
            return
        self._leaving = True
        if self._reads in (Wait.BODY, Wait.REST):
            self.flow.resume_reading()
        else:
            self._close()
        self._read(None)
        self._connections.wait(self, Wait.CLOSING, self._write_timeout_s())

    # What the parser tells

    def on_message_begin(self) -> None:
        if self._leaving:
            self._close()
            raise _Refused
        super().on_message_begin()
        self.tally.begin_head()
        if self._reads is not Wait.HEAD:
            self._read(Wait.HEAD, self._bounds.head_s)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.tally.field():
            self._stop("head_fields", HeadTooLarge(f"The request has over {self._bounds.head_fields} header fields."))
        if self._reads is Wait.HEAD:  # else a trailer, which nobody reads
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._line.under(cast(dict[str, Any], self.scope))
        super().on_headers_complete()
        if self._spare:
            self.cycle.keep_alive = False
        if len(self.pipeline) > self._bounds.ahead_requests:
            self._stop("ahead", None)
        self.tally.begin_body()
        length = declared_length(self.headers)
        self._due = length or 0
        if self.pipeline:
            self.flow.resume_reading()  # else nobody would see this peer leave; what it sends ahead is bounded
        else:
            self._serving = self.cycle
            if length != 0:
                self.flow.pause_reading()  # until the app asks for it
        allowed = self._bounds.body_bytes if length is None else min(length, self._bounds.body_bytes)
        self._read(Wait.BODY, self._bounds.body_s + allowed / self._bounds.least_rate)

    def on_body(self, body: bytes) -> None:
        self.tally.content(len(body))
        self._due -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._due = 0
        super().on_message_complete()
        if self._leaving:
            self._close()
        elif self.cycle.response_complete:
            self._rest()
        else:
            self._read(None)

    # What the app tells

    def on_response_complete(self) -> None:
        done = self._serving
        if self.pipeline:
            self._serving = self.pipeline[-1][0]
        super().on_response_complete()
        self._unset_keepalive_if_required()  # it fires late where the process stood still: see Connections
        if done is not None:
            done.body = bytearray()  # what nobody read
        if self._leaving or self.transport.is_closing():
            return
        if self._reads is Wait.BODY and self.cycle is done:
            self._read(Wait.REST, self._bounds.body_s)
        elif self._reads is None and self.cycle.response_complete:
            self._rest()

    # Inside

    def _untie(self) -> None:
        """Lets go of all that refers back to this object, which is freed at once then. Thousands that wait for a
        collection of garbage keep memory in pieces that new objects fill, and the process never shrinks."""
        self._exit.untie()
        self.pipeline.clear()
        self.scope = self.cycle = self._serving = self._line = None  # type: ignore[assignment]

    def _read(self, wait: Wait | None, seconds: float = 0.0) -> None:
        """From now on ``wait`` is what the peer has to send next."""
        if self._reads is not None:
            self._connections.done(self, self._reads)
        self._reads, self._turns = wait, self._turns + 1
        if wait is not None:
            self._connections.wait(self, wait, seconds)

    def _rest(self) -> None:
        """Until the next request: nothing of the last one is kept, for there may be thousands that rest."""
        self.tally.rest()
        self._connections.forget_head(self)
        self.url, self.headers = b"", []
        self.scope = self.cycle.scope = {}  # type: ignore[typeddict-item]
        self._rests_since = self._connections.time.now()
        self._read(Wait.IDLE, self._bounds.keep_alive_s)

    def _piece(self) -> int:
        return min(self._due, _BODY_PIECE) if self._due > 0 and not self.pipeline else _HEAD_PIECE

    def _feed(self, piece: memoryview) -> None:
        turns, reads = self._turns, self._reads
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            self._upgrade()
        except httptools.HttpParserError:
            if not self._leaving:
                self._refuse(*(self._refusal or ("malformed", InvalidRequest("This is not an HTTP request."))))
        else:
            if turns == self._turns or self.pipeline:
                self._count(reads, len(piece))

    def _count(self, reads: Wait | None, size: int) -> None:
        """``size`` more bytes of the same part of the same request, or of whatever is sent ahead."""
        tally = self.tally
        if self.pipeline or (reads is None and not self._leaving):
            if tally.ahead(size):
                self._refuse("ahead", None)
        elif reads is Wait.HEAD:
            if tally.head(size) or not self._connections.hold_head(self, tally.heads_bytes):
                self._refuse("head_bytes", HeadTooLarge(f"The head exceeds {self._bounds.head_bytes} bytes."))
        elif tally.framing(size):
            self._refuse("framing", InvalidRequest("The body is mostly chunk headers.", hint="Use larger chunks."))
        elif reads is not Wait.BODY and tally.unwanted():
            self._refuse("rest_bytes", None)

    def _stop(self, reason: str, error: RequestError | None) -> None:
        """Refuses from within the parser."""
        self._refusal = (reason, error)
        raise _Refused

    def _upgrade(self) -> None:
        """To another protocol, of which there is none here: the request is answered, the rest is not read."""
        self._connections.refusals.note("upgrade", "refused to upgrade a connection to another protocol")
        self._deaf = True
        self.cycle.keep_alive = False

    def _refuse(self, reason: str, error: RequestError | None, *, silent: bool = False) -> None:
        """Nothing more is read. What it asked before is answered; else ``error`` is its answer, where one can still be
        written, and what it goes on sending, unless it is ``silent``, is thrown away until it has read that."""
        self._connections.refusals.note(
            reason, f"refused a connection: {reason}" + (f": {error.message}" if error else "")
        )
        self._deaf = True
        cycle, receiving = self.cycle, self._reads in (Wait.BODY, Wait.REST)
        self._read(None)
        if cycle is not None and not cycle.response_complete and not receiving:
            cycle.keep_alive = False
        elif error is None or self.pipeline or self._leaving or (receiving and cycle.response_started):
            self._inner.abort()
        else:
            self._inner.write(raw_answer(error, self.server_state.default_headers))
            self._inner.write_eof()
            if cycle is not None:
                cycle.disconnected = True
                cycle.message_event.set()
            self._leaving = True
            self.flow.resume_reading()
            self._connections.wait(self, Wait.CLOSING, self._write_timeout_s())
            if silent:
                self._close()

    def _write_timeout_s(self) -> float:
        """How long the peer may take to read what was written."""
        waiting, bounds = self._inner.get_write_buffer_size(), self._bounds
        return bounds.stall_s + waiting / bounds.least_rate if waiting else bounds.closing_s

    def _close(self) -> None:
        self._deaf = True
        self._inner.close()
