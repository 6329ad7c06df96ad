"""A release's scaling as Prometheus recorded it, and a picture of that: tokens, latency, and replicas of each target.

`python -m testkit.kube.scaling_picture FIGURES.json PICTURE.svg` draws figures again that a test wrote (KUBE_PLOTS).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.pictures import BLUE, GREEN, MILD, ORANGE, PINK, figure, missing, picture
from testkit.kube.prometheus import Line, Prometheus

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COUNTS = (("wanted", PINK, 6.0), ("told", BLUE, 3.5), ("ready", ORANGE, 1.2))
"""Series of a target, colours, and widths, so that all are seen where they are the same."""
_NAMES = {"wanted": "replicas wanted by the scheduler", "told": "set in Kubernetes", "ready": "ready"}
_QUANTILE = "histogram_quantile(0.99, sum by (le) (rate(expertmesh_inter_token_latency_seconds_bucket{%s}[10s]))) * 1e3"


def figures(prometheus: Prometheus, namespace: str, marks: Mapping[str, float], ended: float) -> dict[str, Any]:
    """``marks``: what began when, Unix times, the first of them being the beginning of all."""
    began, of = min(marks.values()), f'namespace="{namespace}"'

    def lines(query: str) -> dict[str, Line]:
        found = prometheus.lines(query, began, ended)
        return {name: [(round(at - began, 1), value) for at, value in line] for name, line in found.items()}

    counts = {
        name: lines(f'max by (role, shard) (expertmesh_{name}_replicas{{{of},role!="gateway"}})')
        for name, _, _ in _COUNTS
    }
    return {
        "seconds": round(ended - began, 1),
        "marks": {name: round(at - began, 1) for name, at in marks.items()},
        "p99_ms": lines(_QUANTILE % of).get("", []),
        "tokens": lines(f"sum(rate(expertmesh_generation_tokens_total{{{of}}}[10s]))").get("", []),
        "counts": counts,
    }


@picture
def timeline(found: Mapping[str, Any], title: str) -> Figure:
    """A second of which Prometheus has nothing is a break in the lines."""
    targets = sorted({target for lines in found["counts"].values() for target in lines})
    drawn = figure(10.2, 4.4 + 0.8 * len(targets), title)
    plots = drawn.subplots(2 + len(targets), sharex=True, height_ratios=[2, 2, *(1 for _ in targets)])
    labels, colours = ("p99 inter-token\nlatency, ms", "tokens/s"), (MILD, GREEN)
    for axes, key, label, colour in zip(plots[:2], ("p99_ms", "tokens"), labels, colours, strict=True):
        axes.plot(*_broken(found[key]), color=colour)
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    for axes, target in zip(plots[2:], targets, strict=True):
        _replicas(axes, target, {name: found["counts"][name].get(target, []) for name, _, _ in _COUNTS})
    for name, at in found["marks"].items():
        for axes in plots:
            axes.axvline(at, color=MILD, linewidth=0.8, linestyle=":")
        plots[0].annotate(name, (at, 1), (2, 2), xycoords=("data", "axes fraction"), textcoords="offset points")
    plots[-1].set_xlim(0, found["seconds"])
    plots[-1].set_xlabel("seconds")
    if targets:
        drawn.legend(handles=plots[-1].get_lines()[: len(_COUNTS)], loc="outside lower left", ncols=3)
    return drawn


def _replicas(axes: Axes, target: str, lines: Mapping[str, Line]) -> None:
    for name, colour, width in _COUNTS:
        axes.step(*_broken(lines[name]), where="post", color=colour, linewidth=width, label=_NAMES[name])
    highest = int(max([value for line in lines.values() for _, value in line if value == value], default=1.0))
    axes.set_yticks(range(max(highest, 1) + 1))
    axes.set_ylim(-0.2, max(highest, 1) + 0.4)
    axes.set_ylabel(target.replace("experts ", "experts of\ngroup "))


def _broken(line: Line) -> tuple[list[float], list[float]]:
    """Seconds and values, with a NaN wherever more than two seconds are missing."""
    times: list[float] = []
    values: list[float] = []
    for at, value in line:
        if times and at - times[-1] > 2:
            times.append(at)
            values.append(float("nan"))
        times.append(at)
        values.append(value)
    return times, values


if __name__ == "__main__":
    if sentence := missing():
        sys.exit(sentence)
    source, target = map(Path, sys.argv[1:])
    drawn = json.loads(source.read_text(encoding="utf-8"))
    target.write_text(timeline(drawn, drawn["title"]), encoding="utf-8")
