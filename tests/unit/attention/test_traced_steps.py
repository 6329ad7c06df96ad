"""An engine that traces: the same tokens, spans of steps' exchanges whose context goes along, slices of all steps."""

from __future__ import annotations

from typing import Any

import pytest
from testkit.fabric.recording_link import RecordingLink
from testkit.models.engines import MakeEngine, ask, run, tokens
from testkit.spans import Spans

from services.attention.step import traced_pipeline
from services.attention.step.engine import EngineTracing
from services.attention.step.pipeline import StepPipeline
from services.errors import ExpertUnavailable
from services.runtime.tracing import TraceContext

ATTEMPT = TraceContext(70, 71)
PROMPT = [5, 9, 33, 7, 21]


class Remote:
    """What a link to experts elsewhere does for traces."""

    def __init__(self) -> None:
        self.contexts: list[bytes] = []
        self.seconds, self.rows = 0.0, 0

    def trace(self, context: bytes) -> None:
        self.contexts.append(context)

    def stalled_s(self) -> dict[int, float]:
        self.seconds += 0.25
        return {4: self.seconds}

    def resent_rows(self) -> dict[str, int]:
        self.rows += 1
        return {"late": self.rows, "lost": 7}


class Travelling(RecordingLink):
    """A link to experts elsewhere."""

    @property
    def transport(self) -> str:
        return "nccl"


def test_tokens_are_those_of_an_engine_that_does_not_trace(make_engine: MakeEngine, tiny: Any) -> None:
    spans, remote = Spans(steps=True), Remote()
    engine = make_engine(link=Travelling(tiny.link()), tracing=EngineTracing(spans.tracer, remote))
    events = run(engine, ask("a", PROMPT, 9).traced(ATTEMPT.traceparent), ask("b", PROMPT[:3], 6))
    assert tokens(events["a"]) == tiny.greedy(PROMPT, 9)
    assert tokens(events["b"]) == tiny.greedy(PROMPT[:3], 6)
    exchanges = spans.named("exchange")
    assert len(exchanges) == 9, "one for each step of the traced request"
    assert {span.parent for span in exchanges} == {ATTEMPT}
    sent = [TraceContext.unpack(context) for context in remote.contexts[::2]]
    assert [context.span_id for context in sent] == [span.context.span_id for span in exchanges]
    assert set(remote.contexts[1::2]) == {b""}, "steps that are not traced send none"
    first = exchanges[0].attributes
    assert (first["expertmesh.transport"], first["expertmesh.phase"]) == ("nccl", "prefill")
    assert first["expertmesh.exchanges"] == 3, "layers of the model"
    assert first["expertmesh.resent_rows"] == 1
    step = next(iter(engine.take_durations().exchanges))
    assert first["expertmesh.dispatch_ms"] == round(1e3 * step.dispatch_s, 3), "one clock for the series and the trace"
    assert first["expertmesh.combine_ms"] == round(1e3 * step.combine_s, 3)
    (waited,) = exchanges[0].events
    assert waited.attributes == {"expertmesh.shard": 4, "expertmesh.ms": 250.0}


def test_every_step_is_sliced(build_engine: MakeEngine) -> None:
    spans = Spans(steps=True)
    engine = build_engine(tracing=EngineTracing(spans.tracer, None))
    run(engine, ask("a", PROMPT, 4))
    steps = spans.named("engine step")
    assert len(steps) == engine.stats().steps == 4
    assert [span.attributes["expertmesh.step.tokens"] for span in steps] == [5, 1, 1, 1]
    for step in steps:
        parts = [span for span in spans.all if span.parent == step.context]
        assert [span.name for span in parts] == ["plan", "layers", "sampling", "read", "account"]
        assert all(step.start_ns <= span.start_ns <= span.end_ns <= step.end_ns for span in parts)
        assert {span.attributes["thread.name"] for span in (step, *parts)} == {"engine"}
    assert {span.name for span in spans.all if not span.steps} == set()


def test_the_time_of_a_device_is_read_when_its_step_is(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mark:
        def __init__(self, device: Any) -> None:
            del device
            self.waited = False

        def wait(self) -> None:
            self.waited = True

        def ms_since(self, earlier: Mark) -> float:
            assert (earlier.waited, self.waited) == (False, True), "the host waits for nothing but the step"
            return 2.5

    monkeypatch.setattr(traced_pipeline, "TimedMark", Mark)
    spans = Spans(steps=True)
    engine = make_engine(tracing=EngineTracing(spans.tracer, None))
    engine._steps._times_gpu, engine._steps._mark = True, Mark
    run(engine, ask("a", PROMPT, 4))
    gpu = spans.named("gpu")
    assert [span.end_ns - span.start_ns for span in gpu] == [2_500_000] * 4
    assert {span.attributes["thread.name"] for span in gpu} == {"gpu"}
    assert engine._steps._gpu_began == {}


def test_without_a_tracer_there_is_nothing_of_it(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert type(engine._steps) is StepPipeline
    assert engine._runner.link._link is engine._link
    assert engine.exemplar() is None


def test_a_step_of_a_traced_request_has_an_exemplar(build_engine: MakeEngine) -> None:
    engine = build_engine(tracing=EngineTracing(Spans().tracer, None))
    engine.add(ask("a", PROMPT, 9))
    engine.step()
    assert engine.exemplar() is None
    engine.add(ask("b", PROMPT, 9).traced(ATTEMPT.traceparent))
    engine.step()
    assert engine.exemplar() == {"trace_id": ATTEMPT.trace_hex}


def test_a_step_that_fails_ends_its_exchange_with_the_error(make_engine: MakeEngine, tiny: Any) -> None:
    spans, remote = Spans(), Remote()
    link = Travelling(tiny.link(), fail=(2, ExpertUnavailable("Nobody is there.")))
    engine = make_engine(link=link, tracing=EngineTracing(spans.tracer, remote))
    run(engine, ask("a", PROMPT, 4).traced(ATTEMPT.traceparent))
    assert spans.one("exchange").error == "ExpertUnavailable"
    assert remote.contexts[-1] == b""
    assert spans.one("prefill").error == "expert_unavailable"
