"""When requests are due: the same for every process that makes it from the same settings."""

from __future__ import annotations

import itertools
import math
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.errors import BadSetting
from loadgen.schedule.curve import RateCurve
from loadgen.schedule.gaps import Gaps

MOST = 50_000_000
"""Requests of one schedule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """``times`` in seconds after the begin, in order. ``text`` describes it. ``seconds``: how long arrivals were asked
    for, which the last of them need not reach."""

    kind: str
    text: str
    times: Sequence[float]
    seconds: float

    @property
    def rate(self) -> float | None:
        """Mean arrivals a second; None if all come at once."""
        return len(self.times) / self.seconds if self.seconds > 0 else None

    @property
    def mean_gap_s(self) -> float | None:
        """None if all come at once."""
        return None if self.rate is None else 1 / self.rate


def at_once(requests: int) -> Schedule:
    return Schedule(kind="at once", text="all at once", times=array("d", bytes(8 * requests)), seconds=0.0)


def arrivals(
    curve: RateCurve, gaps: Gaps, *, seed: int, requests: int | None = None, seconds: float | None = None
) -> Schedule:
    """Returns ``requests`` arrivals, or those of ``seconds``, or both bounds; the first has a gap before it, too.

    Raises:
        BadSetting: it has no end, no arrivals, or too many.
    """
    end = min(curve.seconds, math.inf if seconds is None else seconds)
    if requests is None and math.isinf(end):
        raise BadSetting("The schedule has no end.", hint="Give --requests N or --duration SECONDS.")
    clock = itertools.accumulate(gaps.draw(random.Random(f"arrivals {seed}")))
    times = array("d")
    for number in itertools.islice(clock, requests):
        if (moment := curve.at(number)) > end or math.isinf(moment):
            break
        times.append(moment)
        if len(times) > MOST:
            raise BadSetting(f"The schedule has more than {MOST} requests.", hint="Shorten it, or lower the rate.")
    if not times:
        raise BadSetting("No request falls into the schedule.", hint="Make it longer, or raise the rate.")
    if requests is not None and len(times) == requests:
        end = min(end, times[-1])
    return Schedule(kind="open", text=f"{curve.text}, {gaps.text}", times=times, seconds=end)
