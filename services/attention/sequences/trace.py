"""The traces of sequences in an engine. In: what the batch manager does with them. Out: spans within their attempts.

    batch wait    from the inbox until the sequence is in the batch
    prefill       until its first token is drawn, with an event for each chunk of the prompt
    decode        until its end, with an event every EVENT_TOKENS tokens

All hang on the attempt, whose span is the gateway's, and none on another: a worker that is killed takes the open ones
along, and what has been sent is whole without them. Pure Python; the engine's thread alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from services.attention.sequences.plan import Piece, StepPlan
from services.attention.sequences.sequence import SequenceState
from services.messages import TokenEvent
from services.runtime.tracing import Span, TraceContext, Tracer

EVENT_TOKENS = 32
"""Tokens between two events of a decode."""
DETAILED_STEPS = 32
"""So many steps of a sequence have spans of their exchanges, later one in as many: a long answer has no span for each
token."""


class SequenceTrace:
    """One attempt in the engine. Its ``span`` is that of the phase it is in."""

    def __init__(self, tracer: Tracer, attempt: TraceContext, state: SequenceState, now_ns: int) -> None:
        self.state, self.attempt = state, attempt
        self.steps = 0
        """Steps whose exchanges might have been traced."""
        self._tracer = tracer
        self._span = tracer.span("batch wait", attempt, start_ns=now_ns)
        self._mentioned = state.generated
        self.waiting = self._prefilling = True

    @property
    def phase(self) -> str:
        return self._span.name

    @property
    def wants_detail(self) -> bool:
        """Whether the exchanges of its next step are to be traced."""
        return self.steps < DETAILED_STEPS or self.steps % DETAILED_STEPS == 0

    def admitted(self, now_ns: int) -> None:
        if self.waiting:
            self.waiting = False
            cached = {"expertmesh.cached_tokens": self.state.cached_tokens}
            self._next("prefill", now_ns).attributes.update(cached)
        else:
            self._span.event("resumed", at_ns=now_ns)

    def preempted(self, now_ns: int) -> None:
        self._span.event("preempted", {"expertmesh.computed_tokens": self.state.computed}, at_ns=now_ns)

    def chunk(self, piece: Piece, now_ns: int) -> None:
        if self.state.computed < piece.end:  # the step has failed
            return
        extent = {"expertmesh.start": piece.start, "expertmesh.tokens": piece.length}
        self._span.event("chunk", extent, at_ns=now_ns)
        if piece.draws and self._prefilling:
            self._prefilling = False
            self._mentioned = self.state.generated
            self._next("decode", now_ns)

    def stepped(self, now_ns: int) -> None:
        """Note how far the decode is, now and then."""
        generated = self.state.generated
        if not self._prefilling and generated >= self._mentioned + EVENT_TOKENS:
            self._mentioned = generated
            self._span.event("tokens", {"expertmesh.generated_tokens": generated}, at_ns=now_ns)

    def ended(self, event: TokenEvent | None, now_ns: int) -> None:
        """End the open phase. Without an event a later attempt has replaced this one."""
        self._span.attributes["gen_ai.usage.output_tokens"] = self.state.generated
        if event is not None and event.finish is not None:
            self._span.attributes["gen_ai.response.finish_reasons"] = [event.finish]
            if event.error is not None:
                self._span.fail(event.error.code)
        self._span.end(at_ns=now_ns)

    def _next(self, phase: str, now_ns: int) -> Span:
        self._span.end(at_ns=now_ns)
        self._span = self._tracer.span(phase, self.attempt, start_ns=now_ns)
        return self._span


class SequenceTraces:
    """The traced sequences of one engine; the others cost a look into a dictionary, now and then."""

    def __init__(self, tracer: Tracer, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._tracer, self._clock_ns = tracer, clock_ns
        self._open: dict[str, SequenceTrace] = {}
        self.exemplar: dict[str, str] | None = None
        """What a histogram remembers the last step by: the trace of one of its sequences."""

    def added(self, state: SequenceState) -> None:
        request = state.request
        self._end(request.id, None)
        if (attempt := TraceContext.parse(request.traceparent)) is not None:
            self._open[request.id] = SequenceTrace(self._tracer, attempt, state, self._clock_ns())

    def admitted(self, state: SequenceState) -> None:
        if (trace := self._open.get(state.request.id)) is not None:
            trace.admitted(self._clock_ns())

    def preempted(self, state: SequenceState) -> None:
        if (trace := self._open.get(state.request.id)) is not None:
            trace.preempted(self._clock_ns())

    def completed(self, prompts: Sequence[Piece]) -> None:
        """Note what a step has computed."""
        self.exemplar = None
        if not self._open:
            return
        now_ns = self._clock_ns()
        for piece in prompts:
            if (trace := self._open.get(piece.state.request.id)) is not None and trace.state is piece.state:
                trace.chunk(piece, now_ns)
        for trace in self._open.values():
            trace.stepped(now_ns)
            if not trace.waiting:
                self.exemplar = {"trace_id": trace.attempt.trace_hex}

    def ended(self, events: Sequence[TokenEvent]) -> None:
        """Note the ends among ``events``."""
        for event in events if self._open else ():
            trace = self._open.get(event.request_id)
            if event.finish is not None and trace is not None and trace.state.request.attempt == event.attempt:
                self._end(event.request_id, event)

    def detailed(self, plan: StepPlan) -> SequenceTrace | None:
        """Return the sequence in whose trace the exchanges of the step are to be, if in any. A step has one set of
        spans however many of its sequences are traced: they take turns."""
        wanting = [trace for trace in self._open.values() if trace.state.blocks]
        chosen = next((one for one in sorted(wanting, key=_steps) if _in_step(one.state, plan)), None)
        if chosen is None:
            return None
        wanted, chosen.steps = chosen.wants_detail, chosen.steps + 1
        return chosen if wanted else None

    def _end(self, request_id: str, event: TokenEvent | None) -> None:
        if (trace := self._open.pop(request_id, None)) is not None:
            trace.ended(event, self._clock_ns())


def _steps(trace: SequenceTrace) -> int:
    return trace.steps


def _in_step(state: SequenceState, plan: StepPlan) -> bool:
    return any(state is piece.state for piece in plan.pieces) or any(state is one for one in plan.decodes)
