"""The attention worker's end of one seat: connects, proves the connection, reconnects, matches answers to calls.

Legend: N rows of an answer, D hidden size.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import torch
from torch import Tensor

from services.errors import BadAnswer, CallFailed, ExpertMeshError, LaneFailed, SeatLeaving, SeatLost, WireError
from services.fabric.faults import named
from services.fabric.tcp.calls import Call, Connection
from services.fabric.tcp.connect import Facts, connect, prove, seat_name
from services.fabric.tcp.extension import ClientExtension, Transports
from services.fabric.tcp.frames import DTYPES, Answer, Dispatch, Failed, Frame, Kind, message_of
from services.fabric.tcp.peer import deadline_in
from services.routing import Seat

log = logging.getLogger(__name__)

_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.05, 2.0
LANE_LATER_S = 10.0
"""Minimum age of a seat before its lane is opened, where an extension carries small calls.

The lane is then opened for the first call that the extension does not carry, and one lane at a time: opening keeps both
GPUs busy for seconds, and a new seat may be the only one of its group."""
_WITHOUT_LANE_S = 60.0
"""How long rows go in frames after a lane could not be opened, before the next attempt."""


class SeatLink:
    """Keeps one seat connected, in a thread of its own, until it is retired or shut.

    The condition ``changed`` guards all fields; callers of properties, :meth:`send` and :meth:`retire` hold it.
    """

    def __init__(
        self, seat: Seat, facts: Facts, changed: threading.Condition, extension: ClientExtension | None = None
    ) -> None:
        self.seat, self.name = seat, seat_name(seat)
        self._extension = extension
        self.outstanding_rows = 0
        """Rows sent and not answered. Abandoned calls count, too: the worker computes them all the same."""
        self.turn = 0.0
        """Calls sent divided by the seat's speed, counted from the turn of its group when the seat came."""
        self.connections = 0
        self.quarantined_until = 0.0
        self.problem: ExpertMeshError | None = None
        """The reason why the seat is not connected."""
        self._facts = facts
        self._changed = changed
        self._connection: Connection | None = None
        self._since = time.monotonic()
        self._leaving = False
        self._retire_by: float | None = None
        self._lane_required = facts.lanes is not None and facts.lanes.required
        self._no_lane_until = 0.0
        self._stop = threading.Event()
        self._ids = itertools.count(1)
        self._thread = threading.Thread(target=self._run, name=f"seat {seat.number}", daemon=True)
        self._thread.start()

    @property
    def usable(self) -> bool:
        """Whether the seat is connected and proven, and not about to leave. It may be in quarantine."""
        if self._connection is None or self._leaving or self._retire_by is not None:
            return False
        return self.lane or not self._lane_required

    @property
    def lane(self) -> bool:
        """Whether rows go from device to device."""
        return self._connection is not None and self._connection.peer.lane is not None

    @property
    def awaits_lane(self) -> bool:
        """Whether a lane is being opened, and rows go in frames meanwhile: another replica may be faster."""
        return self._connection is not None and self._connection.attempt is not None and not self.lane

    @property
    def busy(self) -> bool:
        """Whether a call waits for its answer, or a step of the extension uses the seat."""
        return self._connection is not None and self._busy(self._connection)

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def max_rows(self, bytes_per_row: int) -> int:
        """Return the number of rows in the largest call that the worker takes and answers; 0 while not connected."""
        if self._connection is None:
            return 0
        theirs = self._connection.theirs
        room = min(theirs.max_bytes, self._facts.max_bytes) // max(1, bytes_per_row)
        return max(1, min(theirs.max_rows, room))

    def send(
        self, dispatch: Dispatch, tensors: Sequence[Tensor], x_RD: Tensor, answer_rows: int, deadline: float
    ) -> Call:
        """Queue a call while :attr:`usable`; the call's number is filled in. ``deadline`` is of the monotonic clock.

        The rows ``x_RD`` follow ``tensors`` in the payload, or go by the lane if there is one and they are many.
        """
        assert self._connection is not None
        number = next(self._ids)
        call = Call(connection=self.connections, rows=dispatch.rows, answer_rows=answer_rows, deadline=deadline)
        self._connection.calls[number] = call
        self.outstanding_rows += call.rows
        worth = self._worth_lane(max(dispatch.rows, answer_rows))
        if worth and not self._carried(dispatch.rows):
            self._connection.lane_wanted = True
        by_lane = self.lane and worth
        dispatch = msgspec.structs.replace(dispatch, call=number, lane=by_lane)
        call.shipment = self._connection.peer.send(Kind.DISPATCH, dispatch, tensors, rows=x_RD, by_lane=by_lane)
        return call

    def _worth_lane(self, rows: int) -> bool:
        hello, lanes = self._facts.hello, self._facts.lanes
        return lanes is not None and rows * hello.hidden * DTYPES[hello.dtype].itemsize >= lanes.least_bytes

    def retire(self, by: float) -> None:
        """Take no new calls, and close when calls in flight have ended, or at the monotonic time ``by``."""
        self._retire_by = by
        if not self.busy:
            self.shut()

    def shut(self) -> None:
        """End the connection and do not connect again."""
        self._stop.set()
        if self._connection is not None:
            self._connection.peer.shut()

    def join(self, seconds: float) -> None:
        """Wait for the thread's end, ``seconds`` at most."""
        self._thread.join(seconds)

    def _run(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while not self._stop.is_set():
            before, no_lane = self.connections, False
            try:
                self._converse()
            except Exception as error:  # the thread's boundary: it reconnects after any error
                no_lane = isinstance(error, LaneFailed)
                self._facts.faults.ended_by(error)
                if not isinstance(error, ExpertMeshError | OSError):
                    log.exception("the connection to %s failed", self.name)
                self._note_problem(self._typed(error))
            fine = self.connections > before and not no_lane
            backoff_s = _FIRST_BACKOFF_S if fine else min(2 * backoff_s, _MAX_BACKOFF_S)
            self._stop.wait(backoff_s)

    def _typed(self, error: Exception) -> ExpertMeshError:
        if isinstance(error, ExpertMeshError):
            return error
        if isinstance(error, OSError):
            return SeatLost(f"Cannot reach {self.name}: {error}.")
        return SeatLost(f"{self.name}: {type(error).__name__}: {error}")

    def _note_problem(self, problem: ExpertMeshError) -> None:
        with self._changed:
            new = self.problem is None or self.problem.message != problem.message
            self.problem = problem
        if new and not self._stop.is_set():
            log.warning("%s", named(self.name, problem))

    def _converse(self) -> None:
        facts = self._facts
        if not self._lane_required and time.monotonic() < self._no_lane_until:
            facts = dataclasses.replace(facts, lanes=None)
        peer, theirs = connect(self.seat, facts)
        try:
            prove(peer, facts.timing.handshake_s)
            lanes = facts.lanes if facts.lanes is not None and facts.lanes.agreed(theirs, self.name) else None
            self._use(Connection(peer, theirs), lanes)
        finally:
            peer.close()

    def _use(self, connection: Connection, lanes: Transports | None) -> None:
        try:
            if lanes is not None:
                connection.lane_wanted = self._lane_required or not self._carried(1)
                connection.lane_from = lanes, 0.0 if connection.lane_wanted else self._since + LANE_LATER_S
                self._maybe_open_lane(connection)
            if self._open(connection):
                self._follow(connection)
        finally:
            if connection.attempt is not None:
                connection.attempt.cancel()

    def _open(self, connection: Connection) -> bool:
        with self._changed:
            if self._stop.is_set():
                return False
            self._connection, self._leaving = connection, False
            self.connections += 1
            self._note_usable()
            return True

    def _note_usable(self) -> None:
        with self._changed:
            if self.usable:
                self.problem = None
            self._changed.notify_all()

    def _follow(self, connection: Connection) -> None:
        try:
            if self._extension is not None:
                self._extension.opened(self, connection.peer)
            while True:
                self._take(connection, connection.peer.receive())
        except Exception as error:
            self._lose(connection, self._typed(error))  # else its calls would wait, and the seat would get more
            raise

    def _maybe_open_lane(self, connection: Connection) -> None:
        """Open a lane if it is time; each frame calls this, so at least every sign of life."""
        if connection.lane_from is None or not connection.lane_wanted:
            return
        lanes, since = connection.lane_from
        with self._changed:
            ending = self._leaving or self._retire_by is not None or self._stop.is_set()
        if ending or deadline_in(0) < since:
            return
        with self._lane_may_fail(connection):
            connection.attempt = lanes.approach(connection.peer, self._note_usable, alone=since > 0)
            if connection.attempt is None:
                return
        connection.lane_from = None

    def _carried(self, rows: int) -> bool:
        return self._extension is not None and self._extension.carries(self, rows)

    @contextmanager
    def _lane_may_fail(self, connection: Connection) -> Iterator[None]:
        """Let rows stay in frames if the block raises LaneFailed; if a lane is required, the connection ends."""
        try:
            yield
        except LaneFailed as error:
            attempt, connection.attempt = connection.attempt, None
            self._no_lane_until = deadline_in(_WITHOUT_LANE_S)
            if attempt is not None:
                attempt.give_up(error)
            if self._lane_required:
                raise
            log.warning("sending rows over TCP: %s", error)

    def _take(self, connection: Connection, frame: Frame) -> None:
        self._maybe_open_lane(connection)
        if connection.attempt is not None:
            with self._lane_may_fail(connection):
                if connection.attempt.over(frame):
                    connection.attempt = None
        match frame.kind:
            case Kind.LANE if self._facts.lanes is not None:
                pass  # an attempt has taken it, or is over
            case Kind.ANSWER:
                self._take_answer(connection, message_of(frame, Answer), frame.payload)
            case Kind.FAILED:
                self._fail(connection, message_of(frame, Failed))
            case Kind.LEAVING:
                self._set_leaving()
            case Kind.ALIVE:
                with self._changed:
                    self._close_if_retired(connection)
            case _ if self._extension is None or not self._extension.take(self, frame):
                raise WireError(f"{self.name} sent {frame.kind.name}, which attention workers do not accept.")

    def _take_answer(self, connection: Connection, answer: Answer, payload: Tensor) -> None:
        hidden, dtype = self._facts.hello.hidden, DTYPES[self._facts.hello.dtype]
        with connection.peer.reading():
            came_ND = connection.peer.receive_rows(answer.rows, hidden, dtype) if answer.lane else None
            payload = payload if came_ND is None else came_ND.view(-1).view(torch.uint8)
            if (call := connection.calls.get(answer.call)) is not None:
                self._end(connection, answer.call, self._rows_of(answer, payload, call))

    def _rows_of(self, answer: Answer, payload: Tensor, call: Call) -> Tensor | BadAnswer:
        hidden, name = self._facts.hello.hidden, self._facts.hello.dtype
        expected = call.answer_rows * hidden * DTYPES[name].itemsize
        if (answer.rows, answer.dtype, len(payload)) != (call.answer_rows, name, expected):
            return BadAnswer(
                f"{self.name} answered {answer.rows} rows of {answer.dtype} in {len(payload)} bytes "
                f"instead of {call.answer_rows} of {name} in {expected}.",
                hint="Do both sides run the same version?",
            )
        return payload.view(DTYPES[name]).view(answer.rows, hidden)

    def _fail(self, connection: Connection, failed: Failed) -> None:
        if failed.code == SeatLeaving.code:
            self._set_leaving()
            self._end(connection, failed.call, SeatLeaving(failed.message))
        else:
            self._end(connection, failed.call, CallFailed(failed.message))

    def _end(self, connection: Connection, number: int, outcome: Tensor | ExpertMeshError) -> None:
        """Set the call's outcome; drop an answer that belongs to no call in flight."""
        finite = not isinstance(outcome, Tensor) or bool(outcome.isfinite().all())
        with self._changed:
            if (call := connection.calls.pop(number, None)) is None:
                return
            self.outstanding_rows -= call.rows
            call.outcome, call.finite = outcome, finite
            self._close_if_retired(connection)
            self._changed.notify_all()

    def _lose(self, connection: Connection, error: ExpertMeshError) -> None:
        if self._extension is not None:
            self._extension.lost(self)
        with self._changed:
            self._connection = None
            for call in connection.calls.values():
                call.outcome = SeatLost(named(self.name, error))
            connection.calls, connection.lost = {}, connection.calls
            self.outstanding_rows = 0
            if self._retire_by is not None:
                self._stop.set()
            self._changed.notify_all()

    def _set_leaving(self) -> None:
        with self._changed:
            self._leaving = True
            self._changed.notify_all()

    def _close_if_retired(self, connection: Connection) -> None:
        if self._retire_by is not None and (not self._busy(connection) or time.monotonic() >= self._retire_by):
            self.shut()

    def _busy(self, connection: Connection) -> bool:
        extension_busy = self._extension is not None and self._extension.busy(self)
        return extension_busy or any(not call.abandoned for call in connection.calls.values())
