"""The highest rate at which a server keeps its objectives: upwards until it does not, then by halves in between.

A rate is met or missed only where the interval of its share of requests within the target lies on one side of the
objective (:mod:`loadgen.confidence`); where it lies across, the rate is measured again for longer, and at last taken by
its value, as unsure. On the way up one short look at a rate suffices, which its value decides: what is said of the
server comes from the rates around the last one, which are measured in full. A rate whose backlog grows is stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from loadgen.drive import Driven
from loadgen.objectives import measured
from loadgen.results import Objective, Probe

Measure = Callable[[float, float], Driven]
"""A run at a rate, for so many seconds."""
Verdict = Literal["met", "missed", "unsure", "saturated", "invalid", "cut short"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOptions:
    """``start``, ``most``: rates. ``precision``: how far apart the highest rate met and the lowest one missed may be,
    as a share. ``seconds``, ``most_seconds``: of a probe. ``allow_wrong``: share of answers that may be wrong."""

    start: float = 1.0
    most: float = 10_000.0
    growth: float = 2.0
    precision: float = 0.05
    seconds: float = 30.0
    look: float = 0.25
    """Share of ``seconds`` for a rate on the way up."""
    most_seconds: float = 120.0
    confidence: float = 0.95
    allow_wrong: float = 0.0
    most_probes: int = 40
    least_requests: int = 20
    """Requests of a probe: at lower rates nothing can be said."""


@dataclass(frozen=True, slots=True)
class Found:
    """``rate``: the highest that was surely met; ``low`` and ``high``: between what it lies."""

    probes: Sequence[Probe]
    rate: float | None
    low: float | None
    high: float | None
    goodput: float | None


@dataclass(slots=True)
class RateSearch:
    """Looks for the rate. ``say`` gets each probe when it has been made."""

    measure: Measure
    objectives: Sequence[Objective]
    options: SearchOptions
    say: Callable[[Probe], None] = lambda _probe: None
    _probes: list[Probe] = field(default_factory=list)

    def run(self) -> Found:
        options = self.options
        low, high = self._upwards()
        while not self._over() and low < options.most and not (low and high / low <= 1 + options.precision):
            rate = math.sqrt(low * high) if low else high / 2
            if rate * options.most_seconds < options.least_requests:
                break
            if self._met(rate):
                low = rate
            else:
                high = rate
        return self._found(low)

    def _over(self) -> bool:
        done = len(self._probes) >= self.options.most_probes
        return done or (bool(self._probes) and self._probes[-1].verdict == "cut short")

    def _upwards(self) -> tuple[float, float]:
        """Returns the highest rate that was met in full, 0 if none was, and the lowest above it that was not."""
        passed: list[float] = []
        rate, high = self.options.start, math.inf
        while not self._over():
            if not self._passes(rate):
                high = rate
                break
            passed.append(rate)
            if rate >= self.options.most:
                break
            rate = min(self.options.most, rate * self.options.growth)
        while passed and not self._over():
            if self._met(passed[-1]):
                return passed[-1], high
            high = passed.pop()
        return 0.0, high

    def _passes(self, rate: float) -> bool:
        """Looks at ``rate``, and measures it in full before an unsure miss counts."""
        if self._probe(rate, self.options.look * self.options.seconds):
            return True
        return self._probes[-1].verdict == "unsure" and self._met(rate)

    def _met(self, rate: float) -> bool:
        """Measures ``rate`` in full, again and longer while it is unsure."""
        seconds = self.options.seconds
        while True:
            share_met = self._probe(rate, seconds)
            if self._probes[-1].verdict != "unsure" or seconds >= self.options.most_seconds:
                return share_met
            seconds = min(2 * seconds, self.options.most_seconds)

    def _probe(self, rate: float, seconds: float) -> bool:
        """Measures ``rate`` once, and returns whether it was met by its value."""
        driven = self.measure(rate, max(seconds, self.options.least_requests / rate))
        verdict, why, met = judged(driven, self.objectives, self.options)
        probe = Probe(rate=rate, verdict=verdict, why=why, run=driven.run)
        self._probes.append(probe)
        self.say(probe)
        return met

    def _found(self, low: float) -> Found:
        met = [probe for probe in self._probes if probe.verdict == "met" and probe.rate <= (low or math.inf)]
        best = max(met, key=lambda probe: probe.rate, default=None)
        missed = [
            probe.rate
            for probe in self._probes
            if probe.verdict in ("missed", "saturated") and (best is None or probe.rate > best.rate)
        ]
        rate = best.rate if best else None
        goodput = best.run.rates.goodput if best else None
        return Found(self._probes, rate, rate, min(missed, default=None), goodput)


def judged(driven: Driven, objectives: Sequence[Objective], options: SearchOptions) -> tuple[Verdict, str, bool]:
    """Returns the verdict on a run, why, and whether by its values alone the objectives were met."""
    run = driven.run
    if run.cut_short is not None:
        return "cut short", f"{run.cut_short.signal} ended it after {run.cut_short.at_s:.0f} s", False
    if driven.saturated:
        return "saturated", "more requests were under way all the time, until it was stopped", False
    if not run.validity.valid:
        return "invalid", "; ".join(run.validity.reasons), False
    wrong = run.counts.wrong / max(1, run.counts.ok + run.counts.wrong)
    if wrong > options.allow_wrong:
        return "missed", f"{wrong:.2%} of the answers are wrong", False
    return _kept([_one(objective, driven, options.confidence) for objective in objectives])


def _kept(found: Sequence[tuple[Verdict, str, bool]]) -> tuple[Verdict, str, bool]:
    met = all(each[2] for each in found)
    order: Sequence[Verdict] = ("missed", "unsure")
    for verdict in order:
        if whys := [why for name, why, _ in found if name == verdict]:
            return verdict, "; ".join(whys), met
    return "met", "; ".join(why for _, why, _ in found), met


def _one(objective: Objective, driven: Driven, confidence: float) -> tuple[Verdict, str, bool]:
    name = f"{objective.metric} p{objective.percentile:g}"
    found = measured(objective, driven.seen, confidence)
    if found.share is None:
        return "met", f"{name} has no values", True
    wanted, share = objective.percentile / 100, found.share
    value = "never" if found.objective.value_ms is None else f"{found.objective.value_ms:.4g} ms"
    within = f"{share.value:.2%} within ({share.low:.2%} to {share.high:.2%})"
    why = f"{name} {value} for {objective.target_ms:g} ms, {within}"
    met = bool(found.objective.met)
    if share.low >= wanted:
        return "met", why, met
    return ("missed" if share.high < wanted else "unsure"), why, met
