"""``python perf/fleet/day_picture.py FIGURES.json OUT.svg``: the day that `expertmesh plan --trace --json` replayed."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.pictures import BLUE, GREEN, MILD, ORANGE, PINK, figure, missing, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EVERY = 3
"""Minutes to a point, which shows their maximum."""
GROUPS = ((BLUE, 3.5), (ORANGE, 1.2), (GREEN, 0.8), (PINK, 0.8))
"""Colours, and widths, so that groups are seen where they have as many seats."""


@picture
def day(figures: Mapping[str, Any]) -> Figure:
    """Requests, replicas, and requests that missed a target, by the hour of the day."""
    ways, requests = figures["ways"], figures["requests_per_s"]
    shards = ways["shard groups"]
    fixed = ways.get("fixed, as good", ways["fixed for the peak"])["replicas"]
    groups = [name for name in shards["replicas"] if name.startswith("experts/")]
    drawn = figure(10.2, 8, "A bursty day, replayed through the scaling policy")
    load, attention, seats, missed = drawn.subplots(4, sharex=True)
    _plot(load, f"{_outcomes(ways)}\n\nrequests/s", requests)
    _plot(attention, "attention workers", shards["replicas"]["attention"], label="scaled")
    _plot(attention, "", fixed["attention"], label="fixed, as good", color=MILD, linestyle="--")
    for name, (colour, width) in zip(groups, GROUPS, strict=False):
        seats_of = {"label": f"group {name.split('/')[1]}", "color": colour, "linewidth": width}
        _plot(seats, "seats of a shard group", shards["replicas"][name], **seats_of)
    most = [max(counts) for counts in zip(*(fixed[name] for name in groups), strict=True)]
    _plot(seats, "", most, label="fixed, as good (most)", color=MILD, linestyle="--")
    _plot(missed, f"requests that missed a target, % (worst of {EVERY} minutes)", _missed(shards["ended_and_met"]))
    for axes in (attention, seats):
        axes.legend(loc="lower right", bbox_to_anchor=(1, 0.98), ncols=len(groups) + 1)
    missed.set_xlim(0, len(requests) / 60)
    missed.set_xticks(range(0, len(requests) // 60 + 1, 3))
    missed.set_xlabel("hour of the day")
    return drawn


def _outcomes(ways: Mapping[str, Any]) -> str:
    found = [(name, ways[name]) for name in ("shard groups", "whole engines", "fixed, as good") if name in ways]
    return "\n".join(
        f"{name}: {way['gpu_hours']:.0f} GPU-hours, {way['attainment']:.2%} of requests within both targets"
        for name, way in found
    )


def _plot(axes: Axes, title: str, values: Sequence[float], **how: Any) -> None:
    starts = range(0, len(values), EVERY)
    edges = [minute / 60 for minute in (*starts, len(values))]
    axes.stairs([max(values[at : at + EVERY]) for at in starts], edges, baseline=None, **{"linewidth": 1.4, **how})
    axes.set_ylim(bottom=0)
    if title:
        axes.set_title(title)


def _missed(ended_and_met: Sequence[Sequence[float]]) -> list[float]:
    found, before = [], (0.0, 0.0)
    for ended, met in ended_and_met:
        new = ended - before[0]
        found.append(100 * max(0.0, new - (met - before[1])) / new if new else 0.0)
        before = ended, met
    return found


if __name__ == "__main__":
    if sentence := missing():
        sys.exit(sentence)
    Path(sys.argv[2]).write_text(day(json.loads(Path(sys.argv[1]).read_text())), encoding="utf-8")
