"""Spans of sequences in an engine: their phases, preemptions and ends, and in whose trace a step's exchanges are."""

from __future__ import annotations

import msgspec
from testkit.models.engines import ask
from testkit.models.pieces import pieces
from testkit.spans import Spans

from services.attention.batching.blocks import BlockPool
from services.attention.batching.manager import BatchManager
from services.attention.sequences.plan import BatchLimits, Outcome, StepPlan
from services.attention.sequences.trace import DETAILED_STEPS, EVENT_TOKENS, SequenceTraces
from services.messages import GenerateRequest
from services.runtime.tracing import TraceContext

ATTEMPT = TraceContext(1000, 2000)


def traced(request: GenerateRequest, attempt: TraceContext = ATTEMPT) -> GenerateRequest:
    return request.traced(attempt.traceparent)


class Batch:
    """A batch manager that draws 1 each time, and the spans of its sequences."""

    def __init__(self, *, blocks: int = 64, budget: int = 8) -> None:
        self.spans, self.now = Spans(), 0
        self.traces = SequenceTraces(self.spans.tracer, self.clock)
        limits = BatchLimits(
            max_num_seqs=4, max_num_batched_tokens=budget, max_model_len=512, vocab_size=9, eos_token_ids=()
        )
        self.batch = BatchManager(limits, BlockPool(blocks, 4), lambda: 0, traces=self.traces)

    def clock(self) -> int:
        self.now += 1
        return self.now

    def step(self) -> StepPlan:
        plan = self.batch.plan()
        outcomes = [Outcome(token_id=1 if piece.draws else None) for piece in pieces(plan)]
        self.batch.complete(plan, outcomes)
        self.batch.drain()
        return plan

    def run(self) -> None:
        while self.batch.has_work:
            self.step()


def test_a_sequence_waits_prefills_in_chunks_and_decodes() -> None:
    batch = Batch()
    batch.batch.add(traced(ask("a", [1] * 20, 2 * EVENT_TOKENS + 5)))
    batch.run()
    wait, prefill, decode = batch.spans.all
    assert [span.name for span in batch.spans.all] == ["batch wait", "prefill", "decode"]
    assert {span.parent for span in batch.spans.all} == {ATTEMPT}
    assert [(event.name, event.attributes["expertmesh.tokens"]) for event in prefill.events] == [
        ("chunk", 8),
        ("chunk", 8),
        ("chunk", 4),
    ]
    assert [event.attributes["expertmesh.generated_tokens"] for event in decode.events] == [
        1 + EVENT_TOKENS,
        1 + 2 * EVENT_TOKENS,
    ]
    assert decode.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert wait.end_ns == prefill.start_ns
    assert prefill.end_ns == decode.start_ns


def test_requests_without_a_context_have_no_spans() -> None:
    batch = Batch()
    batch.batch.add(ask("a", [1, 2], 5))
    plan = batch.step()
    assert batch.traces.detailed(plan) is None
    batch.run()
    assert batch.spans.all == []


def test_a_preempted_sequence_says_so_and_goes_on() -> None:
    batch = Batch(blocks=6)
    batch.batch.add(traced(ask("a", [1] * 7, 12), TraceContext(1, 1)))
    batch.batch.add(traced(ask("b", [1] * 7, 12), TraceContext(2, 2)))
    batch.run()
    events = [event.name for span in batch.spans.named("decode") for event in span.events]
    assert "preempted" in events
    assert events.index("preempted") < events.index("resumed")
    assert len(batch.spans.named("decode")) == 2


def test_a_cancelled_sequence_ends_the_phase_that_it_is_in() -> None:
    batch = Batch()
    batch.batch.add(traced(ask("a", [1] * 20, 5)))
    batch.step()
    batch.batch.cancel("a", 1)
    batch.run()
    assert batch.spans.names == ["batch wait", "prefill"]
    assert batch.spans.one("prefill").attributes["gen_ai.response.finish_reasons"] == ["cancelled"]


def test_a_later_attempt_replaces_the_spans_of_the_earlier_one() -> None:
    batch = Batch()
    batch.batch.add(traced(ask("a", [1] * 4, 50)))
    batch.step()
    later = TraceContext(1000, 3000)
    batch.batch.add(traced(ask("a", [1] * 4, 50, attempt=2), later))
    batch.run()
    assert [span.parent for span in batch.spans.all] == [ATTEMPT] * 3 + [later] * 3


def test_the_end_of_an_earlier_attempt_leaves_the_spans_of_the_later_one_open() -> None:
    batch = Batch()
    batch.batch.add(traced(ask("a", [1] * 4, 50)))
    batch.batch.cancel("a", 1)
    batch.batch.add(traced(ask("a", [1] * 4, 50, attempt=2), TraceContext(1000, 3000)))
    batch.batch.drain()
    batch.run()
    assert [span.name for span in batch.spans.all] == ["batch wait", "batch wait", "prefill", "decode"]


def test_the_exchanges_of_a_step_are_in_one_trace_and_traces_take_turns() -> None:
    batch = Batch()
    first, second = TraceContext(1, 1), TraceContext(2, 2)
    batch.batch.add(traced(ask("a", [1, 2], 200), first))
    batch.batch.add(traced(ask("b", [1, 2], 200), second))
    batch.batch.add(ask("c", [1, 2], 200))
    chosen = [batch.traces.detailed(batch.step()) for _ in range(4 * DETAILED_STEPS)]
    turns = [trace.attempt for trace in chosen if trace is not None]
    assert turns[:4] == [first, second, first, second]
    assert chosen[: 2 * DETAILED_STEPS].count(None) == 0
    later = chosen[2 * DETAILED_STEPS :]
    assert len([trace for trace in later if trace is not None]) == 2, "a long answer has few spans"


def test_a_context_goes_through_the_wire_and_older_releases_skip_it() -> None:
    class Older(msgspec.Struct, frozen=True, kw_only=True):
        id: str
        attempt: int

    data = msgspec.msgpack.encode(traced(ask("a", [1], 5)))
    assert msgspec.msgpack.decode(data, type=GenerateRequest).traceparent == ATTEMPT.traceparent
    assert msgspec.msgpack.decode(data, type=Older) == Older(id="a", attempt=1)
    assert b"traceparent" not in msgspec.msgpack.encode(ask("a", [1], 5)), "untraced requests are as long as before"
