"""Two runs side by side: is the later one better, worse, or is there no difference?

Requests of one second share their fate, so they are no independent draws. A run is therefore cut into blocks of
seconds, and these are drawn with replacement again and again (block bootstrap; Kuensch 1989): how far the change varies
between draws is its confidence interval. Where both runs had the same schedule, the same blocks are drawn from both,
for they had the same bursts. Shares of requests have the interval of Newcombe (1998, method 10). What differs from one
run to the next and not within a run, such as another machine, no interval can show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Final, Literal

from loadgen.report.blocks import METRICS, Block, Weights, blocks_of, draws, paired, percentiles, token_rate
from loadgen.report.words import METRICS as NAMES
from loadgen.report.words import percentile
from loadgen.results import Metric, Run

Change = Literal["better", "worse", "none", "unclear"]
SHARES: Final = (50.0, 99.0)
DRAWS: Final = 400
MIN_BLOCKS: Final = 8
"""With fewer an interval is a guess."""
MIN_SHARE: Final = 0.002
"""By so much a share of the requests must change to count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """A change counts if it is sure by ``confidence`` and larger than ``threshold``, a share of the earlier value."""

    threshold: float = 0.05
    confidence: float = 0.99


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """``change`` is the later value less the earlier one, as a share of that (with the unit ``share`` as it is), and
    lies between ``low`` and ``high``. None: there is no value, or too little is known."""

    name: str
    unit: Literal["ms", "1/s", "share"]
    before: float
    after: float
    change: float | None
    low: float | None
    high: float | None
    verdict: Change


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """``invalid``: why figures may not be used. ``notes``: in what the loads differ."""

    invalid: Sequence[str]
    notes: Sequence[str]
    differences: Sequence[Difference]

    @property
    def verdict(self) -> Change:
        """Worse if anything is, else better if anything is; unclear only if nothing is known."""
        found = {each.verdict for each in self.differences}
        order: Sequence[Change] = ("worse", "better", "none")
        return next((each for each in order if each in found), "unclear")

    def named(self, verdict: Change) -> list[str]:
        """Returns the names of the differences with ``verdict``."""
        return [each.name for each in self.differences if each.verdict == verdict]


def compare(before: Run, after: Run, limits: Limits | None = None) -> Comparison:
    """Returns the differences of ``after`` from ``before``."""
    limits = limits or Limits()
    runs = {"the earlier run": before, "the later run": after}
    invalid = [f"{name} is invalid" for name, run in runs.items() if not run.validity.valid]
    found = [*sampled(before, after, limits), *ended(before, after, limits)]
    return Comparison(invalid=invalid, notes=list(_notes(before, after)), differences=found)


def _notes(before: Run, after: Run) -> Iterator[str]:
    for name, first, second in (
        ("schedule", before.schedule.text, after.schedule.text),
        ("workload", before.workload.text, after.workload.text),
        ("model", before.target.model, after.target.model),
        ("endpoint", before.target.endpoint, after.target.endpoint),
    ):
        if first != second:
            yield f"another {name}: {first}, then {second}"
    happened = [
        ", ".join(f"{event.action} {event.target}" for event in run.events) or "none" for run in (before, after)
    ]
    if happened[0] != happened[1]:
        yield f"other events: {happened[0]}, then {happened[1]}"


def sampled(before: Run, after: Run, limits: Limits) -> Iterator[Difference]:
    """Yields the differences that are bootstrapped. More tokens where more requests were due say nothing of the server:
    they are compared for the same schedule, and where clients wait for answers."""
    first, second = blocks_of(before), blocks_of(after)
    enough = min(len(first), len(second)) >= MIN_BLOCKS
    pairs = draws(len(first), len(second), together=paired(first, second), count=DRAWS) if enough else []

    def changes(value: Callable[[Sequence[Block], Weights], list[float]]) -> list[list[float]]:
        """Returns the change of each value, for each draw in which there is one."""
        both = [(value(first, one), value(second, other)) for one, other in pairs]
        return [
            [b / a - 1 for a, b in zip(*each, strict=True)] for each in both if each[0] and each[1] and all(each[0])
        ]

    for metric in METRICS:
        if metric in before.latency and metric in after.latency:
            drawn = changes(lambda blocks, weights, metric=metric: percentiles(blocks, weights, metric, SHARES))  # type: ignore[misc]
            for place, share in enumerate(SHARES):
                values = _at(before, metric, share), _at(after, metric, share)
                name = f"{NAMES[metric]} {percentile(share)}"
                yield _difference(name, "ms", values, [each[place] for each in drawn], limits)
    if paired(first, second) or before.schedule.rate is None is after.schedule.rate:
        drawn = changes(lambda blocks, weights: [token_rate(blocks, weights)])
        rates = before.rates.output_tokens, after.rates.output_tokens
        yield _difference("output tokens", "1/s", rates, [each[0] for each in drawn], limits)


def _at(run: Run, metric: Metric, share: float) -> float:
    return float(getattr(run.latency[metric], f"p{share:g}_ms"))


def _difference(
    name: str, unit: Literal["ms", "1/s"], values: tuple[float, float], drawn: Sequence[float], limits: Limits
) -> Difference:
    before, after = values
    change = after / before - 1 if before else None
    low, high = _bounds(drawn, limits.confidence) if len(drawn) >= DRAWS / 2 else (None, None)
    verdict: Change = "unclear"
    if change is not None and low is not None and high is not None:
        verdict = judged(change, low, high, limits.threshold, more_is_better=unit == "1/s")
    return Difference(
        name=name, unit=unit, before=before, after=after, change=change, low=low, high=high, verdict=verdict
    )


def _bounds(drawn: Sequence[float], confidence: float) -> tuple[float, float]:
    ranked = sorted(drawn)
    outside = (1 - confidence) / 2 * (len(ranked) - 1)
    return ranked[math.floor(outside)], ranked[math.ceil(len(ranked) - 1 - outside)]


def judged(change: float, low: float, high: float, threshold: float, *, more_is_better: bool = False) -> Change:
    """Returns what a change amounts to, that lies between ``low`` and ``high``.

    >>> judged(0.2, 0.1, 0.3, 0.05), judged(0.2, -0.1, 0.5, 0.05), judged(0.01, -0.01, 0.03, 0.05)
    ('worse', 'unclear', 'none')
    """
    if abs(change) > threshold and (low > 0 or high < 0):
        return "better" if (change > 0) is more_is_better else "worse"
    return "none" if (-threshold <= low and high <= threshold) or low > 0 or high < 0 else "unclear"


def ended(before: Run, after: Run, limits: Limits) -> Iterator[Difference]:
    """Yields the differences of shares of the requests."""
    for name, ends in (("failed requests", ("failed", "timeout")), ("refused requests", ("refused",))):
        parts = [sum(getattr(run.counts, end) for end in ends) for run in (before, after)]
        yield _shares(name, (parts[0], before.counts.scheduled), (parts[1], after.counts.scheduled), limits)
    if before.correctness is not None and after.correctness is not None:
        first, second = before.correctness, after.correctness
        found = _shares("wrong answers", (first.wrong, first.checked), (second.wrong, second.checked), limits)
        yield found if first.wrong or not second.wrong else _worse(found)


def _worse(found: Difference) -> Difference:
    """Returns the difference where there was no wrong answer and now is one, which needs no statistics."""
    return replace(found, verdict="worse")


def _shares(name: str, before: tuple[int, int], after: tuple[int, int], limits: Limits) -> Difference:
    first, second = (part / whole if whole else 0.0 for part, whole in (before, after))
    low, high = newcombe(before, after, limits.confidence)
    verdict = judged(second - first, low, high, MIN_SHARE) if before[0] or after[0] else "none"
    return Difference(
        name=name,
        unit="share",
        before=first,
        after=second,
        change=second - first,
        low=low,
        high=high,
        verdict=verdict,
    )


def newcombe(before: tuple[int, int], after: tuple[int, int], confidence: float) -> tuple[float, float]:
    """Returns bounds of the difference between two shares, each given as part and whole.

    >>> [round(bound, 4) for bound in newcombe((48, 80), (56, 70), 0.95)]  # his example (a), the other way round
    [0.0524, 0.3339]
    """
    bounds = [_wilson(part, whole, confidence) for part, whole in (before, after)]
    first, second = (part / whole if whole else 0.0 for part, whole in (before, after))
    (low_1, high_1), (low_2, high_2) = bounds
    change = second - first
    below = math.hypot(second - low_2, high_1 - first)
    above = math.hypot(high_2 - second, first - low_1)
    return max(-1.0, change - below), min(1.0, change + above)


def _wilson(part: int, whole: int, confidence: float) -> tuple[float, float]:
    """Returns the score interval of a share (Wilson 1927)."""
    if not whole:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share, more = part / whole, z * z / whole
    middle = (share + more / 2) / (1 + more)
    half = z * math.sqrt(share * (1 - share) / whole + more / (4 * whole)) / (1 + more)
    return middle - half, middle + half
