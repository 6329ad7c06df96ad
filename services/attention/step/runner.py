"""Runs one step's layers: as a CUDA graph, as two micro-batches or as plain launches. Then checks the result.

Legend: T rows of a step, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from services.attention.kv_cache import KVCache
from services.attention.step.cuda_graphs import StepGraphs
from services.attention.step.flatten import split
from services.attention.step.forward import forward
from services.attention.step.overlap import OverlapPolicy
from services.fabric.link import ExchangeTime, ExpertLink, TimedLink
from services.model.dense import DenseModel
from services.model.inputs import StepInputs

HandleT = TypeVar("HandleT")
PROBE_STEPS = 32
"""One step in this many is left whole while the link cannot be captured (its ``graph_key()`` is None). Such steps may
run as two micro-batches, which no graph can; a whole one finds out whether the link can be captured by now."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Result of a forward pass.

    ``x_TD``: the rows after the last layer. ``split``: the step ran as two micro-batches. ``replayed``: it ran as one
    CUDA graph. ``sizes``: (rows, length) of each sequence, if the overlap policy learns from the step.
    """

    x_TD: Tensor
    split: bool
    replayed: bool
    sizes: Sequence[tuple[int, int]] = ()


class StepRunner(Generic[HandleT]):
    """Runs the layers of one step at a time: :meth:`run`, then :meth:`finish`; both again where that returns False.

    Args:
        graphs: None where no step is captured.
    """

    def __init__(
        self,
        model: DenseModel,
        link: ExpertLink[HandleT],
        kv: KVCache,
        *,
        graphs: StepGraphs[HandleT] | None,
        overlap: OverlapPolicy,
    ) -> None:
        self.model, self.kv, self.overlap = model, kv, overlap
        self.link, self._graphs = TimedLink(link), graphs
        self._eager_steps = 0
        """Steps in a row that suited a graph and ran without one."""

    @property
    def waited_s(self) -> float:
        """Seconds that the host has waited for experts since the start."""
        return self.link.waited_s

    @property
    def replayed_rows(self) -> int | None:
        """Most rows of a step that runs as a CUDA graph; None where no step does."""
        return self._graphs.max_rows if self._graphs else None

    def take_exchanges(self) -> list[ExchangeTime]:
        """Return the times of steps' exchanges since the last call."""
        steps = self.link.steps
        return [steps.popleft() for _ in range(len(steps))]

    def run(self, inputs: StepInputs, number: int) -> StepOutput:
        """Run all layers for one step. The result is valid only once :meth:`finish` returns True.

        A step that suits a CUDA graph is not split into micro-batches, unless the policy is ``on``: launching kernels
        one by one costs more than the overlap hides. Running the same inputs again is safe.

        Args:
            number: names the step to the experts.

        Raises:
            ExpertUnavailable: an expert has no replica. The step counts as finished then.
        """
        fits = self._graphs is not None and self._graphs.suit(inputs)
        whole = fits and not self.overlap.insists and self._eager_steps % PROBE_STEPS == 0
        sizes = inputs.sizes if self.overlap.active and not whole else ()
        micro_batches = split(inputs, self.overlap.cut(sizes))
        self.link.begin_step(number, [len(part.token_ids_T) for part in micro_batches])
        try:
            x_TD = self._graphs.replayed(micro_batches) if self._graphs and fits else None
            replayed = x_TD is not None
            if x_TD is None:
                x_TD = forward(self.model, self.link, self.kv, micro_batches)
        except BaseException:
            self.link.finish_step()
            raise
        if fits:
            self._eager_steps = 0 if replayed else self._eager_steps + 1
        return StepOutput(x_TD, split=len(micro_batches) > 1, replayed=replayed, sizes=() if replayed else sizes)

    def finish(self) -> bool:
        """Wait for the step's exchanges. Returns whether the result is valid; if not, the step has to run again."""
        valid = self.link.finish_step()
        if valid and self._graphs:
            self._graphs.capture_missing()
        return valid
