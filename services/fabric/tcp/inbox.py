"""Calls that wait for the experts of one worker: bounded in rows, in the order of arrival, joined by layer.

A thread that puts a call waits for room and reads nothing from its connection meanwhile: that is the back-pressure.
Legend: R rows of a call, D hidden size, K slots per row.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from services.fabric.tcp.frames import TracedDispatch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call:
    """One dispatch: ``ids_RK`` int32, ``weights_RK`` float32. ``answer`` takes the result or the error.
    ``traced`` is the call's message where that has a trace; it came at ``came_ns``."""

    layer: int
    reduced: bool
    x_RD: Tensor
    ids_RK: Tensor
    weights_RK: Tensor
    answer: Callable[[Tensor | Exception], None]
    traced: TracedDispatch | None = None
    came_ns: int = 0

    @property
    def rows(self) -> int:
        return self.x_RD.shape[0]

    def joins(self, other: Call) -> bool:
        """Return whether one computation can serve both calls."""
        same = (self.layer, self.reduced, self.x_RD.device) == (other.layer, other.reduced, other.x_RD.device)
        return same and (not self.reduced or self.ids_RK.shape[1] == other.ids_RK.shape[1])


class Inbox:
    """A bounded queue of calls. Thread-safe.

    Args:
        rows: largest number in flight, from :meth:`put` to :meth:`release`; a call with more rows goes in alone.
        join_rows: largest number for one computation of several calls.
    """

    def __init__(self, rows: int, join_rows: int) -> None:
        assert rows > 0
        assert join_rows > 0
        self._rows = rows
        self._join_rows = join_rows
        self._changed = threading.Condition()
        self._line: deque[Call] = deque()
        self._waiting: deque[Call] = deque()
        self._in_flight: set[Call] = set()
        self._closed = False
        self._waited_s, self._looked_at = 0.0, time.monotonic()
        self.rows_in_flight = 0
        """Rows accepted and not yet answered."""

    @property
    def waited_s(self) -> float:
        """Seconds that calls have waited before they were computed, added up over all calls."""
        with self._changed:
            self._add_waits()
            return self._waited_s

    def put(self, call: Call) -> bool:
        """Wait for room, first come first served, and queue ``call``; return False if the inbox was closed instead."""
        with self._changed:
            self._add_waits()
            self._line.append(call)
            self._changed.wait_for(lambda: self._closed or (self._line[0] is call and self._fits(call)))
            self._add_waits()
            self._line.remove(call)
            if self._closed:
                return False
            self._waiting.append(call)
            self._in_flight.add(call)
            self.rows_in_flight += call.rows
            self._changed.notify_all()
            return True

    def take(self) -> list[Call]:
        """Wait for a call and take it, with calls that :meth:`Call.joins` allows, up to ``join_rows``; [] once closed.

        There is no barrier: a call is served whatever other attention workers do (ExpertFlow, section 3.2).
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting)
            self._add_waits()
            if self._closed:
                return []
            taken, rows = [first := self._waiting.popleft()], 0
            rows += first.rows
            for call in [call for call in self._waiting if call.joins(first)]:
                if rows + call.rows > self._join_rows:
                    break
                self._waiting.remove(call)
                taken.append(call)
                rows += call.rows
            return taken

    def release(self, call: Call) -> None:
        """Give back the room of ``call``, whose answer was sent or has no receiver. A second call does nothing."""
        with self._changed:
            if call in self._in_flight:
                self._in_flight.remove(call)
                self.rows_in_flight -= call.rows
                self._changed.notify_all()

    def wait_idle(self, seconds: float) -> bool:
        """Return whether no call was waiting or in flight at some moment within ``seconds``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._in_flight and not self._line, seconds)

    def close(self) -> None:
        """End every wait; calls that wait are not computed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _add_waits(self) -> None:
        """Add up the time since the last change of what waits. Call this before the next change."""
        now = time.monotonic()
        self._waited_s += (now - self._looked_at) * (len(self._line) + len(self._waiting))
        self._looked_at = now

    def _fits(self, call: Call) -> bool:
        return not self._in_flight or self.rows_in_flight + call.rows <= self._rows
