"""Distributed traces: what a request passed, in all processes, as spans of OpenTelemetry. Off by default.

A process that traces has one :class:`Tracer`, made by :func:`tracing`; one that does not has None in its place, and
OpenTelemetry is not even imported. The context of a span (:class:`TraceContext`) goes along with a request through
Redis, and with its rows to expert workers. Spans carry the wall clock of the process that made them.
"""

from services.runtime.tracing.context import TraceContext
from services.runtime.tracing.opening import check_tracing, tracing
from services.runtime.tracing.spans import Attributes, Span, Tracer, Value, current_span, span_here, working_under

__all__ = [
    "Attributes",
    "Span",
    "TraceContext",
    "Tracer",
    "Value",
    "check_tracing",
    "current_span",
    "span_here",
    "tracing",
    "working_under",
]
