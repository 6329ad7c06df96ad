"""The one thread of an expert worker that computes: it joins waiting calls into one grouped call and splits the result.

Legend: R rows of a call, T rows of all joined calls, P pairs of a row and a slot held here, D hidden size, K slots.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from services.fabric.tcp.inbox import Call, Inbox

log = logging.getLogger(__name__)

Compute = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``(layer, x_TD, expert_ids_TK, weights_TK) -> y_TD``, as :meth:`services.model.experts.ExpertShard.forward`."""


@dataclass(slots=True)
class Counts:
    """Counts since the start, which the computing thread writes and metrics read. Joined calls are one computation.

    ``expert_rows`` is layer -> expert -> pairs.
    """

    calls: int = 0
    failed: int = 0
    computations: int = 0
    seconds: float = 0.0
    layer_rows: Counter[int] = field(default_factory=Counter)
    expert_rows: dict[int, Counter[int]] = field(default_factory=dict)


class CallTraces(Protocol):
    """Takes what was computed, on the computing thread; times are in nanoseconds since 1970."""

    def computed(self, calls: Sequence[Call], began_ns: int, ended_ns: int) -> None: ...


class ComputeLoop:
    """Computes the calls of an inbox. ``traces`` is None where nothing is traced."""

    def __init__(self, compute: Compute, inbox: Inbox, traces: CallTraces | None = None) -> None:
        self._compute, self._traces = compute, traces
        self._inbox = inbox
        self.counts = Counts()

    def run(self) -> None:
        """Serve the inbox until it is closed."""
        with torch.inference_mode():
            while calls := self._inbox.take():
                began_ns = 0 if self._traces is None else time.time_ns()
                results = self._results(calls)
                if self._traces is not None:
                    self._traces.computed(calls, began_ns, time.time_ns())
                for call, result in zip(calls, results, strict=True):
                    self._answer(call, result)

    def _answer(self, call: Call, result: Tensor | Exception) -> None:
        try:
            call.answer(result)
        except Exception:  # the thread's boundary: other calls go on
            log.exception("failed to answer a call for layer %d", call.layer)

    def _results(self, calls: list[Call]) -> Sequence[Tensor | Exception]:
        began = time.perf_counter()
        results = self._attempt(calls)
        self.counts.seconds += time.perf_counter() - began
        self.counts.calls += len(calls)
        self.counts.failed += sum(isinstance(result, Exception) for result in results)
        for call in calls:
            self._count_rows(call)
        return results

    def _attempt(self, calls: list[Call]) -> Sequence[Tensor | Exception]:
        """Compute ``calls`` as one; after an error, which concerns one of them, compute each alone."""
        self.counts.computations += 1
        try:
            return joined(self._compute, calls)
        except Exception as error:
            if len(calls) > 1:
                return [result for call in calls for result in self._attempt([call])]
            log.warning("failed to compute %d rows of layer %d", calls[0].rows, calls[0].layer, exc_info=error)
            return [error]

    def _count_rows(self, call: Call) -> None:
        self.counts.layer_rows[call.layer] += call.rows
        by_expert = self.counts.expert_rows.setdefault(call.layer, Counter())
        by_expert.update(call.ids_RK[call.ids_RK >= 0].tolist())


def joined(compute: Compute, calls: Sequence[Call]) -> list[Tensor]:
    """Compute calls that :meth:`Call.joins` allows to be one, and return the answer to each.

    Raises:
        ValueError: the result has another shape or dtype than the rows.
    """
    if calls[0].reduced:
        rows = [call.rows for call in calls]
        x_TD, ids, weights = (
            _cat([getattr(call, name) for call in calls]) for name in ("x_RD", "ids_RK", "weights_RK")
        )
    else:
        rows = [int((call.ids_RK >= 0).sum()) for call in calls]
        x_TD, ids = (_cat(parts) for parts in zip(*map(_pairs, calls), strict=True))
        weights = torch.ones(ids.shape)
    y_TD = compute(calls[0].layer, x_TD, ids.long(), weights)
    if y_TD.shape != x_TD.shape or y_TD.dtype != x_TD.dtype:
        raise ValueError(f"The experts made {list(y_TD.shape)} {y_TD.dtype} of {list(x_TD.shape)} {x_TD.dtype}.")
    y_TD = y_TD.to(x_TD.device)
    if y_TD.is_cuda:  # the answer, and how long it took, are known only when the device is done
        torch.cuda.current_stream(y_TD.device).synchronize()
    return list(torch.split(y_TD, rows))


def _pairs(call: Call) -> tuple[Tensor, Tensor]:
    """Return ``x_PD`` and ``ids_P1``, row by row and slot by slot."""
    held_RK = call.ids_RK >= 0
    return call.x_RD[held_RK.nonzero()[:, 0].to(call.x_RD.device)], call.ids_RK[held_RK].unsqueeze(1)


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
