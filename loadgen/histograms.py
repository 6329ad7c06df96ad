"""Distributions of latencies that can be added: HdrHistograms of microseconds, up to an hour, with three digits."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

from loadgen.errors import PackageMissing
from loadgen.results import Latency

try:
    from hdrh.histogram import HdrHistogram  # type: ignore[import-untyped]
except ImportError as missing:
    raise PackageMissing(
        "The Python package hdrhistogram is not installed.", hint="Run `pip install 'expertmesh[load]'`."
    ) from missing

LONGEST_S = 3600
_MICROSECONDS = 1e6
_DIGITS = 3


def empty() -> HdrHistogram:
    return HdrHistogram(1, LONGEST_S * 10**6, _DIGITS)


def latency_of(seconds: Iterable[float]) -> Latency | None:
    """Returns the distribution of values, its figures exact; None without any. Those above an hour count as an hour."""
    ordered = sorted(min(float(LONGEST_S), value) for value in seconds)
    if not ordered:
        return None
    histogram = empty()
    for value in ordered:
        histogram.record_value(max(1, round(value * _MICROSECONDS)))
    mean_ms = sum(ordered) / len(ordered) * 1e3
    return _latency(histogram, mean_ms, ordered[0] * 1e3, ordered[-1] * 1e3, lambda p: exact(ordered, p) * 1e3)


def exact(ordered: Sequence[float], percentile: float) -> float:
    """Returns the smallest of the values, which are in order, that at least ``percentile`` of 100 do not exceed.

    >>> exact([1.0, 2.0, 3.0, 4.0], 50), exact([1.0, 2.0, 3.0, 4.0], 51), exact([1.0], 99.9)
    (2.0, 3.0, 1.0)
    """
    return ordered[max(0, math.ceil(percentile / 100 * len(ordered) - 1e-9) - 1)]


def _latency(
    histogram: HdrHistogram, mean_ms: float, min_ms: float, max_ms: float, percentile_ms: Callable[[float], float]
) -> Latency:
    p50, p90, p95, p99, p99_9 = (round(percentile_ms(p), 4) for p in (50, 90, 95, 99, 99.9))
    return Latency(
        count=histogram.total_count,
        mean_ms=round(mean_ms, 4),
        min_ms=round(min_ms, 4),
        p50_ms=p50,
        p90_ms=p90,
        p95_ms=p95,
        p99_ms=p99,
        p99_9_ms=p99_9,
        max_ms=round(max_ms, 4),
        histogram=histogram.encode().decode("ascii"),
    )


def decode(found: Latency) -> HdrHistogram:
    return HdrHistogram.decode(found.histogram)


class Quantiles:
    """What is below what in a histogram: read once, for the library looks through all of it each time."""

    def __init__(self, histogram: HdrHistogram) -> None:
        self._histogram = histogram
        self._until = list(itertools.accumulate(histogram.counts))

    def at_ms(self, percentile: float) -> float:
        wanted = max(1, math.ceil(percentile / 100 * self._until[-1] - 1e-9))
        value = self._histogram.get_value_from_index(bisect.bisect_left(self._until, wanted))
        return float(self._histogram.get_highest_equivalent_value(value)) / 1e3

    def within(self, limit_ms: float) -> int:
        """Returns how many values are at most ``limit_ms``, or cannot be distinguished from it."""
        return int(self._until[self._histogram.get_counts_array_index(int(limit_ms * 1e3))])


def added(latencies: Iterable[Latency | None]) -> Latency | None:
    """Returns the distribution of all values; None if there are none. Percentiles are those of histograms."""
    parts = [each for each in latencies if each is not None]
    if len(parts) < 2:
        return parts[0] if parts else None
    histogram = empty()
    for each in parts:
        histogram.add(decode(each))
    mean_ms = sum(each.mean_ms * each.count for each in parts) / sum(each.count for each in parts)
    least, most = min(each.min_ms for each in parts), max(each.max_ms for each in parts)
    return _latency(histogram, mean_ms, least, most, Quantiles(histogram).at_ms)


def percentile_ms(found: Latency, percentile: float) -> float:
    return Quantiles(decode(found)).at_ms(percentile)


def share_within(found: Latency, limit_ms: float) -> float:
    """Returns the share of the values that are at most ``limit_ms``."""
    return Quantiles(decode(found)).within(limit_ms) / found.count
