"""A run second by second: what happened when, and how requests fared that were due then."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from loadgen.histograms import latency_of
from loadgen.results import Interval
from loadgen.seen import Seen

MOST = 600
"""Intervals of a schedule."""


def interval_s(schedule_s: float) -> float:
    """Returns the length of an interval: a second, or so many that there are not too many.

    >>> interval_s(30.0), interval_s(86400.0)
    (1.0, 144.0)
    """
    return float(max(1, math.ceil(schedule_s / MOST)))


@dataclass(slots=True)
class _Bin:
    scheduled: int = 0
    sent: int = 0
    ok: int = 0
    failed: int = 0
    refused: int = 0
    disconnected: int = 0
    output_tokens: int = 0
    begun: int = 0
    """Got their first token, or ended without one."""
    ended: int = 0
    lag_s: float = 0.0
    ttft: list[float] = field(default_factory=list)
    e2e: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)


At = Callable[[float], _Bin]


def timeline(every: Sequence[Seen], seconds: float) -> list[Interval]:
    """Returns intervals of ``seconds`` from second 0 to the last end."""
    last = max((seen.ended for seen in every), default=0.0)
    bins = [_Bin() for _ in range(int(last // seconds) + 1)]

    def at(moment: float) -> _Bin:
        return bins[min(len(bins) - 1, max(0, int(moment // seconds)))]

    for seen in every:
        _add(seen, at)
    found, sent, begun, ended, scheduled = [], 0, 0, 0, 0
    for number, each in enumerate(bins):
        sent, begun, ended = sent + each.sent, begun + each.begun, ended + each.ended
        scheduled += each.scheduled
        found.append(_interval(each, number * seconds, seconds, sent - ended, scheduled - begun))
    return found


def _add(seen: Seen, at: At) -> None:
    due, end = at(seen.scheduled), at(seen.ended)
    due.scheduled += 1
    due.lag_s = max(due.lag_s, seen.lag_s)
    at(seen.sent).sent += 1
    end.ended += 1
    at(seen.ended if seen.first_token is None else seen.first_token).begun += 1
    for moment, _, _ in seen.refusals:
        at(moment).refused += 1
    if seen.outcome == "ok":
        end.ok += 1
    elif seen.outcome == "disconnected":
        end.disconnected += 1
    elif seen.outcome not in ("refused", "unfinished"):
        end.failed += 1
    if seen.outcome in ("ok", "wrong"):
        due.e2e.append(seen.e2e_s)
        if seen.ttft_s is not None:
            due.ttft.append(seen.ttft_s)
    _add_tokens(seen, at)


def _add_tokens(seen: Seen, at: At) -> None:
    """Tokens come with chunks, as evenly as it can be said."""
    if seen.first_token is None:
        return
    moment, chunks = seen.first_token, len(seen.gaps) + 1
    for number, gap in enumerate((0.0, *seen.gaps)):
        moment += gap
        tokens = seen.output_tokens * (number + 1) // chunks - seen.output_tokens * number // chunks
        at(moment).output_tokens += tokens
        if number and seen.outcome in ("ok", "wrong"):
            at(moment).itl.append(gap)


def _interval(found: _Bin, at_s: float, seconds: float, in_flight: int, backlog: int) -> Interval:
    return Interval(
        at_s=at_s,
        seconds=seconds,
        scheduled=found.scheduled,
        sent=found.sent,
        ok=found.ok,
        failed=found.failed,
        refused=found.refused,
        disconnected=found.disconnected,
        output_tokens=found.output_tokens,
        in_flight=in_flight,
        backlog=backlog,
        lag_max_ms=round(found.lag_s * 1e3, 4),
        ttft=latency_of(found.ttft),
        e2e=latency_of(found.e2e),
        itl=latency_of(found.itl),
    )
