"""Timers finer than an event loop's own, which round to milliseconds: sending on time needs a few microseconds.

On Linux a loop waits for a file descriptor of the kernel (timerfd), elsewhere for its own timer. Moments are those of
``time.perf_counter``, which is the kernel's monotonic clock there.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import heapq
import itertools
import os
import sys
import time
from collections.abc import Callable
from functools import partial

_MONOTONIC, _NONBLOCK_CLOEXEC, _ABSOLUTE = 1, os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0), 1
_SET_TIMER_SLACK = 29  # prctl: by default the kernel may be 50 us late, to save power


class _Spec(ctypes.Structure):
    _fields_ = (
        ("every_s", ctypes.c_long),
        ("every_ns", ctypes.c_long),
        ("at_s", ctypes.c_long),
        ("at_ns", ctypes.c_long),
    )


class _KernelTimer:
    """A timer of Linux. ``fileno`` becomes readable when it is due."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.prctl(_SET_TIMER_SLACK, 1000, 0, 0, 0)  # nanoseconds
        self.fileno = self._libc.timerfd_create(_MONOTONIC, _NONBLOCK_CLOEXEC)
        if self.fileno < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")

    def arm(self, due: float) -> None:
        ns = max(1, round(due * 1e9))
        spec = _Spec(at_s=ns // 1_000_000_000, at_ns=ns % 1_000_000_000)
        self._libc.timerfd_settime(self.fileno, _ABSOLUTE, ctypes.byref(spec), None)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):  # armed again since it was due
            os.read(self.fileno, 8)

    def close(self) -> None:
        os.close(self.fileno)


class Timers:
    """Calls at moments, in their order. Whoever has the loop for long calls :meth:`poll` in between. With ``lead_s`` it
    wakes so long before, and turns in circles until the moment: to wake takes some 50 us, which differ. Make it where
    the loop runs, and close it."""

    def __init__(self, *, lead_s: float = 0.0) -> None:
        self._loop = asyncio.get_running_loop()
        self._lead_s = lead_s
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._kernel = _KernelTimer() if sys.platform == "linux" else None
        self._handle: asyncio.TimerHandle | None = None
        if self._kernel is not None:
            self._loop.add_reader(self._kernel.fileno, self._rung)

    def at(self, due: float, call: Callable[[], None]) -> None:
        """Have ``call`` called at ``due``, or as soon as possible after it."""
        heapq.heappush(self._heap, (due, next(self._numbers), call))
        if self._heap[0][0] == due:
            self._arm()

    def poll(self) -> None:
        """Make the calls that are due."""
        heap = self._heap
        while heap and heap[0][0] <= time.perf_counter():
            heapq.heappop(heap)[2]()

    async def until(self, due: float) -> None:
        """Return at ``due``."""
        if due > time.perf_counter():
            future: asyncio.Future[None] = self._loop.create_future()
            self.at(due, partial(_wake, future))
            await future

    def close(self) -> None:
        self._heap.clear()
        if self._kernel is not None:
            self._loop.remove_reader(self._kernel.fileno)
            self._kernel.close()
        if self._handle is not None:
            self._handle.cancel()

    def _arm(self) -> None:
        due = self._heap[0][0] - self._lead_s
        if self._kernel is not None:
            self._kernel.arm(due)
            return
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_later(due - time.perf_counter(), self._rung)

    def _rung(self) -> None:
        if self._kernel is not None:
            self._kernel.clear()
        if self._heap and self._heap[0][0] - time.perf_counter() <= self._lead_s:
            while self._heap[0][0] > time.perf_counter():
                pass
        self.poll()
        if self._heap:
            self._arm()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
