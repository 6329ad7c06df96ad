"""ExpertLink: the seam between attention and experts. Rows of hidden states go out, their combined outputs come back.

Legend: T rows, D hidden size, K experts chosen per row.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from services.routing import RoutingTable

HandleT = TypeVar("HandleT")
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(x_TD, expert_ids_TK, weights_TK) -> y_TD``: all experts of one layer held here; -1 in the ids is skipped."""


class ExpertLink(Protocol[HandleT]):
    """Moves rows to the experts of a layer and brings back their weighted sum.

    A step is one ``begin_step``, its exchanges and one ``finish_step``; where ``finish_step`` returns False the caller
    begins the same step again. Exactly one ``combine`` of its handle follows each ``dispatch``. Two handles may be in
    flight at once, and may be combined in either order (ping-pong micro-batches).
    """

    @property
    def transport(self) -> str:
        """What carries the rows of the step in progress, as a label of series."""
        ...

    def begin_step(self, step: int, rows: Sequence[int]) -> None:
        """Begin a step, whose exchanges follow layer by layer and, within a layer, by micro-batch.

        Args:
            step: number of the step, for logs and frames.
            rows: rows of each micro-batch; () where they are not known, or where not all layers follow.
        """
        ...

    def graph_key(self) -> Hashable | None:
        """Return the key of the CUDA graph that may be replayed in place of the exchanges of the step just begun.

        Such a graph was captured in a ``capture_context`` that gave an equal key, with as many rows, as one
        micro-batch. The key is None where the exchanges need the host.
        """
        ...

    def capture_context(self, rows: int) -> AbstractContextManager[Hashable | None]:
        """Let the exchanges of one micro-batch of ``rows`` be captured inside; no row reaches any expert.

        Call it between steps. The context gives the key for :meth:`graph_key`, or None where exchanges of so many rows
        cannot be captured.
        """
        ...

    def finish_step(self) -> bool:
        """Return whether the sums that ``combine`` returned in this step are valid. May wait for the device.

        Raises:
            ExpertUnavailable: they are not, and running the step again has not helped for long enough.
        """
        ...

    def dispatch(self, layer: int, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> HandleT:
        """Send each row to its experts; return at once where the implementation can overlap.

        Args:
            layer: index of the decoder layer, counted over all layers.
            x_TD: rows, in the model's dtype. Nobody may write to them before ``combine``.
            expert_ids_TK: int64, distinct within a row; -1 marks a slot that no expert takes.
            weights_TK: float32.
        """
        ...

    def combine(self, handle: HandleT) -> Tensor:
        """Return ``y_TD``, in the dtype of ``x_TD``: the sum of weight x expert(row) over a row's slots, in slot order.

        Raises:
            ExpertUnavailable: no replica of an expert that a row chose is alive.
        """
        ...


LOCAL = "local"
"""What carries rows that stay in the process."""


class SynchronousLink:
    """Base class of links whose ``combine`` returns a valid sum or raises: no step is run again, none is captured."""

    @property
    def transport(self) -> str:
        return LOCAL

    def begin_step(self, step: int, rows: Sequence[int]) -> None:
        """Do nothing: such links need no preparation for a step."""

    def graph_key(self) -> Hashable | None:
        return None

    def capture_context(self, rows: int) -> AbstractContextManager[Hashable | None]:
        del rows
        return nullcontext(None)

    def finish_step(self) -> bool:
        return True


class CountingLink(ExpertLink[HandleT], Protocol[HandleT]):
    """A link that counts how many rows each expert took."""

    def expert_rows(self) -> dict[int, list[int]]:
        """Return layer -> rows by expert, since the link was made."""
        ...


class RemoteLink(Protocol):
    """What a link to experts in other processes offers besides :class:`ExpertLink`: it follows routing tables, and
    reports how its peers fare. Thread-safe."""

    def apply(self, table: RoutingTable) -> None:
        """Use ``table`` from the next dispatch on; connections are made in the background."""
        ...

    def oldest_epoch(self) -> int:
        """Return the epoch of the oldest table that is still needed: the newest, or one that lists a seat, gone since,
        that owes an answer."""
        ...

    def missing(self) -> tuple[int, ...]:
        """Return the numbers of the shard groups that no seat can be reached for."""
        ...

    def wait_ready(self, seconds: float) -> bool:
        """Return whether every shard group could be reached at some moment within ``seconds``."""
        ...

    def stalled_s(self) -> dict[int, float]:
        """Return the seconds that ``combine`` has waited since the start, by shard group."""
        ...

    def exchanged_bytes(self) -> dict[tuple[str, str], int]:
        """Return the bytes that connections carried since the start, by transport and direction (sent, received)."""
        ...

    def resent_rows(self) -> dict[str, int]:
        """Return how many rows were sent again to another replica, by reason."""
        ...

    def faults(self) -> dict[str, int]:
        """Return how many connections were refused or ended because of the peer, by reason."""
        ...

    def trace(self, context: bytes) -> None:
        """Send ``context`` (:meth:`services.runtime.tracing.TraceContext.packed`) along with the exchanges that follow,
        where rows go in frames; b"" for none."""
        ...

    def close(self) -> None:
        """End all connections; a ``combine`` that waits raises ExpertUnavailable."""
        ...


@dataclass(frozen=True, slots=True)
class ExchangeTime:
    """Seconds of the host's clock in the exchanges of one step, by what carried its rows."""

    transport: str
    dispatch_s: float
    combine_s: float


KEPT_STEPS = 1024
"""How many steps' times are kept for whoever takes them."""


class TimedLink(Generic[HandleT]):
    """Passes every call on to ``link`` and measures how long exchanges take. Not thread-safe."""

    def __init__(self, link: ExpertLink[HandleT]) -> None:
        self._link = link
        self.dispatched_s = self.waited_s = 0.0
        """Seconds spent in ``dispatch`` and in ``combine`` since the start, by the host's clock."""
        self.exchanges = 0
        """Calls of ``dispatch`` since the start."""
        self._noted = 0.0, 0.0
        self.steps: deque[ExchangeTime] = deque(maxlen=KEPT_STEPS)
        """The last steps that had exchanges here, those that run again included; a CUDA graph has its own."""

    @property
    def transport(self) -> str:
        return self._link.transport

    def begin_step(self, step: int, rows: Sequence[int]) -> None:
        self._link.begin_step(step, rows)

    def graph_key(self) -> Hashable | None:
        return self._link.graph_key()

    def capture_context(self, rows: int) -> AbstractContextManager[Hashable | None]:
        return self._link.capture_context(rows)

    def finish_step(self) -> bool:
        before, self._noted = self._noted, (self.dispatched_s, self.waited_s)
        if self.dispatched_s > before[0]:
            dispatch_s, combine_s = self.dispatched_s - before[0], self.waited_s - before[1]
            self.steps.append(ExchangeTime(self._link.transport, dispatch_s, combine_s))
        return self._link.finish_step()

    def dispatch(self, layer: int, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> HandleT:
        began = time.perf_counter()
        try:
            return self._link.dispatch(layer, x_TD, expert_ids_TK, weights_TK)
        finally:
            self.dispatched_s += time.perf_counter() - began
            self.exchanges += 1

    def combine(self, handle: HandleT) -> Tensor:
        began = time.perf_counter()
        try:
            return self._link.combine(handle)
        finally:
            self.waited_s += time.perf_counter() - began
