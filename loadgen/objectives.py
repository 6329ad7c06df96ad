"""Service-level objectives: a percentile of a latency within a target; and the requests that are within all of them."""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from loadgen.confidence import Between, batches_of, independent, percentile_between, wilson
from loadgen.errors import BadSetting
from loadgen.histograms import exact, percentile_ms, share_within
from loadgen.results import Latency, Metric, Objective
from loadgen.seen import Seen

_FORM = re.compile(r"(ttft|itl|tpot|e2e|service_ttft|service):p(\d+(?:\.\d+)?)(?:<=?|=)(\d+(?:\.\d+)?)(ms|s)")
NEVER = math.inf
"""The latency of what was due and not answered."""


def parse_objective(text: str) -> Objective:
    """Returns the objective of a setting, ``METRIC:pPERCENTILE<TIME``.

    >>> parse_objective("ttft:p99<500ms").target_ms
    500.0

    Raises:
        BadSetting: it is none.
    """
    if (found := _FORM.fullmatch(text.replace(" ", ""))) is None or not 0 < float(found[2]) < 100:
        raise BadSetting(f"{text!r} is no objective.", hint="Write ttft:p99<500ms; also itl, tpot, e2e, service.")
    target = float(found[3]) * (1 if found[4] == "ms" else 1e3)
    metric: Metric = found[1]  # type: ignore[assignment]  # one of those of _FORM
    return Objective(metric=metric, percentile=float(found[2]), target_ms=target)


_ONE: Mapping[Metric, Callable[[Seen], float | None]] = {
    "ttft": lambda seen: seen.ttft_s,
    "tpot": lambda seen: seen.tpot_s,
    "e2e": lambda seen: seen.e2e_s,
    "service_ttft": lambda seen: None if seen.first_token is None else seen.first_token - seen.sent,
    "service": lambda seen: seen.ended - seen.sent,
    "lag": lambda seen: seen.lag_s,
}


_TO_THE_END: Mapping[Metric, Metric] = {"ttft": "e2e", "e2e": "e2e", "service_ttft": "service", "service": "service"}
"""Metrics of a wait, with the one that says how long it was for a request whose end nobody saw."""


def values(metric: Metric, seen: Seen) -> Sequence[float]:
    """Returns the values in seconds that a request which was answered adds to ``metric``."""
    if metric == "itl":
        return seen.gaps
    value = _ONE[metric](seen)
    return () if value is None else (value,)


def due(objective: Objective, every: Sequence[Seen]) -> Iterator[tuple[Seen, Sequence[float]]]:
    """Returns requests that count for an objective, with their values. One that was not answered has never had its
    first token and its end; what left on purpose does not count, nor what the end of the run cut off before it was
    late."""
    metric = objective.metric
    for seen in every:
        if seen.outcome in ("ok", "wrong"):
            yield seen, values(metric, seen)
        elif seen.outcome == "unfinished":
            if metric in ("ttft", "service_ttft") and seen.first_token is not None:
                yield seen, values(metric, seen)
            elif metric in _TO_THE_END and values(_TO_THE_END[metric], seen)[0] * 1e3 > objective.target_ms:
                yield seen, (NEVER,)
        elif seen.outcome != "disconnected" and metric not in ("itl", "tpot"):
            yield seen, (NEVER,)


@dataclass(frozen=True, slots=True)
class Measured:
    """An objective with its value, and the share of values within the target."""

    objective: Objective
    share: Between | None


def measured(objective: Objective, every: Sequence[Seen], confidence: float) -> Measured:
    """Returns ``objective`` with what ``every`` request says of it."""
    target = objective.target_ms / 1e3
    found = list(due(objective, every))
    ordered = sorted(value for _, values in found for value in values)
    if not ordered:
        return Measured(objective, None)
    value = exact(ordered, objective.percentile)
    below = [(seen.scheduled, sum(v <= value for v in values), len(values)) for seen, values in found if values]
    count = max(1.0, independent(batches_of(below), confidence))
    share = bisect.bisect_right(ordered, target) / len(ordered)
    bounds = percentile_between(ordered, objective.percentile, count, confidence)
    return Measured(
        Objective(
            metric=objective.metric,
            percentile=objective.percentile,
            target_ms=objective.target_ms,
            value_ms=_ms(bounds.value),
            low_ms=_ms(bounds.low),
            high_ms=_ms(bounds.high),
            met=bounds.value <= target,
            share_within=share,
        ),
        wilson(share, count, confidence),
    )


def _ms(seconds: float) -> float | None:
    return None if math.isinf(seconds) else round(seconds * 1e3, 4)


def good(objectives: Sequence[Objective], seen: Seen) -> bool:
    """Returns whether a request has the right answer, within all objectives: each of its own values, or of its gaps
    the objective's percentile."""
    if seen.outcome != "ok":
        return False
    return all(_kept(objective, sorted(values(objective.metric, seen))) for objective in objectives)


def _kept(objective: Objective, ordered: Sequence[float]) -> bool:
    if not ordered:
        return True
    place = min(len(ordered) - 1, math.ceil(objective.percentile / 100 * len(ordered)) - 1)
    return ordered[place if objective.metric == "itl" else -1] <= objective.target_ms / 1e3


def with_histogram(objective: Objective, found: Latency, unanswered: int) -> Objective:
    """Returns ``objective`` with the value of a distribution, beside which ``unanswered`` requests have none. Who came
    after whom is not known any more, so the value has no bounds."""
    missing = 0 if objective.metric in ("itl", "tpot") else unanswered
    place = objective.percentile * (found.count + missing) / found.count
    value_ms = percentile_ms(found, place) if place <= 100 else None
    return Objective(
        metric=objective.metric,
        percentile=objective.percentile,
        target_ms=objective.target_ms,
        value_ms=value_ms,
        met=value_ms is not None and value_ms <= objective.target_ms,
        share_within=share_within(found, objective.target_ms) * found.count / (found.count + missing),
    )
