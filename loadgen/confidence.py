"""How sure a percentile is: from the share of values within a target, with the number of values that are independent.

Latencies of neighbours are not independent: a queue that is long makes all of them late. So the values are taken in
batches of neighbours, and the variance between batches says how many independent values they are worth (design
effect). With that number come Wilson's interval for the share, and the order statistics that bound a percentile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

BATCHES = 12


@dataclass(frozen=True, slots=True)
class Between:
    """``value`` lies between ``low`` and ``high`` with the confidence that was asked for."""

    value: float
    low: float
    high: float


def z_of(confidence: float) -> float:
    """Returns how many standard deviations a two-sided interval has.

    >>> round(z_of(0.95), 3)
    1.96
    """
    return NormalDist().inv_cdf((1 + confidence) / 2)


def wilson(share: float, count: float, confidence: float) -> Between:
    """Returns Wilson's score interval of a share of ``count`` independent values.

    >>> wilson(0.9, 100, 0.95)
    Between(value=0.9, low=0.825632..., high=0.944771...)
    """
    z2 = z_of(confidence) ** 2
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = math.sqrt(z2 * (share * (1 - share) / count + z2 / (4 * count**2))) / (1 + z2 / count)
    return Between(share, max(0.0, middle - half), min(1.0, middle + half))


def independent(batches: Sequence[tuple[int, int]], confidence: float) -> float:
    """Returns how many independent values batches are worth, at most as many as they have. A batch is its values that
    are within a limit, and all of its values. That the variance is known from a few batches alone (Student's t) counts
    as fewer values."""
    filled = [(within, count) for within, count in batches if count]
    total = sum(count for _, count in filled)
    if len(filled) < 2 or not total:
        return float(total)
    share = sum(within for within, _ in filled) / total
    if share in (0.0, 1.0):
        return float(total)
    spread = sum((within - share * count) ** 2 for within, count in filled)
    variance = len(filled) / (len(filled) - 1) * spread / total**2
    effect = variance / (share * (1 - share) / total)
    return total / max(1.0, effect * _wider(len(filled) - 1, confidence) ** 2)


def _wider(freedom: int, confidence: float) -> float:
    """Returns Student's t over the normal z, by the first two terms of its expansion."""
    z = z_of(confidence)
    return 1 + (z**2 + 1) / (4 * freedom) + (5 * z**4 + 16 * z**2 + 3) / (96 * freedom**2)


def batches_of(values: Sequence[tuple[float, int, int]], number: int = BATCHES) -> list[tuple[int, int]]:
    """Returns values, each (moment, within, count), as ``number`` batches of neighbours in time."""
    ordered = sorted(values)
    size = max(1, math.ceil(len(ordered) / number))
    parts = [ordered[at : at + size] for at in range(0, len(ordered), size)]
    return [(sum(within for _, within, _ in part), sum(count for _, _, count in part)) for part in parts]


def percentile_between(ordered: Sequence[float], percentile: float, count: float, confidence: float) -> Between:
    """Returns the percentile of values in order, which are worth ``count`` independent ones, between the order
    statistics at the ends of Wilson's interval around it."""
    share = percentile / 100
    around = wilson(share, count, confidence)
    return Between(*(ordered[_place(part, len(ordered))] for part in (share, around.low, around.high)))


def _place(share: float, count: int) -> int:
    return min(count - 1, max(0, math.ceil(share * count) - 1))
