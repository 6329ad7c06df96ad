"""How long a seat computes rows that come through shared memory.

The time of an exchange lasts from the arrival of its rows to its answers; the wait for rows is not part of it. On a CPU
each exchange is timed. A CUDA graph has two events around one exchange in the middle of the step, which stands for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch


class Watch(Protocol):
    """Times the exchanges of steps."""

    def around(self, exchange: int) -> AbstractContextManager[None]:
        """Time the block, which computes the exchange with this number in its step."""
        ...


class HostWatch:
    """Adds up in ``seconds`` what blocks take by the host's clock. Not thread-safe."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def around(self, exchange: int) -> Iterator[None]:  # noqa: ARG002  all are alike
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began


class GraphWatch:
    """Times one captured graph, a step with so many ``exchanges``."""

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
        """Return the seconds of all exchanges of the graph's last launch; 0 while it has not passed the timed one."""
        if not self._ended.query():  # type: ignore[no-untyped-call]
            return 0.0
        sampled_ms: float = self._began.elapsed_time(self._ended)
        return sampled_ms / 1e3 * self._exchanges


def _event() -> torch.cuda.Event:
    """Make an event that becomes a node of the graph it is recorded in, and is readable outside."""
    return torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]


class Occupied:
    """Converts the time of steps that run side by side into that of a seat that serves them one after the other.

    Between two calls of :meth:`add` a seat is busy for at most the time that has passed. The rest of its steps' time is
    that by which they slowed each other down: calls served one after the other would have waited so long. The caller
    holds a lock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at, self._total_s = clock(), 0.0
        self.busy_s = 0.0
        self.waited_s = 0.0

    def add(self, total_s: float) -> None:
        """Divide the time since the last call; ``total_s`` is the sum over all steps since the start."""
        now, spent_s = self._clock(), total_s - self._total_s
        busy_s = min(spent_s, now - self._at)
        self.busy_s += busy_s
        self.waited_s += spent_s - busy_s
        self._at, self._total_s = now, total_s
