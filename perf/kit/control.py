"""An engine whose model and experts cost nothing, so that a step is what the host does around them.

The model is a stub only where it computes: embedding, attention, router, logits return rows that lie ready. Its plan of
the step's attention, the loop over layers, the sampler and all bookkeeping are the real ones.
"""

from __future__ import annotations

import cProfile
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from services.attention.step import runner
from services.attention.step.engine import Engine, EngineOptions
from services.fabric.link import SynchronousLink
from services.messages import GenerateRequest, SamplingParams
from services.model.dense import Added, DenseModel
from services.model.inputs import PagedKV, StepInputs
from services.model.paged_attention import AttentionPlan
from services.model.spec import ModelSpec

VOCAB = 64
"""So small that drawing costs the host's part alone."""


class CostlessModel:
    """In place of :class:`DenseModel`. Legend: T rows, R rows drawn from, D hidden size, K experts per row."""

    def __init__(self, spec: ModelSpec, rows: int) -> None:
        self.spec = spec
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self._planning = DenseModel.__new__(DenseModel)
        self._planning.spec, self._planning.device = spec, self.device
        self._planning.attention_dtype = self.dtype
        self._planning._frequency_I = torch.ones(spec.head_dim // 2)
        self._x_TD = torch.zeros(rows, 1)
        self._ids_TK = torch.arange(spec.top_k).repeat(rows, 1)
        self._weights_TK = torch.full((rows, spec.top_k), 1 / spec.top_k)
        self._logits_RV = torch.rand(rows, VOCAB)

    def plan(self, inputs: StepInputs, block_size: int) -> AttentionPlan:
        return self._planning.plan(inputs, block_size)

    def embed(self, token_ids_T: Tensor) -> Tensor:
        return self._x_TD[: len(token_ids_T)]

    def attention(
        self, _layer: int, x_TD: Tensor, _added: Added, _plan: AttentionPlan, _kv: PagedKV
    ) -> tuple[Tensor, Tensor]:
        return x_TD, x_TD

    def ffn_input(self, _layer: int, x_TD: Tensor, _y_TD: Tensor) -> tuple[Tensor, Tensor]:
        return x_TD, x_TD

    def route(self, _layer: int, h_TD: Tensor) -> tuple[Tensor, Tensor]:
        return self._ids_TK[: len(h_TD)], self._weights_TK[: len(h_TD)]

    def shared_expert(self, _layer: int, _h_TD: Tensor) -> None:
        return None

    def logits(self, x_RD: Tensor) -> Tensor:
        return self._logits_RV[: len(x_RD)]


class CostlessLink(SynchronousLink):
    """Experts that are elsewhere and answer at once."""

    def dispatch(self, _layer: int, x_TD: Tensor, _expert_ids_TK: Tensor, _weights_TK: Tensor) -> Tensor:
        return x_TD

    def combine(self, handle: Tensor) -> Tensor:
        return handle


class SimulatedDevice:
    """A clock in place of a GPU: a step takes ``step_s`` from its first kernel on, or from the end of the step before.

    The kernels' results are there at once; what is simulated is when the host may read them, and how long the device
    had nothing to do. Time is the CPU time of the calling thread plus what it would have waited: others do not count.
    """

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._free_at, self._waited_s = 0.0, 0.0
        self.idle: list[float] = []
        """Seconds between the end of a step and the first kernel of the next one, a value per step."""

    @property
    def now(self) -> float:
        return time.thread_time() + self._waited_s

    def kernel(self) -> None:
        """The first one of a step."""
        now = self.now
        self.idle.append(max(0.0, now - self._free_at))
        self._free_at = max(now, self._free_at) + self._step_s

    def mark(self, _device: torch.device) -> SimulatedMark:
        return SimulatedMark(self, self._free_at)

    def wait(self, until: float) -> None:
        self._waited_s += max(0.0, until - self.now)


@dataclass(frozen=True, slots=True)
class SimulatedMark:
    """``at`` is when ``device`` is done with what it was given so far."""

    device: SimulatedDevice
    at: float

    def wait(self) -> None:
        self.device.wait(self.at)


PARTS = ("plan", "inputs", "attention", "layers", "draw", "complete", "rest")


class ControlBench:
    """An engine whose batch is ``sequences`` of about ``prompt`` tokens that decode for more than ``steps``."""

    def __init__(
        self,
        spec: ModelSpec,
        sequences: int,
        *,
        steps: int,
        prompt: int,
        temperature: float = 0.0,
    ) -> None:
        spec = replace(spec, vocab_size=VOCAB)
        self._prompt, self._steps, self._temperature = prompt, steps, temperature
        self._draw = random.Random(0)
        self._names: list[str] = []
        longest = prompt + 2 * steps + 64
        options = EngineOptions(
            max_num_seqs=sequences,
            max_num_batched_tokens=sequences * prompt * 2,
            max_model_len=min(longest, spec.max_position),
            kv_blocks=sequences * (longest // 16 + 1),
        )
        model = cast(DenseModel, CostlessModel(spec, sequences * prompt * 2))
        self.engine: Engine[Any] = Engine(model=model, link=CostlessLink(), options=options, clock=lambda: 0)
        self._model, self._clock = model, _PartClock(self.engine, model)
        for _ in range(sequences):
            self._add()
        for _ in range(4):
            self.engine.step()
        assert self.engine.stats().running == sequences

    def run(self, steps: int, *, changing: int, profile: cProfile.Profile | None) -> list[dict[str, float]]:
        """Seconds by part, of each step that only decodes."""
        times = []
        while len(times) < steps:
            if changing and len(times) % changing == changing - 1:
                self.engine.cancel(self._names.pop(0), 1)
                self._add()
                self.engine.step()  # the newcomer's prompt
            if profile is not None:
                profile.enable()
            took = self._clock.step()
            if profile is not None:
                profile.disable()
            times.append(took)
        return times

    def idle(self, steps: int, device: SimulatedDevice) -> list[float]:
        """Seconds that ``device`` had nothing to do before each of ``steps``: the control cost on the critical path."""
        plan = self._model.plan

        def begins(inputs: StepInputs, block_size: int) -> AttentionPlan:
            device.kernel()
            return plan(inputs, block_size)

        self._model.plan = begins  # type: ignore[method-assign]
        self.engine._steps._mark = device.mark
        for _ in range(steps + 2):
            self.engine.step()
        self._model.plan = plan  # type: ignore[method-assign]
        return device.idle[2:]

    def _add(self) -> None:
        length = self._draw.randrange(self._prompt // 2, self._prompt + 1)
        self._names.append(f"request-{self._draw.getrandbits(40)}")
        sampling = SamplingParams(
            max_tokens=2 * self._steps + 32, temperature=self._temperature, seed=len(self._names), ignore_eos=True
        )
        self.engine.add(
            GenerateRequest(
                id=self._names[-1],
                attempt=1,
                token_ids=[self._draw.randrange(1, VOCAB) for _ in range(length)],
                prompt_len=length,
                sampling=sampling,
                deadline_ms=10**15,
                priority=5,
                tenant="t",
                reply_to="g",
            )
        )


class _PartClock:
    """Splits a step's time among its parts, by the thread's own CPU time."""

    def __init__(self, engine: Engine[Any], model: DenseModel) -> None:
        self._engine = engine
        self._spent: dict[str, float] = {}
        batch = engine._batch
        batch.plan = self._timed("plan", batch.plan)  # type: ignore[method-assign]
        batch.plan_ahead = self._timed("plan", batch.plan_ahead)  # type: ignore[method-assign]
        batch.complete = self._timed("complete", batch.complete)  # type: ignore[method-assign]
        engine._sampler.draw = self._timed("draw", engine._sampler.draw)  # type: ignore[method-assign]
        engine._steps._outcomes = self._timed("draw", engine._steps._outcomes)  # type: ignore[method-assign]
        model.plan = self._timed("attention", model.plan)  # type: ignore[method-assign]
        engine._inputs.of = self._timed("inputs", engine._inputs.of)  # type: ignore[method-assign]
        runner.forward = self._timed("layers", runner.forward)

    def step(self) -> dict[str, float]:
        self._spent = dict.fromkeys(PARTS, 0.0)
        began = time.thread_time()
        self._engine.step()
        whole = time.thread_time() - began
        self._spent["layers"] -= self._spent["attention"]
        self._spent["rest"] = whole - sum(self._spent.values())
        return self._spent

    def _timed(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return work(*args, **kwargs)
            finally:
                self._spent[part] = self._spent.get(part, 0.0) + time.thread_time() - began

        return timed
