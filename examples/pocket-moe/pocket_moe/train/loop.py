"""Batches in, better weights out: one training step, and all of it that can be captured in a CUDA graph.

The optimiser works on float32 masters; the model that computes has a copy of them in its own dtype, made once per
step. Nothing in a step waits for the device: sums stay there until :meth:`Trainer.read`.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from pocket_moe.corpus.batches import Batch
from pocket_moe.model.model import PocketMoe
from pocket_moe.train.schedule import Schedule

EAGER_STEPS: Final = 3
"""Before a graph of new shapes is captured: they compile kernels and choose algorithms, and train like any other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings:
    """``balance`` and ``z`` weigh the routers' losses; ``average`` > 0 keeps a moving average of the weights with that
    decay; ``graph`` captures a step on CUDA; ``compile`` compiles what lies between the experts."""

    schedule: Schedule
    balance: float = 0.01
    z: float = 0.0
    weight_decay: float = 0.1
    clip: float = 1.0
    average: float = 0.0
    graph: bool = False
    compile: bool = False


class Stats(NamedTuple):
    """Means over the steps since they were last read."""

    loss: float
    balance: float
    z: float
    peak: float
    gradient_norm: float


class Trainer:
    """AdamW over ``model``, which keeps the float32 weights, on the model's device."""

    def __init__(self, model: PocketMoe, settings: TrainSettings, *, dtype: torch.dtype, batch_tokens: int) -> None:
        self.model, self.settings, self._batch_tokens = model, settings, batch_tokens
        self.device = model.embedding.device
        self.compute = model if dtype == torch.float32 else copy.deepcopy(model).to(dtype)
        """What runs: shares the masters, or follows them in another dtype."""
        if settings.compile:
            self.compute.compile_training()
        self._masters, self._copies = _tensors_of(model), _tensors_of(self.compute)
        self.average = [p.clone() for p in self._masters] if settings.average else []
        self.optimizer = _adamw(model, settings, self.device)
        self.steps = 0
        self._sums = torch.zeros(len(Stats._fields), device=self.device)
        self._summed = 0
        self._graph = _StepGraph(self._work) if settings.graph and self.device.type == "cuda" else None
        if self.compute is not model:
            for master in self.model.parameters():
                master.grad = torch.zeros_like(master)

    def step(self, batch: Batch) -> None:
        """One more update."""
        rate = self.settings.schedule.rate((self.steps + 1) * self._batch_tokens)
        for group in self.optimizer.param_groups:
            group["lr"].fill_(rate)
        if self._graph is None:
            self._work(batch)
        else:
            self._graph.run(batch)
        self.steps += 1
        self._summed += 1

    def read(self) -> Stats:
        """Waits for the device."""
        means = (self._sums / max(1, self._summed)).tolist()
        self._sums.zero_()
        self._summed = 0
        return Stats(*means)

    def finite(self) -> bool:
        """Whether losses and gradients were numbers at every step since :meth:`read`. Waits for the device."""
        return bool(self._sums.isfinite().all())

    @contextmanager
    def evaluating(self) -> Iterator[PocketMoe]:
        """The model that computes, without dropout, with the averaged weights where they are kept."""
        self.compute.eval()
        shared = self.compute is self.model
        masters = [p.clone() for p in self._masters] if self.average and shared else self._masters
        try:
            if self.average:
                _copy(self._copies, self.average)
            yield self.compute
        finally:
            if self.average:
                _copy(self._copies, masters)
            self.compute.train()

    def weights(self) -> dict[str, Tensor]:
        """What an export holds: float32, averaged where the average is kept."""
        names = [name for name, _ in self.model.named_parameters()]
        return dict(zip(names, self.average or self._masters, strict=True))

    def state(self) -> dict[str, Any]:
        """Everything that decides the next steps but the data and the random numbers."""
        return {
            "step": self.steps,
            "model": self.model.state_dict(),
            "moments": {name: self.optimizer.state[p] for name, p in self.model.named_parameters()},
            "average": self.average,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Of :meth:`state`. An average that the state lacks starts at the weights."""
        self.steps = state["step"]
        self.model.load_state_dict(state["model"])
        # The optimiser numbers its parameters by group.
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        order = [names[parameter] for group in self.optimizer.param_groups for parameter in group["params"]]
        moments = {index: state["moments"][name] for index, name in enumerate(order) if state["moments"].get(name)}
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        _copy(self._copies, self._masters)
        if self.average:
            _copy(self.average, state["average"] or self._masters)

    def _work(self, batch: Batch) -> None:
        self.compute.zero_grad(set_to_none=True)
        losses = self.compute.loss(batch)
        total = losses.cross_entropy + self.settings.balance * losses.balance + self.settings.z * losses.z
        torch.autograd.backward(total)
        if self.compute is not self.model:
            _copy(_gradients(self.model), _gradients(self.compute))
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        if self.compute is not self.model:
            _copy(self._copies, self._masters)
        if self.average:
            torch._foreach_lerp_(self.average, self._masters, 1 - self.settings.average)
        self._sums += torch.stack([*(loss.detach() for loss in losses), norm])


def _tensors_of(model: PocketMoe) -> list[Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


def _gradients(model: PocketMoe) -> list[Tensor]:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(gradients) == len(list(model.parameters())), "every parameter takes part in the loss"
    return gradients


def _copy(to: list[Tensor], source: list[Tensor]) -> None:
    torch._foreach_copy_(to, source)


def _adamw(model: PocketMoe, settings: TrainSettings, device: torch.device) -> torch.optim.AdamW:
    """Decay acts on matrices only. The rate is a tensor, so that a captured step reads the current one."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay, "lr": torch.zeros((), device=device)},
        {"params": vectors, "weight_decay": 0.0, "lr": torch.zeros((), device=device)},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=True, capturable=device.type == "cuda")


class _StepGraph:
    """A step captured once and replayed: a few eager steps on a side stream, then the capture, which runs nothing."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._eager: Counter[int | None] = Counter()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: Batch | None = None

    def run(self, batch: Batch) -> None:
        if self._eager[batch.most_documents] < EAGER_STEPS:
            self._eager[batch.most_documents] += 1
            self._warm_up(batch)
            return
        if self._batch is None or self._batch.most_documents != batch.most_documents:
            self._capture(batch)
        assert self._batch is not None
        assert self._graph is not None
        for held, given in zip(_tensors(self._batch), _tensors(batch), strict=True):
            held.copy_(given)
        self._graph.replay()

    def _warm_up(self, batch: Batch) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._work(batch)
        torch.cuda.current_stream().wait_stream(self._stream)

    def _capture(self, batch: Batch) -> None:
        self._graph = None  # gives its memory back before another takes its place
        self._batch = copy.deepcopy(batch)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._work(self._batch)
        self._graph = graph


def _tensors(batch: Batch) -> list[Tensor]:
    fields = (batch.tokens_BL, batch.positions_BL, batch.targets_BL, batch.weights_BL)
    return [tensor for tensor in fields if tensor is not None]
