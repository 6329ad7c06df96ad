"""Histograms of results files as values with their counts, and curves of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import log10

from loadgen.histograms import decode
from loadgen.results import Latency

Counted = Sequence[tuple[float, int]]
"""Values in ms with their counts, ascending."""
POINTS = 400
"""Of a curve: more are not seen."""


def counted(latency: Latency) -> list[tuple[float, int]]:
    """Returns the values of ``latency``."""
    histogram = decode(latency)
    highest, value_of = histogram.get_highest_equivalent_value, histogram.get_value_from_index
    return [(highest(value_of(index)) / 1e3, count) for index, count in enumerate(histogram.counts) if count]


def cumulative(values: Counted) -> list[tuple[float, float]]:
    """Returns points of value and share of all that are not above it, thinned where they are many.

    >>> cumulative([(1.0, 1), (2.0, 3)])
    [(1.0, 0.25), (2.0, 1.0)]
    """
    total, below, found = sum(count for _, count in values), 0, []
    for value, count in values:
        below += count
        found.append((value, below / total))
    return _thinned(found)


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns every so manieth point of the body, and all of the last hundredth, where a curve has its tail."""
    body = [point for point in points if point[1] < 0.99]
    every = max(1, len(body) // POINTS)
    tail = points[len(body) :]
    found = body[::every] + tail[:: max(1, len(tail) // POINTS)]
    return found if found[-1:] == points[-1:] else [*found, points[-1]]


def nines(share: float) -> float:
    """Returns the number of nines of a share: where a percentile lies on an axis that stretches the tail.

    >>> [round(nines(share), 6) for share in (0.0, 0.9, 0.99, 0.999)]
    [0.0, 1.0, 2.0, 3.0]
    """
    return abs(log10(max(1.0 - share, 1e-9)))
