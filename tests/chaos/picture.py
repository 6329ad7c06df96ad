"""A run's figures in, its timeline out: inter-token latency of every second, and below it what happened when."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pocket_moe.card.plots import Picture, Scale, steps

_WIDTH, _LEFT, _RIGHT, _TOP, _PLOT, _LANE = 980, 144, 24, 84, 300, 20
_MIN_MS, _WORTH_SAYING_MS = 10.0, 500.0
"""Figures below the first are drawn at it; waits above the second are written next to their event."""
_KINDS: Final[Mapping[str, tuple[str, str]]] = {
    "kill experts": ("a", "kill -9, expert worker"),
    "kill attention": ("a", "kill -9, attention worker"),
    "kill leader": ("a", "kill -9, leading scheduler"),
    "kill gateway": ("a", "kill -9, gateway"),
    "kill redis": ("a", "kill -9, Redis"),
    "leave experts": ("d", "SIGTERM, expert worker"),
    "stop experts": ("d", "stopped, expert worker"),
    "stop attention": ("d", "stopped, attention worker"),
    "stop leader": ("d", "stopped, leading scheduler"),
    "stop gateway": ("d", "stopped, gateway"),
    "stop redis": ("d", "stopped, Redis"),
    "cut": ("c", "link cut, 5 s"),
    "cut to": ("c", "link cut one way, to host"),
    "cut from": ("c", "link cut one way, from host"),
    "delay": ("c", "link delayed, 50 ms"),
    "lose": ("c", "link loses 5 %"),
}
"""Colour and name of each kind of event."""
_LINES: Final = ((4, "a", "longest"), (3, "d", "95th percentile"), (2, "b", "median"))
"""Column of a second's figures, colour, name."""


def timeline(figures: Mapping[str, Any]) -> str:
    """SVG. Latency is logarithmic; a second without a token is a break in the lines."""
    seconds, events = figures["seconds"], figures["events"]
    lanes = [kind for kind in _KINDS if any(event["kind"] == kind for event in events)]
    bottom = _TOP + _PLOT
    picture = Picture(_WIDTH, bottom + 44 + _LANE * len(lanes) + 16, "Inter-token latency while things die")
    last = max([row[0] + 1 for row in seconds] + [event["at_s"] + event["for_s"] for event in events] + [1])
    x_axis = Scale(0, last, _LEFT, _WIDTH - _RIGHT)
    y_axis = _decades([row[2] for row in seconds] + [row[4] for row in seconds])
    _head(picture, figures)
    for event in events:  # under the lines
        picture.bar(x_axis.at(event["at_s"]), _TOP, _width(x_axis, event), _PLOT, style=_colour(event), opacity=0.12)
    _axes(picture, x_axis, y_axis, last)
    for column, style, _ in _LINES:
        for run in _runs(seconds):
            points = [(x_axis.at(row[0] + 0.5), y_axis.at(_log(row[column]))) for row in run]
            picture.line(points, style=style, faint=column == 4)
    _lanes(picture, x_axis, lanes, events, bottom + 44)
    return picture.svg()


def _head(picture: Picture, figures: Mapping[str, Any]) -> None:
    wrong = ", ".join(f"{figures[kind]} {kind}" for kind in ("lost", "doubled", "changed"))
    picture.text(_LEFT, 24, "What a client waits for the next token while parts of the deployment die", size=17)
    said = f"{figures['requests']:,} requests, {figures['tokens']:,} tokens, {len(figures['events'])} events: {wrong}"
    picture.text(_LEFT, 43, said, size=12, style="mild")
    x = float(_LEFT)
    for _, style, name in reversed(_LINES):
        picture.line([(x, 62), (x + 22, 62)], style=style, faint=name == "longest")
        picture.text(x + 28, 66, f"{name} of each second")
        x += 62 + 6.2 * len(f"{name} of each second")


def _axes(picture: Picture, x_axis: Scale, y_axis: _Logarithmic, last: float) -> None:
    bottom = _TOP + _PLOT
    for power in y_axis.powers:
        picture.rule(_LEFT, y_axis.at(power), _WIDTH - _RIGHT, y_axis.at(power))
        label = f"{10**power:g} ms" if power < 3 else f"{10 ** (power - 3):g} s"
        picture.text(_LEFT - 8, y_axis.at(power) + 4, label, anchor="end", style="mild")
    picture.text(_LEFT - 8, _TOP - 10, "inter-token latency", anchor="end", style="mild")
    for value in steps(0, last, 10):
        picture.text(x_axis.at(value), bottom + 18, f"{value:g}", anchor="middle", style="mild")
    picture.text(_WIDTH - _RIGHT, bottom + 34, "seconds since the load began", anchor="end", style="mild")


def _lanes(
    picture: Picture, x_axis: Scale, lanes: Sequence[str], events: Sequence[Mapping[str, Any]], top: float
) -> None:
    """A row for each kind: a bar as long as the event, and next to it the longest wait if that was long."""
    for number, kind in enumerate(lanes):
        y = top + number * _LANE
        picture.text(_LEFT - 8, y + 10, _KINDS[kind][1], size=10, anchor="end")
        picture.rule(_LEFT, y + 7, _WIDTH - _RIGHT, y + 7)
        for event in events:
            if event["kind"] == kind:
                x, width, waited = x_axis.at(event["at_s"]), _width(x_axis, event), event["longest_gap_ms"]
                picture.bar(x, y + 1, width, 12, style=_colour(event))
                if waited >= _WORTH_SAYING_MS:
                    _say(picture, x, x + width, y + 10, f"{waited / 1e3:.1f} s")


def _say(picture: Picture, left: float, right: float, y: float, text: str) -> None:
    """Write to the right of what is there, or to its left where the picture ends."""
    if right + 26 > _WIDTH - _RIGHT:
        picture.text(left - 3, y, text, size=9, anchor="end")
    else:
        picture.text(right + 3, y, text, size=9)


def _width(x_axis: Scale, event: Mapping[str, Any]) -> float:
    return max(2.0, x_axis.at(event["for_s"]) - x_axis.at(0))


def _colour(event: Mapping[str, Any]) -> str:
    return _KINDS[event["kind"]][0]


class _Logarithmic(Scale):
    """A scale from one power of ten to another."""

    def __init__(self, low: int, high: int) -> None:
        super().__init__(low, high, _TOP + _PLOT, _TOP)
        self.powers = range(low, high + 1)


def _decades(milliseconds: Sequence[float]) -> _Logarithmic:
    logs = [_log(value) for value in milliseconds] or [0.0]
    return _Logarithmic(math.floor(min(logs)), math.ceil(max(logs)))


def _log(milliseconds: float) -> float:
    return math.log10(max(milliseconds, _MIN_MS))


def _runs(seconds: Sequence[Sequence[float]]) -> list[list[Sequence[float]]]:
    """Consecutive seconds together."""
    found: list[list[Sequence[float]]] = []
    for row in seconds:
        if found and row[0] == found[-1][-1][0] + 1:
            found[-1].append(row)
        else:
            found.append([row])
    return found
