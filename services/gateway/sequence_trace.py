"""The attempts of a sequence in its request's trace. In: what becomes of the sequence. Out: a span for each attempt.

The span is the gateway's, not the worker's: a worker that is killed takes its open spans along, and what it has sent
before still hangs on the attempt, which ends here with an error. The next one links to it.
"""

from __future__ import annotations

from services.errors import RequestError
from services.messages import FinishReason, GenerateRequest
from services.runtime.tracing import Attributes, Span, TraceContext, current_span

Exemplar = dict[str, str]


class SequenceTrace:
    """The attempts of one sequence, each with a span within that of ``request``. The last one is open."""

    def __init__(self, request: Span, sequence: str, index: int) -> None:
        self._request = request
        self._about: Attributes = {"expertmesh.sequence": sequence, "expertmesh.choice": index}
        self._why = "not said"
        self._span = self._open(1, ())

    @property
    def traceparent(self) -> str:
        """The context under which scheduler and workers trace the open attempt."""
        return self._span.context.traceparent

    @property
    def exemplar(self) -> Exemplar:
        """What a histogram remembers the sequence by."""
        return {"trace_id": self._span.context.trace_hex}

    def first_token(self) -> None:
        self._span.event("first token")

    def lost(self, why: str) -> None:
        """Note why the open attempt is lost, before the next one begins."""
        self._why = why

    def again(self, attempt: int, delivered: int) -> None:
        """End the open attempt as lost, and open ``attempt``, which goes on behind ``delivered`` tokens."""
        former = self._span
        former.fail("attempt_lost", f"attempt lost: {self._why}")
        former.attributes["expertmesh.delivered_tokens"] = delivered
        former.end()
        self._why = "not said"
        self._span = self._open(attempt, (former.context,))
        self._span.attributes["expertmesh.resumed_at"] = delivered

    def end(self, finish: FinishReason, error: RequestError | None, tokens: int) -> None:
        """End the open attempt, and with it the sequence of ``tokens`` tokens."""
        self._span.attributes |= {"gen_ai.response.finish_reasons": [finish], "gen_ai.usage.output_tokens": tokens}
        if error is not None and finish == "error":
            self._span.fail(error.code)
        self._span.end()

    def _open(self, attempt: int, links: tuple[TraceContext, ...]) -> Span:
        span = self._request.child("attempt", attributes=self._about)
        span.attributes["expertmesh.attempt"], span.links = attempt, links
        return span


def traced_sequence(request: GenerateRequest, index: int) -> tuple[GenerateRequest, SequenceTrace | None]:
    """Return ``request`` with the context of its first attempt, if the HTTP request of this task is traced."""
    span = current_span()
    if span is None:
        return request, None
    trace = SequenceTrace(span, request.id, index)
    return request.traced(trace.traceparent), trace
