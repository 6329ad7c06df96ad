"""A release's scaling as Prometheus recorded it, and a picture of that: tokens, latency, and replicas of each target.

`python -m testkit.kube.scaling_picture FIGURES.json PICTURE.svg` draws figures again that a test wrote (KUBE_PLOTS).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pocket_moe.card.plots import Picture, Scale, steps
from testkit.kube.prometheus import Line, Prometheus

_WIDTH, _LEFT, _RIGHT, _TOP, _GAP = 980, 150, 24, 78, 34
_LATENCY, _LANE = 150, 64
_COUNTS = (("wanted", "d"), ("told", "b"), ("ready", "a"))
"""Series and colours of a lane: wanted by the scheduler, set in Kubernetes, ready."""
_QUANTILE = "histogram_quantile(0.99, sum by (le) (rate(expertmesh_inter_token_latency_seconds_bucket{%s}[10s]))) * 1e3"


def figures(prometheus: Prometheus, namespace: str, marks: Mapping[str, float], ended: float) -> dict[str, Any]:
    """``marks``: what began when, Unix times, the first of them being the beginning of all."""
    began, of = min(marks.values()), f'namespace="{namespace}"'

    def lines(query: str) -> dict[str, Line]:
        found = prometheus.lines(query, began, ended)
        return {name: [(round(at - began, 1), value) for at, value in line] for name, line in found.items()}

    counts = {
        name: lines(f'max by (role, shard) (expertmesh_{name}_replicas{{{of},role!="gateway"}})') for name, _ in _COUNTS
    }
    return {
        "seconds": round(ended - began, 1),
        "marks": {name: round(at - began, 1) for name, at in marks.items()},
        "p99_ms": lines(_QUANTILE % of).get("", []),
        "tokens": lines(f"sum(rate(expertmesh_generation_tokens_total{{{of}}}[10s]))").get("", []),
        "counts": counts,
    }


def timeline(found: Mapping[str, Any], title: str) -> str:
    """SVG. A second of which Prometheus has nothing is a break in the lines."""
    targets = sorted({target for lines in found["counts"].values() for target in lines})
    picture = Picture(_WIDTH, _TOP + 2 * (_LATENCY + _GAP) + len(targets) * (_LANE + 14) + 40, title)
    x_axis = Scale(0, found["seconds"], _LEFT, _WIDTH - _RIGHT)
    picture.text(_LEFT, 24, title, size=17)
    _legend(picture)
    top = float(_TOP)
    top = _plot(picture, x_axis, top, found["p99_ms"], "p99 inter-token", "ms", "a")
    top = _plot(picture, x_axis, top, found["tokens"], "tokens", "/s", "c")
    for target in targets:
        lines = {name: found["counts"][name].get(target, []) for name, _ in _COUNTS}
        top = _lane(picture, x_axis, top, target, lines)
    for name, at in found["marks"].items():
        picture.rule(x_axis.at(at), _TOP - 6, x_axis.at(at), top - 14)
        picture.text(x_axis.at(at) + 3, _TOP - 8, name, size=10, style="mild")
    for value in steps(0, found["seconds"], 10):
        picture.text(x_axis.at(value), top + 2, f"{value:g}", anchor="middle", style="mild")
    picture.text(_WIDTH - _RIGHT, top + 18, "seconds", anchor="end", style="mild")
    return picture.svg()


def _legend(picture: Picture) -> None:
    x = float(_LEFT)
    for name, style in _COUNTS:
        picture.line([(x, 44), (x + 22, 44)], style=style)
        picture.text(x + 28, 48, f"replicas {name}")
        x += 130


def _plot(picture: Picture, x_axis: Scale, top: float, line: Line, name: str, unit: str, style: str) -> float:
    """Draw a plot. Returns where the next one begins."""
    bottom = top + _LATENCY
    y_axis = Scale(0, max([value for _, value in line if value == value], default=1.0) * 1.05, bottom, top)
    for value in steps(0, max([value for _, value in line if value == value], default=1.0), 3):
        picture.rule(_LEFT, y_axis.at(value), _WIDTH - _RIGHT, y_axis.at(value))
        picture.text(_LEFT - 8, y_axis.at(value) + 4, f"{value:g} {unit}", anchor="end", style="mild")
    picture.text(8, top + 10, name)
    for run in _runs(line):
        picture.line([(x_axis.at(at), y_axis.at(value)) for at, value in run], style=style)
    return bottom + _GAP


def _lane(picture: Picture, x_axis: Scale, top: float, target: str, lines: Mapping[str, Line]) -> float:
    """Steps of one target's counts, drawn next to each other where they are the same."""
    bottom = top + _LANE
    highest = max([value for line in lines.values() for _, value in line], default=1.0)
    y_axis = Scale(0, max(highest, 1.0), bottom, top + 6)
    picture.text(8, top + 14, target.replace("experts ", "experts of group "))
    for value in range(int(highest) + 1):
        picture.rule(_LEFT, y_axis.at(value), _WIDTH - _RIGHT, y_axis.at(value))
        picture.text(_LEFT - 8, y_axis.at(value) + 4, str(value), anchor="end", style="mild")
    for shift, (name, style) in zip((-2.0, 0.0, 2.0), _COUNTS, strict=True):
        for run in _runs(lines[name]):
            points = [(x_axis.at(at), y_axis.at(value) + shift) for at, value in _stairs(run)]
            picture.line(points, style=style)
    return bottom + 14


def _stairs(line: Sequence[tuple[float, float]]) -> Line:
    """A count stays until it changes."""
    found: Line = []
    for at, value in line:
        if found and found[-1][1] != value:
            found.append((at, found[-1][1]))
        found.append((at, value))
    return found


def _runs(line: Line) -> list[Line]:
    """Consecutive seconds together, without those of which nothing is known."""
    found: list[Line] = []
    for at, value in line:
        if value != value:  # NaN: no token came
            continue
        if found and at - found[-1][-1][0] <= 2:
            found[-1].append((at, value))
        else:
            found.append([(at, value)])
    return found


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    drawn = json.loads(source.read_text(encoding="utf-8"))
    target.write_text(timeline(drawn, drawn["title"]), encoding="utf-8")
