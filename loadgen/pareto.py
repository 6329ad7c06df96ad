"""Which loads of a sweep are worth choosing."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.results import Run


def pareto(runs: Sequence[Run]) -> list[bool]:
    """Returns for each run whether no other valid one has at least as many output tokens a second at no higher median
    e2e, and is better in one of the two."""
    points = [
        (run.rates.output_tokens, run.latency["e2e"].p50_ms) if run.validity.valid and "e2e" in run.latency else None
        for run in runs
    ]
    return [point is not None and not any(_beats(other, point) for other in points if other) for point in points]


def _beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[0] >= other[0] and one[1] <= other[1] and one != other
