"""The part of expert workers in traces. In: calls that came with the context of a step's exchange. Out: spans.

A step has one span here for all its layers, within the exchange that sent them: first call came, last one computed,
totals between. It ends with the last layer; what is left of a second micro-batch then has a span of its
own. If steps are traced, each computation is a slice, too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from services.fabric.tcp.inbox import Call
from services.routing import ShardGroup
from services.runtime.tracing import TraceContext, Tracer, Value

IDLE_NS = 500_000_000
"""A step without a call for so long is over: its last layers had no rows for this group."""
_THREAD = {"thread.name": "experts"}


@dataclass(slots=True)
class _Step:
    """What has been computed of a traced step."""

    began_ns: int
    ended_ns: int = 0
    calls: int = 0
    rows: int = 0
    waited_ns: int = 0
    computed_ns: int = 0


class ExpertTraces:
    """The spans of one group's calls: a :class:`services.fabric.tcp.compute.CallTraces`.

    Args:
        seat: number of the worker's seat.
    """

    def __init__(self, tracer: Tracer, group: ShardGroup, seat: int) -> None:
        self._tracer = tracer
        self._about: dict[str, Value] = {"expertmesh.shard": group.number, "expertmesh.seat": seat}
        self._last_layer = max(group.experts, default=-1)
        self._lock = threading.Lock()
        self._open: dict[bytes, _Step] = {}

    def computed(self, calls: Sequence[Call], began_ns: int, ended_ns: int) -> None:
        """Add one computation of ``calls``, which are of one layer."""
        if self._tracer.steps:
            self._slice(calls, began_ns, ended_ns)
        for call in calls:
            if call.traced is not None:
                self._add(call, began_ns, ended_ns)

    def end_idle(self) -> None:
        """End the spans of steps that no call comes for any more. From any thread, now and then."""
        idle_since_ns = time.time_ns() - IDLE_NS
        with self._lock:
            for context in [context for context, step in self._open.items() if step.ended_ns < idle_since_ns]:
                self._record(context, self._open.pop(context))

    def _add(self, call: Call, began_ns: int, ended_ns: int) -> None:
        assert call.traced is not None
        context = call.traced.trace
        with self._lock:
            step = self._open.setdefault(context, _Step(call.came_ns))
            step.ended_ns, step.calls, step.rows = ended_ns, step.calls + 1, step.rows + call.rows
            step.waited_ns += max(0, began_ns - call.came_ns)
            step.computed_ns += ended_ns - began_ns
            if call.layer == self._last_layer:
                self._record(context, self._open.pop(context))

    def _record(self, context: bytes, step: _Step) -> None:
        if (exchange := TraceContext.unpack(context)) is None:  # a peer may send anything
            return
        totals: dict[str, Value] = {
            "expertmesh.calls": step.calls,
            "expertmesh.rows": step.rows,
            "expertmesh.wait_ms": round(step.waited_ns / 1e6, 3),
            "expertmesh.compute_ms": round(step.computed_ns / 1e6, 3),
        }
        self._tracer.record("experts", exchange, step.began_ns, step.ended_ns, self._about | totals)

    def _slice(self, calls: Sequence[Call], began_ns: int, ended_ns: int) -> None:
        span = self._tracer.step(f"layer {calls[0].layer}", began_ns)
        rows = sum(call.rows for call in calls)
        span.attributes |= _THREAD | {"expertmesh.calls": len(calls), "expertmesh.rows": rows}
        span.end(at_ns=ended_ns)
