"""Scales of plots and their ticks: pure arithmetic, from values to shares of the plot's height or width."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from services.dashboards import units
from services.dashboards.times import Range, clock, nice_step

_BINARY = ("bytes", "kbytes", "mbytes", "gbytes", "bits", "binBps", "binbps", "KiBs", "MiBs")
_HEADROOM = 0.05
_FLAT = 0.1
"""Values within this share of their size are shown without zero, so that their course is seen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """``at`` is the share of the axis, from its start."""

    at: float
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Values from ``low`` to ``high``. ``log``: the base of a logarithmic scale."""

    low: float
    high: float
    log: float | None = None

    def share(self, value: float) -> float:
        """Return where ``value`` lies, 0 at ``low`` and 1 at ``high``; what lies outside is at the edge."""
        if self.log:
            value, low, high = (math.log(max(each, 1e-300)) for each in (value, self.low, self.high))
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (value - low) / (high - low)))


def scale(
    values: Sequence[float],
    *,
    low: float | None = None,
    high: float | None = None,
    from_zero: bool = False,
    log: float | None = None,
) -> Scale:
    """Return a scale for finite ``values``; ``low`` and ``high`` are bounds that the dashboard sets."""
    finite = [value for value in values if math.isfinite(value) and (not log or value > 0)] or [1.0 if log else 0.0]
    least, most = min(finite), max(finite)
    if log:
        bottom = log ** math.floor(math.log(low if low and low > 0 else least, log))
        top = high if high and high > bottom else log ** math.ceil(math.log(most, log))
        return Scale(low=bottom, high=top if top > bottom else bottom * log, log=log)
    room = _HEADROOM * ((most - least) or abs(most) or 1.0)
    bottom, top = least - room, most + room
    near_zero = from_zero or most - least > _FLAT * abs(most)
    if least >= 0 and (near_zero or bottom < 0):
        bottom = 0.0
    if most <= 0 and near_zero:
        top = 0.0
    if most == least == 0:
        bottom, top = 0.0, 1.0
    bottom, top = bottom if low is None else low, top if high is None else high
    return Scale(low=bottom, high=top if top > bottom else bottom + 1.0)


def ticks(found: Scale, unit: str, decimals: int | None, count: int) -> list[Tick]:
    """Return about ``count`` ticks at round values, with labels that differ."""
    values = _powers(found, count) if found.log else _rounds(found, unit, count)
    if unit == "s" and values and values[-1] >= 60 and any(value % 60 for value in values):
        labels = [f"{value:g} s" for value in values]  # 80 s, not 1.33 min
    else:
        labels = [units.text(value, unit, decimals) for value in values]
    more = 0 if decimals is None else decimals
    while len(set(labels)) < len(labels) and more < 8:
        more += 1
        labels = [units.text(value, unit, more) for value in values]
    return [Tick(at=found.share(value), label=label) for value, label in zip(values, labels, strict=True)]


def _rounds(found: Scale, unit: str, count: int) -> list[float]:
    step = _step((found.high - found.low) / max(count, 1), unit)
    first, last = math.ceil(found.low / step - 1e-9), math.floor(found.high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _step(wanted: float, unit: str) -> float:
    """Return the round number nearest to ``wanted``: 1, 2 or 5 of a power of ten, or a power of two for bytes."""
    if unit in _BINARY and wanted > 1:
        return float(2 ** round(math.log2(wanted)))
    if unit == "s" and wanted >= 60:
        return nice_step(wanted)
    power = 10.0 ** math.floor(math.log10(wanted))
    return power * min((1, 2, 5, 10), key=lambda each: abs(math.log(wanted / power / each)))


def _powers(found: Scale, count: int) -> list[float]:
    assert found.log
    first, last = round(math.log(found.low, found.log)), math.floor(math.log(found.high, found.log) + 1e-9)
    every = max(1, -(-(last - first) // max(count, 1)))
    return [found.log**power for power in range(first, last + 1, every)]


def time_ticks(span: Range, count: int) -> list[Tick]:
    """Return about ``count`` ticks at round local times."""
    step = nice_step(span.seconds / max(count, 1))
    offset = time.localtime(span.start_s).tm_gmtoff
    first = math.ceil((span.start_s + offset) / step)
    found = []
    while (at := first * step - offset) <= span.end_s:
        found.append(Tick(at=(at - span.start_s) / span.seconds, label=clock(at, step)))
        first += 1
    return found
