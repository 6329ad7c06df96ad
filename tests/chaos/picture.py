"""A run's figures in, its timeline out: inter-token latency of every second, and below it what happened when."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from bench.pictures import BLUE, GREEN, INK, ORANGE, PINK, figure, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLE: Final = "What a client waits for the next token while parts of the deployment die"
_WORTH_SAYING_MS = 500.0
"""Waits above it are written next to their event."""
_KINDS: Final[Mapping[str, tuple[str, str]]] = {
    "kill experts": (ORANGE, "kill -9, expert worker"),
    "kill attention": (ORANGE, "kill -9, attention worker"),
    "kill leader": (ORANGE, "kill -9, leading scheduler"),
    "kill gateway": (ORANGE, "kill -9, gateway"),
    "kill redis": (ORANGE, "kill -9, Redis"),
    "leave experts": (PINK, "SIGTERM, expert worker"),
    "stop experts": (PINK, "stopped, expert worker"),
    "stop attention": (PINK, "stopped, attention worker"),
    "stop leader": (PINK, "stopped, leading scheduler"),
    "stop gateway": (PINK, "stopped, gateway"),
    "stop redis": (PINK, "stopped, Redis"),
    "cut": (GREEN, "link cut, 5 s"),
    "cut to": (GREEN, "link cut one way, to host"),
    "cut from": (GREEN, "link cut one way, from host"),
    "delay": (GREEN, "link delayed, 50 ms"),
    "lose": (GREEN, "link loses 5 %"),
}
"""Colour and name of each kind of event."""
_LINES: Final = ((4, ORANGE, "longest"), (3, PINK, "95th percentile"), (2, BLUE, "median"))
"""Column of a second's figures, colour, name."""


@picture
def timeline(figures: Mapping[str, Any]) -> Figure:
    """Latency is logarithmic; a second without a token is a break in the lines."""
    seconds, events = figures["seconds"], figures["events"]
    lanes = [kind for kind in _KINDS if any(event["kind"] == kind for event in events)]
    last = max([row[0] + 1 for row in seconds] + [event["at_s"] + event["for_s"] for event in events] + [1])
    drawn = figure(10.2, 4.4 + 0.21 * len(lanes), TITLE)
    above, below = drawn.subplots(2, sharex=True, height_ratios=(3.1, 0.4 + 0.21 * len(lanes)))
    wrong = ", ".join(f"{figures[kind]} {kind}" for kind in ("lost", "doubled", "changed"))
    above.set_title(f"{figures['requests']:,} requests, {figures['tokens']:,} tokens, {len(events)} events: {wrong}")
    _latencies(above, seconds, last)
    for event in events:  # under the lines
        span = event["at_s"], event["at_s"] + _width(event, last)
        above.axvspan(*span, color=_colour(event), alpha=0.15, linewidth=0, zorder=0)
    _lanes(below, lanes, events, last)
    return drawn


def _latencies(axes: Axes, seconds: Sequence[Sequence[float]], last: float) -> None:
    from matplotlib.ticker import LogLocator

    known = {int(row[0]): row for row in seconds}
    edges = list(range(math.ceil(last) + 1))
    for column, colour, name in _LINES:
        values = [max(known[at][column], 1.0) if at in known else math.nan for at in edges[:-1]]
        axes.stairs(values, edges, baseline=None, color=colour, label=name, linewidth=1.3)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value / 1e3:g} s" if value >= 1e3 else f"{value:g} ms")
    axes.set_ylabel("inter-token latency in each second")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, columnspacing=1.2, handlelength=1.4)


def _lanes(axes: Axes, lanes: Sequence[str], events: Sequence[Mapping[str, Any]], last: float) -> None:
    """A row for each kind: a bar as long as the event, and next to it the longest wait if that was long."""
    for lane, kind in enumerate(lanes):
        mine = sorted((event for event in events if event["kind"] == kind), key=lambda event: float(event["at_s"]))
        bars = [(event["at_s"], _width(event, last)) for event in mine]
        axes.broken_barh(bars, (lane - 0.32, 0.64), color=_KINDS[kind][0])
        following = [*(event["at_s"] for event in mine[1:]), last]
        for event, (at, width), then in zip(mine, bars, following, strict=True):
            if event["longest_gap_ms"] >= _WORTH_SAYING_MS:
                _say(axes, at, at + width, lane, f"{event['longest_gap_ms'] / 1e3:.1f} s", then - at - width, last)
    axes.set_yticks(range(len(lanes)), [_KINDS[kind][1] for kind in lanes], color=INK)
    axes.set_ylim(max(len(lanes), 1) - 0.5, -0.5)
    axes.set_xlim(0, last)
    axes.set_xlabel("seconds since the load began")


def _say(axes: Axes, left: float, right: float, lane: int, text: str, room: float, last: float) -> None:
    """Write to the right of what is there, or to its left where something follows soon or the picture ends."""
    side, at, shift = ("left", right, 3) if room > 0.04 * last else ("right", left, -3)
    axes.annotate(
        text, (at, lane), (shift, 0), textcoords="offset points", ha=side, va="center_baseline", fontsize="small"
    )


def _width(event: Mapping[str, Any], last: float) -> float:
    """Seconds; what takes no time is as wide as can be seen."""
    return max(float(event["for_s"]), last / 400)


def _colour(event: Mapping[str, Any]) -> str:
    return _KINDS[event["kind"]][0]
