"""The steps of an engine that traces: of requests, and of all steps if asked to. An engine that does not has
:class:`StepPipeline` alone, without a word of this.

    engine step     what one turn of the engine did: with lookahead it reads one step and launches the next
      plan, layers, sampling, read, account, publish
    gpu             the device's time of a step, by events that are read once the step is: the host waits for nothing

In: the calls of :class:`StepPipeline`. Out: spans, on the engine's thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from services.attention.batching.manager import BatchManager
from services.attention.batching.pace import Pace
from services.attention.sampling.sampler import Sampler
from services.attention.sequences.plan import Outcome, StepPlan
from services.attention.sequences.trace import SequenceTrace, SequenceTraces
from services.attention.speculation.drafting import Drafting
from services.attention.step.flatten import Flattener
from services.attention.step.in_flight import InFlightStep, LastHidden
from services.attention.step.pipeline import Lookahead, StepPipeline
from services.attention.step.runner import StepOutput, StepRunner
from services.attention.step.traced_exchanges import TracedExchanges
from services.runtime.tracing import Attributes, Span, Tracer

THREAD = "thread.name"
_ENGINE, _GPU = {THREAD: "engine"}, {THREAD: "gpu"}


class StepSlices:
    """The slices of the step that the engine does now, if steps are traced. The engine's thread alone."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._step: Span | None = None

    def begin(self) -> None:
        self._step = self._tracer.step("engine step", time.time_ns())

    def end(self, tokens: int, sequences: int) -> None:
        """End the step, unless there was nothing to do."""
        if (step := self._step) is not None and tokens:
            step.attributes |= _ENGINE | {"expertmesh.step.tokens": tokens, "expertmesh.step.sequences": sequences}
            step.end()
        self._step = None

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        if (step := self._step) is None:
            yield
            return
        began_ns = time.time_ns()
        try:
            yield
        finally:
            self._record(name, step, began_ns, time.time_ns(), _ENGINE)

    def gpu(self, milliseconds: float) -> None:
        """Record the device's time of a step that has just been read, as if it had ended now."""
        if (step := self._step) is not None:
            now_ns = time.time_ns()
            self._record("gpu", step, now_ns - round(1e6 * milliseconds), now_ns, _GPU)

    def _record(self, name: str, step: Span, began_ns: int, ended_ns: int, thread: dict[str, str]) -> None:
        span = self._tracer.step(name, began_ns, parent=step.context)
        span.attributes.update(thread)
        span.end(at_ns=ended_ns)


class TimedMark:
    """A :class:`services.model.transfer.Mark` that knows the time since another one."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        self._event.synchronize()

    def ms_since(self, earlier: TimedMark) -> float:
        """Return the device's time between the two. Only once the device has come here."""
        elapsed: float = earlier._event.elapsed_time(self._event)
        return elapsed


class TracedPipeline(StepPipeline):
    """The pipeline of an engine whose process has a ``tracer``; ``exchange`` is None where no rows travel."""

    def __init__(
        self,
        batch: BatchManager,
        inputs: Flattener,
        runner: StepRunner,  # type: ignore[type-arg]
        sampler: Sampler,
        *,
        lookahead: Lookahead,
        pace: Pace | None,
        drafting: Drafting | None,
        tracer: Tracer,
        traces: SequenceTraces,
        exchange: TracedExchanges | None,
    ) -> None:
        super().__init__(batch, inputs, runner, sampler, lookahead=lookahead, pace=pace, drafting=drafting)
        self._tracer, self._traces, self._exchange = tracer, traces, exchange
        self._slices = StepSlices(tracer)
        self._gpu_began: dict[int, TimedMark] = {}
        self._times_gpu = tracer.steps and runner.model.device.type == "cuda"
        if self._times_gpu:
            self._mark = TimedMark
        self._turn = 0, 0

    def step(self) -> None:
        if not self._tracer.steps:
            super().step()
            return
        self._turn = 0, 0
        self._slices.begin()
        try:
            super().step()
        finally:
            self._slices.end(*self._turn)

    def _plan(self) -> StepPlan:
        with self._slices.part("plan"):
            return super()._plan()

    def _layers(self, step: InFlightStep) -> StepOutput:
        if self._times_gpu:
            self._gpu_began[step.number] = TimedMark(self._model.device)
        sequence = None if self._exchange is None else self._traces.detailed(step.plan)
        with self._slices.part("layers"):
            if sequence is None or self._exchange is None:
                return super()._layers(step)
            with self._exchange.traced(self._span(sequence, step)):
                return super()._layers(step)

    def _draws(self, step: InFlightStep, x_TD: Tensor, ahead: int) -> LastHidden:
        with self._slices.part("sampling"):
            return super()._draws(step, x_TD, ahead)

    def _outcomes(self, step: InFlightStep) -> list[Outcome]:
        self._turn = step.plan.tokens, step.plan.sequences
        with self._slices.part("read"):
            outcomes = super()._outcomes(step)
        began = self._gpu_began.pop(step.number, None)
        if began is not None and step.error is None and isinstance(step.computed, TimedMark):
            self._slices.gpu(step.computed.ms_since(began))
        return outcomes

    def _account(self, step: InFlightStep, outcomes: Sequence[Outcome]) -> None:
        with self._slices.part("account"):
            super()._account(step, outcomes)

    def _discard(self, step: InFlightStep) -> None:
        self._gpu_began.pop(step.number, None)
        super()._discard(step)

    def _span(self, sequence: SequenceTrace, step: InFlightStep) -> Span:
        facts: Attributes = {
            "expertmesh.step": step.number,
            "expertmesh.phase": sequence.phase,
            "expertmesh.step.tokens": step.plan.tokens,
            "expertmesh.step.sequences": step.plan.sequences,
        }
        return self._tracer.span("exchange", sequence.attempt, attributes=facts)
