"""The attention worker's end of one seat: connects, proves the connection, reconnects, matches answers with calls.

Legend: N rows of an answer, D hidden size.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from services.errors import (
    BadAnswer,
    CallFailed,
    ExpertMeshError,
    LaneFailed,
    SeatLeaving,
    SeatLost,
    WireError,
)
from services.fabric.nccl_lane import Shipment
from services.fabric.nccl_setup import Lanes
from services.fabric.tcp_connect import Facts, connect, prove, seat_name
from services.fabric.tcp_handshake import Hello
from services.fabric.tcp_peer import Peer, soon
from services.fabric.tcp_wire import (
    DTYPES,
    Answer,
    Dispatch,
    Failed,
    Frame,
    Kind,
    message_of,
)
from services.routing import Seat

log = logging.getLogger(__name__)

_FIRST_BACKOFF_S, _MOST_BACKOFF_S = 0.05, 2.0
_WITHOUT_LANE_S = 60.0
"""After a lane could not be made: how long rows go in frames before the next attempt."""


@dataclass(kw_only=True, slots=True, eq=False)
class Call:
    """One sending of some rows to one replica. ``outcome`` is set once, under the link's condition."""

    seat: SeatLink
    connection: int
    rows: int
    answer_rows: int
    deadline: float
    outcome: Tensor | ExpertMeshError | None = None
    finite: bool = True
    abandoned: bool = False
    shipment: Shipment | None = None


@dataclass(slots=True)
class _Connection:
    peer: Peer
    theirs: Hello
    calls: dict[int, Call] = field(default_factory=dict)
    lost: dict[int, Call] = field(default_factory=dict)
    """Calls that it took with it: their rows may be in the sender's hands until the connection is closed."""


class Rider(Protocol):
    """What else goes over a seat's connection. Called in the seat's thread, ``busy`` under the link's condition."""

    def opened(self, seat: SeatLink, peer: Peer) -> None: ...

    def take(self, seat: SeatLink, frame: Frame) -> bool:
        """Whether the frame was for it."""
        ...

    def lost(self, seat: SeatLink) -> None: ...

    def busy(self, seat: SeatLink) -> bool:
        """Whether the connection is needed although no call is in flight."""
        ...


class SeatLink:
    """A thread that keeps one seat connected until it is retired or closed.

    ``changed`` guards all of it; whoever calls :meth:`usable`, :meth:`send` or :meth:`retire` holds it.
    """

    def __init__(self, seat: Seat, facts: Facts, changed: threading.Condition, rider: Rider | None = None) -> None:
        self.seat = seat
        self._rider = rider
        self.outstanding_rows = 0
        """Sent and not answered, those of abandoned calls included: the worker computes them all the same."""
        self.connections = 0
        self.quarantined_until = 0.0
        self.problem: ExpertMeshError | None = None
        """Why it is not connected."""
        self._facts = facts
        self._changed = changed
        self._connection: _Connection | None = None
        self._leaving = False
        self._retire_by: float | None = None
        self._no_lane_until = 0.0
        self._stop = threading.Event()
        self._ids = itertools.count(1)
        self._thread = threading.Thread(target=self._run, name=f"seat {seat.number}", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return seat_name(self.seat)

    @property
    def usable(self) -> bool:
        """Connected and proven, and not about to leave. It may be in quarantine."""
        return self._connection is not None and not self._leaving and self._retire_by is None

    @property
    def lane(self) -> bool:
        """Whether rows go from device to device."""
        return self._connection is not None and self._connection.peer.lane is not None

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def most_rows(self, bytes_per_row: int) -> int:
        """The largest call that the worker takes and may answer; 0 while it is not connected."""
        if self._connection is None:
            return 0
        theirs = self._connection.theirs
        room = min(theirs.max_bytes, self._facts.max_bytes) // max(1, bytes_per_row)
        return max(1, min(theirs.max_rows, room))

    def send(
        self, dispatch: Dispatch, tensors: Sequence[Tensor], x_RD: Tensor, answer_rows: int, deadline: float
    ) -> Call:
        """Queue a call; ``dispatch.call`` is filled in. Only while :attr:`usable`."""
        assert self._connection is not None
        number = next(self._ids)
        call = Call(
            seat=self, connection=self.connections, rows=dispatch.rows, answer_rows=answer_rows, deadline=deadline
        )
        self._connection.calls[number] = call
        self.outstanding_rows += call.rows
        dispatch = msgspec.structs.replace(dispatch, call=number)
        call.shipment = self._connection.peer.send(Kind.DISPATCH, dispatch, tensors, rows=x_RD)
        return call

    def retire(self, by: float) -> None:
        """Take no new calls, and close when those in flight have ended, at the monotonic time ``by`` at the latest."""
        self._retire_by = by
        if self._connection is None or not self._busy(self._connection):
            self.shut()

    def shut(self) -> None:
        """End the connection and do not connect again."""
        self._stop.set()
        if self._connection is not None:
            self._connection.peer.shut()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def _run(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while not self._stop.is_set():
            before = self.connections
            try:
                self._converse()
            except Exception as error:  # the thread's boundary: whatever it was, it connects again
                if not isinstance(error, ExpertMeshError | OSError):
                    log.exception("The connection to %s failed.", self.name)
                self._tell(self._typed(error))
            backoff_s = _FIRST_BACKOFF_S if self.connections > before else min(2 * backoff_s, _MOST_BACKOFF_S)
            self._stop.wait(backoff_s)

    def _typed(self, error: Exception) -> ExpertMeshError:
        if isinstance(error, ExpertMeshError):
            return error
        if isinstance(error, OSError):
            return SeatLost(f"Cannot reach {self.name}: {error}.")
        return SeatLost(f"{self.name}: {type(error).__name__}: {error}")

    def _tell(self, problem: ExpertMeshError) -> None:
        with self._changed:
            new = self.problem is None or self.problem.message != problem.message
            self.problem = problem
        if new and not self._stop.is_set():
            log.warning("No connection to %s: %s", self.name, problem)

    def _converse(self) -> None:
        facts = self._facts
        if facts.lanes is not None and not facts.lanes.required and time.monotonic() < self._no_lane_until:
            facts = dataclasses.replace(facts, lanes=None)
        peer, theirs = connect(self.seat, facts)
        try:
            prove(peer, facts.timing.handshake_s)
            if facts.lanes is not None and facts.lanes.agreed(theirs, self.name):
                self._join_lane(peer, facts.lanes)
            connection = _Connection(peer, theirs)
            if self._open(connection):
                if self._rider is not None:
                    self._rider.opened(self, peer)
                self._follow(connection)
        finally:
            peer.close()

    def _join_lane(self, peer: Peer, lanes: Lanes) -> None:
        try:
            lanes.join(peer)
        except LaneFailed:
            self._no_lane_until = soon(_WITHOUT_LANE_S)
            raise

    def _open(self, connection: _Connection) -> bool:
        with self._changed:
            if self._stop.is_set():
                return False
            self._connection, self._leaving, self.problem = connection, False, None
            self.connections += 1
            self._changed.notify_all()
            return True

    def _follow(self, connection: _Connection) -> None:
        try:
            while True:
                self._take(connection, connection.peer.receive())
        except Exception as error:
            self._lose(connection, self._typed(error))  # else its calls would wait, and it would be given more
            raise

    def _take(self, connection: _Connection, frame: Frame) -> None:
        match frame.kind:
            case Kind.ANSWER:
                self._take_answer(connection, message_of(frame, Answer), frame.payload)
            case Kind.FAILED:
                self._fail(connection, message_of(frame, Failed))
            case Kind.LEAVING:
                self._set_leaving()
            case Kind.ALIVE:
                with self._changed:
                    self._close_if_retired(connection)
            case _ if self._rider is None or not self._rider.take(self, frame):
                raise WireError(f"{self.name} sent {frame.kind.name}, which no attention worker takes.")

    def _take_answer(self, connection: _Connection, answer: Answer, payload: Tensor) -> None:
        hidden, dtype = self._facts.hello.hidden, DTYPES[self._facts.hello.dtype]
        with connection.peer.reading():
            came_ND = connection.peer.receive_rows(answer.rows, hidden, dtype)
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

    def _fail(self, connection: _Connection, failed: Failed) -> None:
        if failed.code == SeatLeaving.code:
            self._set_leaving()
            self._end(connection, failed.call, SeatLeaving(failed.message))
        else:
            self._end(connection, failed.call, CallFailed(failed.message))

    def _end(self, connection: _Connection, number: int, outcome: Tensor | ExpertMeshError) -> None:
        """An answer that nobody waits for any more, or that was never asked for, ends here."""
        finite = not isinstance(outcome, Tensor) or bool(outcome.isfinite().all())
        with self._changed:
            if (call := connection.calls.pop(number, None)) is None:
                return
            self.outstanding_rows -= call.rows
            call.outcome, call.finite = outcome, finite
            self._close_if_retired(connection)
            self._changed.notify_all()

    def _lose(self, connection: _Connection, error: ExpertMeshError) -> None:
        if self._rider is not None:
            self._rider.lost(self)
        with self._changed:
            self._connection = None
            for call in connection.calls.values():
                call.outcome = SeatLost(f"{self.name} was lost: {error.message}")
            connection.calls, connection.lost = {}, connection.calls
            self.outstanding_rows = 0
            if self._retire_by is not None:
                self._stop.set()
            self._changed.notify_all()

    def _set_leaving(self) -> None:
        with self._changed:
            self._leaving = True
            self._changed.notify_all()

    def _close_if_retired(self, connection: _Connection) -> None:
        if self._retire_by is not None and (not self._busy(connection) or time.monotonic() >= self._retire_by):
            self.shut()

    def _busy(self, connection: _Connection) -> bool:
        rider_busy = self._rider is not None and self._rider.busy(self)
        return rider_busy or any(not call.abandoned for call in connection.calls.values())
