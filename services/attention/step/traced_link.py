"""The exchanges of one step in a trace: a span for all of them, whose context goes along to the experts.

In: the calls of a step's layers. Out: the same calls to the link, and a span with their totals. What a device waits for
by itself, through shared memory or within a CUDA graph, the host does not see: then the span says how long launching
the exchanges took.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Generic, TypeVar

from torch import Tensor

from services.fabric.link import ExpertLink, RemoteLink
from services.runtime.tracing import Span

HandleT = TypeVar("HandleT")


class _Totals:
    """Seconds and calls of the exchanges so far, and how often rows were sent again."""

    __slots__ = ("combine_s", "dispatch_s", "exchanges", "resent")

    def __init__(self) -> None:
        self.dispatch_s = self.combine_s = 0.0
        self.exchanges = self.resent = 0


class TracedLink(Generic[HandleT]):
    """Passes every call on to ``link``. Not thread-safe.

    Args:
        remote: ``link`` again, if it leads to experts in other processes.
        transport: what the rows travel by, for the span.
    """

    def __init__(self, link: ExpertLink[HandleT], remote: RemoteLink | None, transport: str) -> None:
        self._link, self._remote, self._transport = link, remote, transport
        self._totals: _Totals | None = None

    @property
    def transport(self) -> str:
        return self._link.transport

    @contextmanager
    def traced(self, span: Span) -> Iterator[None]:
        """Count the exchanges inside, which belong to one step, for ``span``; it ends with the block."""
        self._totals = totals = _Totals()
        remote, before = self._remote, self._stalled()
        if remote is not None:
            remote.trace(span.context.packed())
        try:
            with span:
                yield
                span.attributes |= {
                    "expertmesh.transport": self._transport,
                    "expertmesh.exchanges": totals.exchanges,
                    "expertmesh.dispatch_ms": round(1e3 * totals.dispatch_s, 3),
                    "expertmesh.combine_ms": round(1e3 * totals.combine_s, 3),
                }
                if totals.resent:
                    span.attributes["expertmesh.resent_calls"] = totals.resent
                for group, seconds in self._stalled().items():
                    waited_ms = round(1e3 * (seconds - before.get(group, 0.0)), 3)
                    span.event("waited for a shard group", {"expertmesh.shard": group, "expertmesh.ms": waited_ms})
        finally:
            self._totals = None
            if remote is not None:
                remote.trace(b"")

    def _stalled(self) -> dict[int, float]:
        return {} if self._remote is None else self._remote.stalled_s()

    def begin_step(self, step: int, rows: Sequence[int]) -> None:
        self._link.begin_step(step, rows)

    def graph_key(self) -> Hashable | None:
        return self._link.graph_key()

    def capture_context(self, rows: int) -> AbstractContextManager[Hashable | None]:
        return self._link.capture_context(rows)

    def finish_step(self) -> bool:
        return self._link.finish_step()

    def dispatch(self, layer: int, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> HandleT:
        if (totals := self._totals) is None:
            return self._link.dispatch(layer, x_TD, expert_ids_TK, weights_TK)
        began = time.perf_counter()
        handle = self._link.dispatch(layer, x_TD, expert_ids_TK, weights_TK)
        totals.dispatch_s += time.perf_counter() - began
        totals.exchanges += 1
        return handle

    def combine(self, handle: HandleT) -> Tensor:
        if (totals := self._totals) is None:
            return self._link.combine(handle)
        began = time.perf_counter()
        y_TD = self._link.combine(handle)
        totals.combine_s += time.perf_counter() - began
        totals.resent += 0 if self._remote is None else self._remote.resent(handle)
        return y_TD
