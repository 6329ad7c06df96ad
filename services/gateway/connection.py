"""One connection of a client: uvicorn's HTTP protocol with bounds on everything that a peer can send, hold or leave.

In: bytes of any peer, before a key is checked. Out: requests for the app. A connection that exceeds a bound gets an
answer in OpenAI's shape where one can still be written, is counted by reason, and closed. uvicorn bounds none of this:
its parser keeps a field's value whole however long it grows, and nothing has a deadline before the first answer.
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
"""A head is parsed in pieces of this size, so its size is known to within one piece."""
_BODY_PIECE = 64 * 1024
"""A body of known length is parsed in pieces of this size; the last one ends where the body does, before any head."""


class _Refused(Exception):
    """Raised inside the parser's callbacks to stop it."""


class Connection(HttpToolsProtocol):
    """The protocol of one connection. ``spare`` says that its place is beyond the bound, where the app ``probes``
    answers."""

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
        self._reads: Wait | None = None  # HEAD, BODY, REST or IDLE; None: bytes that come before the last answer
        self._serving: RequestResponseCycle | None = None
        self._deaf = False  # whether incoming bytes are thrown away
        self._leaving = False
        self._given_up = False
        self._refusal: tuple[str, RequestError | None] | None = None
        self.tally = Tally(connections.bounds)
        self._rests_since = 0.0
        self._turns = 0  # changes of _reads
        self._due = 0  # bytes that are still to come of a body with a length

    # Called by the transport

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
            min_rate=bounds.min_rate,
        )
        self._connections.enter(self, spare=self._spare)
        self._read(Wait.HEAD, self._bounds.spare_head_s if self._spare else self._bounds.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.leave(self)
        self._deaf = self._leaving = True
        for cycle in (self.cycle, self._serving, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete and not cycle.disconnected:
                cycle.disconnected = True
                self._connections.notify_soon(cycle.message_event.set)
        self.cycle = None  # type: ignore[assignment] # uvicorn would notify it, the newest one alone, at once
        super().connection_lost(exc)
        self._untie()

    def data_received(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest and not self._deaf:
            size = min(self._due, _BODY_PIECE) if self._due > 0 and not self.pipeline else _HEAD_PIECE
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
        """Ends the connection because the server ends."""
        if self._leaving:
            self._close()
        else:
            super().shutdown()

    # Called by Connections and the server

    @property
    def unread(self) -> bool:
        """Whether bytes wait in the socket: closing it now would break a request that the client has sent."""
        return unread(self._inner)

    @property
    def paused(self) -> bool:
        return bool(self.flow.read_paused)

    @property
    def waited_s(self) -> float:
        """How long the connection has waited for another request; -1: it does not wait, or had no request yet."""
        return self._connections.time.now() - self._rests_since if self._reads is Wait.IDLE else -1.0

    @property
    def stays(self) -> bool:
        """Whether the connection outlives the answer whose head it has sent. It does not once its client has sent a
        part of something else, for that may never become a request."""
        cycle = self._serving
        if cycle is None or not cycle.response_started or self.transport.is_closing():
            return False
        return bool(cycle.keep_alive and (not cycle.response_complete or self._reads is Wait.IDLE))

    def expire(self, wait: Wait) -> None:
        if wait is Wait.HEAD:
            self._refuse("head_late", RequestTimedOut("The request's headers took too long to arrive."), silent=True)
        elif wait is Wait.BODY:
            self._refuse(
                "body_late",
                RequestTimedOut("The request's body took too long to arrive.", hint="Send it faster."),
                silent=True,
            )
        elif wait is Wait.IDLE:
            self.leave()  # regularly: the client did nothing wrong
        elif not self._given_up:  # an answer and Connections both watch the deadline
            self._given_up = True
            if wait is not Wait.CLOSING:  # its reason was noted before
                self._connections.refusals.note(f"{wait.value}_late", f"closed a connection: timed out ({wait.value})")
            self._inner.abort()

    def give_way(self) -> None:
        self._inner.abort()

    def leave(self) -> None:
        """Closes once the whole request has come and the peer has the answer, both within bounds. Closing earlier would
        make the peer's kernel drop the answer."""
        if self._leaving:
            return
        self._leaving = True
        if self._reads in (Wait.BODY, Wait.REST):
            self.flow.resume_reading()
        else:
            self._close()
        self._read(None)
        self._connections.wait(self, Wait.CLOSING, self._write_timeout_s())

    # Called by the parser

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
        if self._reads is Wait.HEAD:  # else it is a trailer, which is ignored
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
            self.flow.resume_reading()  # to notice when the peer leaves; bytes sent ahead are bounded
        else:
            self._serving = self.cycle
            if length != 0:
                self.flow.pause_reading()  # until the app asks for it
        allowed = self._bounds.body_bytes if length is None else min(length, self._bounds.body_bytes)
        self._read(Wait.BODY, self._bounds.body_s + allowed / self._bounds.min_rate)

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

    # Called by the app

    def on_response_complete(self) -> None:
        done = self._serving
        if self.pipeline:
            self._serving = self.pipeline[-1][0]
        super().on_response_complete()
        self._unset_keepalive_if_required()  # it would fire late after the process stood still: see Connections
        if done is not None:
            done.body = bytearray()  # drops unread bytes
        if self._leaving or self.transport.is_closing():
            return
        if self._reads is Wait.BODY and self.cycle is done:
            self._read(Wait.REST, self._bounds.body_s)
        elif self._reads is None and self.cycle.response_complete:
            self._rest()

    # Inside

    def _untie(self) -> None:
        """Drops all references back to this object, so that it is freed at once. Thousands that wait for the garbage
        collector would keep memory fragmented, and the process would never shrink."""
        self._exit.untie()
        self.pipeline.clear()
        self.scope = self.cycle = self._serving = self._line = None  # type: ignore[assignment]

    def _read(self, wait: Wait | None, seconds: float = 0.0) -> None:
        """Notes that the peer has to send ``wait`` next, within ``seconds``."""
        if self._reads is not None:
            self._connections.done(self, self._reads)
        self._reads, self._turns = wait, self._turns + 1
        if wait is not None:
            self._connections.wait(self, wait, seconds)

    def _rest(self) -> None:
        """Waits for the next request. Nothing of the last one is kept, for thousands of connections may be idle."""
        self.tally.rest()
        self._connections.forget_head(self)
        self.url, self.headers = b"", []
        self.scope = self.cycle.scope = {}  # type: ignore[typeddict-item]
        self._rests_since = self._connections.time.now()
        self._read(Wait.IDLE, self._bounds.keep_alive_s)

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
        """Counts ``size`` more bytes of the same part of the same request, or of bytes that are sent ahead."""
        tally = self.tally
        if self.pipeline or (reads is None and not self._leaving):
            if tally.ahead(size):
                self._refuse("ahead", None)
        elif reads is Wait.HEAD:
            if tally.head(size) or not self._connections.hold_head(self, tally.heads_bytes):
                self._refuse(
                    "head_bytes", HeadTooLarge(f"The request's headers exceed {self._bounds.head_bytes} bytes.")
                )
        elif tally.framing(size):
            self._refuse("framing", InvalidRequest("The body is mostly chunk headers.", hint="Use larger chunks."))
        elif reads is not Wait.BODY and tally.unwanted():
            self._refuse("rest_bytes", None)

    def _stop(self, reason: str, error: RequestError | None) -> None:
        """Refuses from within the parser."""
        self._refusal = (reason, error)
        raise _Refused

    def _upgrade(self) -> None:
        """Refuses to change to another protocol: the request is answered, the rest is not read."""
        self._connections.refusals.note("upgrade", "refused an upgrade to another protocol")
        self._deaf = True
        self.cycle.keep_alive = False

    def _refuse(self, reason: str, error: RequestError | None, *, silent: bool = False) -> None:
        """Stops reading. A request that came whole is answered; otherwise ``error`` is the answer, where one can still
        be written. Later bytes of a peer that is not ``silent`` are thrown away until it has read the answer."""
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
        """Returns how long the peer may take to read the written bytes."""
        waiting, bounds = self._inner.get_write_buffer_size(), self._bounds
        return bounds.stall_s + waiting / bounds.min_rate if waiting else bounds.closing_s

    def _close(self) -> None:
        self._deaf = True
        self._inner.close()
