"""Spans, and the tracer that makes them. In: what happened and when. Out: ended spans, to a sink. No OpenTelemetry.

A span is a few fields until it ends; what is made of it for a collector is made on other threads
(:mod:`services.runtime.tracing.export`). A process that is killed takes its open spans along. So whoever outlives the
work opens the span that others hang theirs on: the gateway opens that of an attempt, and its workers add to it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Literal, NamedTuple, Protocol

from services.runtime.logs import bind_trace_id
from services.runtime.tracing.allowance import Allowance
from services.runtime.tracing.context import TraceContext

Value = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, Value]
Kind = Literal["internal", "server", "client"]
_NOTHING: Attributes = {}
_LOW_BITS = 2**64 - 1

_current: ContextVar[Span | None] = ContextVar("span", default=None)


class Event(NamedTuple):
    """A moment within a span, in nanoseconds since 1970."""

    name: str
    at_ns: int
    attributes: Attributes


class Span:
    """Work that began and will end. Its fields may be changed until :meth:`end`; one thread uses it at a time."""

    __slots__ = (  # they are many, and short-lived
        *("_tracer", "attributes", "context", "end_ns", "error", "events"),
        *("kind", "links", "name", "parent", "start_ns", "steps"),
    )

    def __init__(
        self,
        tracer: Tracer,
        name: str,
        context: TraceContext,
        parent: TraceContext | None,
        *,
        kind: Kind = "internal",
        start_ns: int | None = None,
        attributes: Attributes = _NOTHING,
        links: Sequence[TraceContext] = (),
        steps: bool = False,
    ) -> None:
        self._tracer = tracer
        self.name, self.context, self.parent, self.kind = name, context, parent, kind
        self.start_ns = time.time_ns() if start_ns is None else start_ns
        self.end_ns = 0
        self.attributes: dict[str, Value] = dict(attributes)
        self.events: list[Event] = []
        self.links = links
        self.error: str | None = None
        self.steps = steps

    def child(self, name: str, *, start_ns: int | None = None, attributes: Attributes = _NOTHING) -> Span:
        """Return a span within this one that begins now, or at ``start_ns``."""
        return self._tracer.span(name, self.context, start_ns=start_ns, attributes=attributes)

    def event(self, name: str, attributes: Attributes = _NOTHING, *, at_ns: int | None = None) -> None:
        """Note a moment within the span."""
        self.events.append(Event(name, time.time_ns() if at_ns is None else at_ns, attributes))

    def fail(self, kind: str, why: str = "") -> None:
        """Note that the work failed. ``kind`` is a short name; ``why`` must hold nothing that a client sent."""
        self.error = why or kind
        self.attributes["error.type"] = kind

    def end(self, *, at_ns: int | None = None) -> None:
        """End the span now, or at ``at_ns``, and hand it over. A second call does nothing."""
        if not self.end_ns:
            self.end_ns = max(self.start_ns, time.time_ns() if at_ns is None else at_ns)
            self._tracer.hand_over(self)

    def __enter__(self) -> Span:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.fail(kind.__name__)  # its message may repeat what a client sent
        self.end()


class Sink(Protocol):
    """Takes ended spans, from any thread; must not block."""

    def put(self, span: Span) -> None: ...


class Tracer:
    """Makes spans and decides which requests have any.

    Args:
        share: the share of requests that are traced, where the client does not decide.
        clients: how many are traced because their clients say so; None is all of those.
        steps: whether steps of an engine are traced, too.
        draw: returns a random number of so many bits.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        share: float,
        clients: Allowance | None = None,
        steps: bool = False,
        draw: Callable[[int], int] = random.getrandbits,
    ) -> None:
        self.steps = steps
        self._clients = clients
        self._sink, self._draw = sink, draw
        self._below = round(share * (_LOW_BITS + 1))

    def request(self, given: TraceContext | None) -> TraceContext:
        """Return the context of a new request's own span. ``given`` is its client's, which decides if there is one and
        its client may; otherwise the low bits of the new trace's id do, as in OpenTelemetry's sampler by ratio. Those
        of a client's trace are the client's choice, so a draw stands for them."""
        if given is not None:
            sampled = given.sampled and (self._allowed() or self._draw(64) < self._below)
            return TraceContext(given.trace_id, self._id(64), sampled, given.state)
        trace_id = self._id(128)
        return TraceContext(trace_id, self._id(64), (trace_id & _LOW_BITS) < self._below)

    def served(
        self, name: str, context: TraceContext, given: TraceContext | None, attributes: Attributes = _NOTHING
    ) -> Span:
        """Return the span of a request with the context that :meth:`request` made, and its client's."""
        return Span(self, name, context, given, kind="server", attributes=attributes)

    def span(
        self,
        name: str,
        parent: TraceContext,
        *,
        start_ns: int | None = None,
        attributes: Attributes = _NOTHING,
        links: Sequence[TraceContext] = (),
    ) -> Span:
        """Return a span within ``parent`` that begins now, or at ``start_ns``."""
        context = TraceContext(parent.trace_id, self._id(64), state=parent.state)
        return Span(self, name, context, parent, start_ns=start_ns, attributes=attributes, links=links)

    def record(
        self, name: str, parent: TraceContext, start_ns: int, end_ns: int, attributes: Attributes = _NOTHING
    ) -> None:
        """Hand over a span that is over already."""
        self.span(name, parent, start_ns=start_ns, attributes=attributes).end(at_ns=end_ns)

    def step(self, name: str, start_ns: int, *, parent: TraceContext | None = None) -> Span:
        """Return a span of an engine's step, or of a part of one: no request's, but a trace of its own."""
        trace_id = self._id(128) if parent is None else parent.trace_id
        return Span(self, name, TraceContext(trace_id, self._id(64)), parent, start_ns=start_ns, steps=True)

    def hand_over(self, span: Span) -> None:
        """Take a span that has ended (:meth:`Span.end` calls this)."""
        self._sink.put(span)

    def _allowed(self) -> bool:
        return self._clients is None or self._clients.take()

    def _id(self, bits: int) -> int:
        while not (drawn := self._draw(bits)):
            pass  # 0 is no id
        return drawn


def current_span() -> Span | None:
    """Return the span under which this task works; None where its request is not traced."""
    return _current.get()


@contextmanager
def working_under(span: Span) -> Iterator[Span]:
    """Let this task, and those that it starts, work under ``span``: log lines carry its trace's id."""
    token = _current.set(span)
    try:
        with bind_trace_id(span.context.trace_hex):
            yield span
    finally:
        _current.reset(token)


def span_here(name: str) -> AbstractContextManager[Span | None]:
    """Return a span within the current one, for a ``with``; nothing where there is none."""
    span = _current.get()
    return nullcontext() if span is None else span.child(name)
