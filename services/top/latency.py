"""Quantiles of latencies between two readings, from the differences of the gateways' histograms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.messages import GatewayLoad, LatencyCounts


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantiles:
    """The latency in seconds that half of all, and nine of ten, do not exceed."""

    p50_s: float
    p90_s: float


def quantiles(before: Mapping[str, GatewayLoad], now: Mapping[str, GatewayLoad], name: str) -> Quantiles | None:
    """Return the quantiles of the latency ``name`` between two readings of all gateways; None where there was none.

    A gateway that came between the readings is left out.
    """
    new: dict[tuple[float, ...], list[int]] = {}
    for gateway in before.keys() & now.keys():
        then, counts = before[gateway].latencies.get(name), now[gateway].latencies.get(name)
        if then is None or counts is None or then.bounds != counts.bounds:
            continue
        total = new.setdefault(counts.bounds, [0] * len(counts.counts))
        new[counts.bounds] = [each + grown for each, grown in zip(total, _growth(then, counts), strict=True)]
    if not new:
        return None
    bounds, counts_of_all = max(new.items(), key=lambda item: item[1][-1])  # several: gateways of two releases
    if not counts_of_all[-1]:
        return None
    return Quantiles(p50_s=quantile(bounds, counts_of_all, 0.5), p90_s=quantile(bounds, counts_of_all, 0.9))


def _growth(then: LatencyCounts, now: LatencyCounts) -> list[int]:
    return [new - old for new, old in zip(now.counts, then.counts, strict=True)]


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float:
    """Return the value that ``share`` of all do not exceed, as Prometheus' histogram_quantile estimates it: values are
    spread evenly within a bucket, and those above the last bound count as that bound.

    Args:
        counts: how many values are at most each of ``bounds``, and how many there are in all.

    Example:
        Of 4 values 1 is at most 0.1 and 3 are at most 0.2: half of them, 2, are at most 0.1 + 0.1 * (2 - 1) / (3 - 1).
    """
    rank, below, lower = share * counts[-1], 0, 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count >= rank:
            return lower + (bound - lower) * (rank - below) / (count - below)
        below, lower = count, bound
    return lower
