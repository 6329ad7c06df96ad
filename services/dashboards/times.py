"""Ranges of time, the steps of queries in them, and how times are written."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from datetime import datetime

from services.errors import ConfigError

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0, "y": 31536000.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdwy])")
_STEPS_S = (1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 900, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
"""Steps of queries and of time axes. Longer ones are multiples of the last."""
DEFAULT_SCRAPE_S = 15.0
_LATEST_S = 253402300799.0  # the end of the year 9999, after which there is no calendar


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Unix times in seconds."""

    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    def aligned(self, step_s: float) -> Range:
        """Return the range with bounds that are multiples of ``step_s``, so that two looks ask for the same times."""
        return Range(start_s=self.start_s // step_s * step_s, end_s=self.end_s // step_s * step_s)


def seconds(text: str) -> float:
    """Return the length of a duration such as ``1h30m``.

    Raises:
        ConfigError: it is none.
    """
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ConfigError(f"{text!r} is no duration.", hint="Write it as in 30s, 5m, 1h30m or 7d.")
    return sum(float(number) * _UNITS_S[unit] for number, unit in parts)


def moment(text: str, now_s: float) -> float:
    """Return the Unix time that ``text`` means: ``now``, ``now-1h``, ``-1h``, Unix seconds, or an ISO date.

    Raises:
        ConfigError: it means none.
    """
    relative = text.removeprefix("now")
    if not relative:
        return now_s
    if relative.startswith("-"):
        return now_s - seconds(relative[1:])
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        hint = "Write it as in -1h, now, 2026-11-27T23:00 or 1795822800."
        raise ConfigError(f"{text!r} is no time.", hint=hint) from error


def between(start: str, end: str, now_s: float) -> Range:
    """Return the range from ``start`` to ``end``.

    Raises:
        ConfigError: one of them is no time, or there is nothing between them.
    """
    found = Range(start_s=moment(start, now_s), end_s=moment(end, now_s))
    if found.seconds <= 0:
        raise ConfigError(f"There is no time between {start} and {end}.", hint="--from is before --to.")
    if not (0 <= found.start_s <= _LATEST_S and 0 <= found.end_s <= _LATEST_S):
        raise ConfigError(f"{start} to {end} is not within the years 1970 to 9999.", hint="Ask for less, as in -7d.")
    return found


def step_for(length_s: float, points: float, least_s: float) -> float:
    """Return the step at which about ``points`` values lie in ``length_s``, at least ``least_s``."""
    return max(least_s, nice_step(length_s / max(points, 1.0)))


def nice_step(wanted_s: float) -> float:
    """Return the shortest step of whole seconds, minutes, hours or days that is not below ``wanted_s``."""
    for step in _STEPS_S:
        if step >= wanted_s:
            return float(step)
    days = -(-wanted_s // _STEPS_S[-1])
    return days * _STEPS_S[-1]


def rate_interval(step_s: float, scrape_s: float) -> float:
    """Return what Grafana puts for ``$__rate_interval``: long enough for four scrapes."""
    return max(step_s + scrape_s, 4 * scrape_s)


def duration(length_s: float) -> str:
    """Return ``length_s`` as Prometheus reads it."""
    return f"{length_s:.0f}s" if length_s >= 1 and length_s == int(length_s) else f"{length_s * 1000:.0f}ms"


def clock(at_s: float, step_s: float) -> str:
    """Return the local time as an axis with ticks every ``step_s`` seconds shows it."""
    form = "%m-%d" if step_s >= _UNITS_S["d"] else "%H:%M" if step_s >= _UNITS_S["m"] else "%H:%M:%S"
    return time.strftime(form, time.localtime(at_s))


def full(at_s: float) -> str:
    """Return date and local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))
