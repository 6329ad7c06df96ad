"""``python perf/fleet/day_picture.py FIGURES.json OUT.svg``: the day that `expertmesh plan --trace --json` replayed."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "examples/pocket-moe")]

from pocket_moe.card.plots import Picture, Scale, steps  # noqa: E402

WIDTH, LEFT, RIGHT, TOP = 980, 64, 24, 92
HEIGHT, GAP = 130, 40
EVERY = 3
"""Minutes to a point, which shows their maximum."""
SHADES = ("a", "b", "c", "d")


def picture(figures: Mapping[str, Any]) -> str:
    """SVG: requests, replicas, and requests that missed a target, by the hour of the day."""
    ways, minutes = figures["ways"], len(figures["requests_per_s"])
    shards = ways["shard groups"]
    groups = [name for name in shards["replicas"] if name.startswith("experts/")]
    drawing = Picture(WIDTH, TOP + 4 * (HEIGHT + GAP), "A day of load and the replicas that follow it")
    hours = Scale(0, minutes / 60, LEFT, WIDTH - RIGHT)
    _head(drawing, ways)
    fixed = ways.get("fixed, as good", ways["fixed for the peak"])["replicas"]
    rows: list[tuple[str, list[tuple[str, str, Sequence[float]]]]] = [
        ("requests/s", [("b", "", figures["requests_per_s"])]),
        (
            "attention workers",
            [("b", "scaled", shards["replicas"]["attention"]), ("d", "fixed, as good", fixed["attention"])],
        ),
        (
            "seats of a shard group",
            [
                *(
                    (shade, f"group {name.split('/')[1]}", shards["replicas"][name])
                    for shade, name in zip(SHADES[:3], groups, strict=False)
                ),
                ("d", "fixed, as good (most)", [max(fixed[name][at] for name in groups) for at in range(minutes)]),
            ],
        ),
        (f"missed a target, % of the worst of {EVERY} minutes", [("a", "", _missed(shards["ended_and_met"], minutes))]),
    ]
    for number, (title, lines) in enumerate(rows):
        _panel(drawing, hours, TOP + number * (HEIGHT + GAP), title, lines, minutes)
    drawing.text(WIDTH - RIGHT, TOP + 4 * (HEIGHT + GAP) - 8, "hour of the day", anchor="end", style="mild")
    return drawing.svg()


def _head(drawing: Picture, ways: Mapping[str, Any]) -> None:
    drawing.text(LEFT, 26, "A bursty day, replayed through the scaling policy", size=17)
    for line, name in enumerate(("shard groups", "whole engines", "fixed, as good")):
        if name in ways:
            way = ways[name]
            said = f"{name}: {way['gpu_hours']:.0f} GPU-hours, {way['attainment']:.2%} of requests within both targets"
            drawing.text(LEFT, 44 + 14 * line, said, size=12, style="mild")


def _panel(
    drawing: Picture,
    hours: Scale,
    top: float,
    title: str,
    lines: Sequence[tuple[str, str, Sequence[float]]],
    minutes: int,
) -> None:
    highest = max(max(values[:minutes]) for _, _, values in lines) or 1
    height = Scale(0, highest, top + HEIGHT, top)
    for value in steps(0, highest, 4):
        drawing.rule(LEFT, height.at(value), WIDTH - RIGHT, height.at(value))
        drawing.text(LEFT - 6, height.at(value) + 4, f"{value:g}", anchor="end", style="mild")
    x = LEFT
    drawing.text(x, top - 8, title)
    x += 8 + 7 * len(title)
    for style, name, values in lines:
        points = [
            (hours.at(minute / 60), height.at(max(values[minute : minute + EVERY])))
            for minute in range(0, minutes, EVERY)
        ]
        drawing.line(_corners(points), style=style, faint=style == "d")
        if name:
            drawing.line([(x, top - 12), (x + 16, top - 12)], style=style, faint=style == "d")
            drawing.text(x + 20, top - 8, name, style="mild")
            x += 34 + 6.5 * len(name)
    for hour in range(0, minutes // 60 + 1, 3):
        drawing.text(hours.at(hour), top + HEIGHT + 14, str(hour), anchor="middle", style="mild")


def _corners(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """``points`` without those in the middle of a level stretch."""
    return [
        point
        for at, point in enumerate(points)
        if at in (0, len(points) - 1) or not points[at - 1][1] == point[1] == points[at + 1][1]
    ]


def _missed(ended_and_met: Sequence[Sequence[float]], minutes: int) -> list[float]:
    found, before = [], (0.0, 0.0)
    for ended, met in ended_and_met[:minutes]:
        new = ended - before[0]
        found.append(100 * max(0.0, new - (met - before[1])) / new if new else 0.0)
        before = ended, met
    return found


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(picture(json.loads(Path(sys.argv[1]).read_text())), encoding="utf-8")
