"""A run cut into blocks of seconds, from which values are drawn again and again (block bootstrap)."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from loadgen.report.distribution import counted
from loadgen.results import Interval, Metric, Run

MAX_BLOCKS: Final = 30
METRICS: Final[Sequence[Metric]] = ("ttft", "itl", "e2e")
"""Those that intervals have."""
_GRID: Final = math.log(1.005)
"""Values are put into bins that are half a percent wide."""
Weights = Mapping[int, int]
"""How often each block was drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Consecutive intervals. ``bins``: number of values by bin, for each metric."""

    seconds: float
    scheduled: int
    output_tokens: int
    bins: Mapping[Metric, Mapping[int, int]]


def blocks_of(run: Run) -> list[Block]:
    """Returns at most :data:`MAX_BLOCKS` blocks of the time in which requests were due, of about equal length."""
    due = [number for number, each in enumerate(run.timeline) if each.scheduled]
    intervals = run.timeline[: due[-1] + 1] if due else []
    size = math.ceil(len(intervals) / MAX_BLOCKS) or 1
    return [_block(intervals[at : at + size]) for at in range(0, len(intervals), size)]


def _block(intervals: Sequence[Interval]) -> Block:
    return Block(
        seconds=sum(each.seconds for each in intervals),
        scheduled=sum(each.scheduled for each in intervals),
        output_tokens=sum(each.output_tokens for each in intervals),
        bins={metric: _bins(intervals, metric) for metric in METRICS},
    )


def _bins(intervals: Sequence[Interval], metric: Metric) -> dict[int, int]:
    found: dict[int, int] = {}
    for each in intervals:
        latency = getattr(each, metric)
        for value, count in counted(latency) if latency is not None else ():
            number = round(math.log(max(value, 1e-3)) / _GRID)
            found[number] = found.get(number, 0) + count
    return found


def paired(before: Sequence[Block], after: Sequence[Block]) -> bool:
    """Returns whether both runs had the same schedule: as many requests due in each block."""
    return [block.scheduled for block in before] == [block.scheduled for block in after]


def draws(before: int, after: int, *, together: bool, count: int) -> list[tuple[Weights, Weights]]:
    """Returns ``count`` pairs of draws of blocks. ``together``: the same ones are drawn from both. Each call draws the
    same."""
    rng = random.Random(0)
    found: list[tuple[Weights, Weights]] = []
    for _ in range(count):
        first = _draw(before, rng)
        found.append((first, first if together else _draw(after, rng)))
    return found


def _draw(blocks: int, rng: random.Random) -> dict[int, int]:
    found: dict[int, int] = {}
    for number in rng.choices(range(blocks), k=blocks):
        found[number] = found.get(number, 0) + 1
    return found


def percentiles(blocks: Sequence[Block], weights: Weights, metric: Metric, shares: Sequence[float]) -> list[float]:
    """Returns the percentiles ``shares``, ascending, of the drawn blocks in ms; none where these have no value."""
    bins: dict[int, int] = {}
    for number, weight in weights.items():
        for place, count in blocks[number].bins[metric].items():
            bins[place] = bins.get(place, 0) + weight * count
    wanted = [share / 100 * sum(bins.values()) for share in shares]
    found: list[float] = []
    below = 0
    for place in sorted(bins):
        below += bins[place]
        while len(found) < len(wanted) and below >= wanted[len(found)]:
            found.append(math.exp(place * _GRID))
    return found


def token_rate(blocks: Sequence[Block], weights: Weights) -> float:
    """Returns output tokens a second of the drawn blocks."""
    seconds = sum(weight * blocks[number].seconds for number, weight in weights.items())
    return sum(weight * blocks[number].output_tokens for number, weight in weights.items()) / seconds
