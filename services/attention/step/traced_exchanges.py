"""The exchanges of one step in a trace: a span for all of them, whose context goes along to the experts.

In: what the runner's link and the link to experts in other processes count. Out: a span with what a step adds to that.
What a device waits for by itself, through shared memory or within a CUDA graph, the host does not see: then the span
says how long launching the exchanges took.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from services.fabric.link import RemoteLink, TimedLink
from services.runtime.tracing import Span


class TracedExchanges:
    """Describes steps of ``link``. Not thread-safe.

    Args:
        remote: ``link`` without its clock, if it leads to experts in other processes.
    """

    def __init__(self, link: TimedLink[Any], remote: RemoteLink | None) -> None:
        self._link, self._remote = link, remote

    @contextmanager
    def traced(self, span: Span) -> Iterator[None]:
        """Describe the exchanges inside, which belong to one step, in ``span``; it ends with the block."""
        link, remote = self._link, self._remote
        exchanges, dispatched_s, waited_s = link.exchanges, link.dispatched_s, link.waited_s
        stalled_s, resent = self._stalled_s(), self._resent_rows()
        if remote is not None:
            remote.trace(span.context.packed())
        try:
            with span:
                yield
                span.attributes |= {
                    "expertmesh.transport": link.transport,
                    "expertmesh.exchanges": link.exchanges - exchanges,
                    "expertmesh.dispatch_ms": round(1e3 * (link.dispatched_s - dispatched_s), 3),
                    "expertmesh.combine_ms": round(1e3 * (link.waited_s - waited_s), 3),
                }
                if rows := self._resent_rows() - resent:
                    span.attributes["expertmesh.resent_rows"] = rows
                for group, seconds in self._stalled_s().items():
                    waited_ms = round(1e3 * (seconds - stalled_s.get(group, 0.0)), 3)
                    span.event("waited for a shard group", {"expertmesh.shard": group, "expertmesh.ms": waited_ms})
        finally:
            if remote is not None:
                remote.trace(b"")

    def _stalled_s(self) -> dict[int, float]:
        return {} if self._remote is None else self._remote.stalled_s()

    def _resent_rows(self) -> int:
        return 0 if self._remote is None else sum(self._remote.resent_rows().values())
