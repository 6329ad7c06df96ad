"""Recorded expert choices as load that moves over time, and planners judged on the window after the one they saw."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pocket_moe.records import ExpertTrace
from services.placement.load import Load, peak_load
from services.placement.single_experts import Placement, place_experts
from testkit.fabric.eplb import eplb

Planner = Callable[[Sequence[Load], Placement | None], Placement]
"""``(windows seen so far, the latest last; the placement in use) -> the next placement``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """``imbalance``: mean of max / mean over the windows judged; ``worst``: the highest. ``moves``: experts loaded."""

    imbalance: float
    worst: float
    moves: int


def replay(windows: Sequence[Load], planner: Planner, devices: int) -> Score:
    """The placement planned after window i serves window i + 1. What the first one loads is no move."""
    placement: Placement | None = None
    imbalances, moves = [], 0
    for position in range(len(windows) - 1):
        planned = planner(windows[: position + 1], placement)
        moves += experts_to_load(placement, planned) if placement is not None else 0
        placement = planned
        imbalances.append(imbalance(device_loads(windows[position + 1], placement), [1.0] * devices))
    return Score(imbalance=sum(imbalances) / len(imbalances), worst=max(imbalances), moves=moves)


def experts_to_load(before: Placement, after: Placement) -> int:
    """How many times a device has to load an expert that it does not hold, over all layers."""
    return sum(
        len(set(new) - set(old))
        for layer, placed in after.items()
        for old, new in zip(before.get(layer, ((),) * len(placed)), placed, strict=True)
    )


def device_loads(load: Load, placement: Placement) -> list[list[float]]:
    """``[layers, devices]``: the load of each device, every expert's split evenly over its replicas."""
    return [_layer_loads(load[layer], placed) for layer, placed in placement.items()]


def _layer_loads(loads_E: Sequence[float], placed: Sequence[tuple[int, ...]]) -> list[float]:
    copies = [sum(held.count(expert) for held in placed) for expert in range(len(loads_E))]
    return [sum(loads_E[expert] / copies[expert] for expert in held) for held in placed]


def imbalance(loads_LB: Sequence[Sequence[float]], capacity_B: Sequence[float]) -> float:
    """max / mean: the peak load over that of a perfect split, 1 at best."""
    return peak_load(loads_LB, capacity_B) * sum(capacity_B) / sum(map(sum, loads_LB))


class Documents:
    """The trace's documents by domain, each given out once; a domain that ran out begins again."""

    def __init__(self, trace: ExpertTrace) -> None:
        self._trace = trace
        self._of_domain = [np.flatnonzero(trace.document_domain == domain) for domain in range(len(trace.domains))]
        self._next = [0] * len(trace.domains)

    def window(self, tokens_by_domain: dict[int, int]) -> dict[int, list[float]]:
        """Load by layer and expert of whole documents with at least so many tokens of each domain."""
        chosen = [d for domain, tokens in tokens_by_domain.items() for d in self._take(domain, tokens)]
        starts = self._trace.starts
        ids_NLK = np.concatenate([self._trace.ids[starts[d] : starts[d + 1]] for d in chosen])
        return {
            layer: np.bincount(ids_NLK[:, layer].ravel(), minlength=self._trace.experts).astype(float).tolist()
            for layer in range(ids_NLK.shape[1])
        }

    def _take(self, domain: int, tokens: int) -> Iterator[int]:
        documents, starts = self._of_domain[domain], self._trace.starts
        while tokens > 0:
            document = int(documents[self._next[domain] % len(documents)])
            self._next[domain] += 1
            tokens -= int(starts[document + 1] - starts[document])
            yield document


def shifting(trace: ExpertTrace, domains: Sequence[int], *, tokens: int, steps: int) -> list[Load]:
    """From each domain to the next in ``steps`` windows of about ``tokens``, the mix moving by 1 / steps each time."""
    documents = Documents(trace)
    return [
        documents.window({first: tokens * (steps - step) // steps, second: tokens * step // steps})
        for first, second in itertools.pairwise(domains)
        for step in range(steps)
    ]


def steady(trace: ExpertTrace, domains: Sequence[int], *, tokens: int, windows: int) -> list[Load]:
    """All ``domains`` in equal parts, all the time: only chance moves the load."""
    documents = Documents(trace)
    return [documents.window(dict.fromkeys(domains, tokens // len(domains))) for _ in range(windows)]


def ours(devices: int, slots: int, *, earlier: int = 3) -> Planner:
    """:func:`place_experts` from the placement in use, for the latest window and ``earlier`` ones."""

    def plan(windows: Sequence[Load], current: Placement | None) -> Placement:
        return place_experts(windows[-1], devices, slots, current, earlier=windows[-1 - earlier : -1])

    return plan


def greedy(devices: int, slots: int) -> Planner:
    """EPLB's greedy on the latest window, as published."""
    return lambda windows, _: eplb(windows[-1], devices, slots)


def helped_greedy(devices: int, slots: int, *, earlier: int = 3) -> Planner:
    """The same with what it lacks: the mean of as many windows as ours sees, devices renamed so that the least load."""

    def plan(windows: Sequence[Load], current: Placement | None) -> Placement:
        seen = windows[-1 - earlier :]
        mean = {layer: [sum(loads_W) for loads_W in zip(*(w[layer] for w in seen), strict=True)] for layer in seen[-1]}
        placed = eplb(mean, devices, slots)
        return placed if current is None else {layer: _renamed(current[layer], placed[layer]) for layer in placed}

    return plan


def first_only(devices: int, slots: int) -> Planner:
    """Ours after the first window, then never again."""
    return lambda windows, current: current or place_experts(windows[-1], devices, slots)


def _renamed(before: Sequence[tuple[int, ...]], after: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """``after`` in the order that keeps most experts where they are: the best over subsets of devices filled so far."""
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for old in before:
        reached: dict[int, tuple[int, tuple[int, ...]]] = {}
        for taken, (kept, order) in best.items():
            for position in range(len(after)):
                entry = (kept + len(set(old) & set(after[position])), (*order, position))
                if not taken >> position & 1 and entry > reached.get(taken | 1 << position, (-1, ())):
                    reached[taken | 1 << position] = entry
        best = reached
    (_, order), *_ = best.values()
    return tuple(after[position] for position in order)
