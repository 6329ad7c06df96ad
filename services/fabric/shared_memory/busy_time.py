"""How long a seat computes rows that come through shared memory: its steps run where the host does not look.

From when an exchange's rows are there to when its answers are, without the wait for rows. On a CPU each exchange is
timed. In a graph two events are, around one exchange in the middle of the step, which stands for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch


class Watch(Protocol):
    def around(self, exchange: int) -> AbstractContextManager[None]:
        """Stands around the work of an exchange, by its number in the step."""
        ...


class HostWatch:
    """For one thread. ``seconds``: since the start."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def around(self, exchange: int) -> Iterator[None]:  # noqa: ARG002  all are alike
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began


class GraphWatch:
    """Of one captured graph, a step with so many ``exchanges``."""

    def __init__(self, exchanges: int) -> None:
        self._exchanges = exchanges
        self._began, self._ended = _event(), _event()

    @contextmanager
    def around(self, exchange: int) -> Iterator[None]:
        sampled = exchange == self._exchanges // 2
        if sampled:
            self._began.record()
        yield
        if sampled:
            self._ended.record()

    def read(self) -> float:
        """Seconds of all exchanges of the graph's last launch; 0 while that has not come so far."""
        if not self._ended.query():  # type: ignore[no-untyped-call]
            return 0.0
        sampled_ms: float = self._began.elapsed_time(self._ended)
        return sampled_ms / 1e3 * self._exchanges


def _event() -> torch.cuda.Event:
    """A node of the graph it is recorded in, and readable outside."""
    return torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]


class Occupied:
    """Time in steps of several attention workers, which run side by side, as a seat's that serves one after the other.

    Between two readings a seat is busy at most all the time; what its steps took in addition, they took because of one
    another: so long calls would have waited. From any thread that holds the same lock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at, self._total_s = clock(), 0.0
        self.busy_s = 0.0
        self.waited_s = 0.0

    def add(self, total_s: float) -> None:
        """``total_s``: of all steps since the start."""
        now, spent_s = self._clock(), total_s - self._total_s
        busy_s = min(spent_s, now - self._at)
        self.busy_s += busy_s
        self.waited_s += spent_s - busy_s
        self._at, self._total_s = now, total_s
