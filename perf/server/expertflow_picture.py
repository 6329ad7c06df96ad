"""``python -m perf.server.expertflow_picture FIGURES.json OUT.svg``: latency by final length, of what
perf.server.expertflow measured, as in figures 6.2 to 6.5 of ExpertFlow."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.pictures import BLUE, ORANGE, figure, missing, picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WAYS = {"static": ("static batches", ORANGE), "server": ("this server", BLUE)}


@picture
def latencies(figures: Mapping[str, Any]) -> Figure:
    """A panel for each rate, with a dot for each request."""
    shown = [each for each in figures["measured"] if each["way"] in WAYS]
    rates = sorted({each["rate"] for each in shown})
    drawn = figure(10.2, 3.2 * math.ceil(len(rates) / 2), "Latency of a request by its final length")
    panels = drawn.subplots(math.ceil(len(rates) / 2), 2, sharex=True, squeeze=False)
    for rate, axes in zip(rates, panels.flat, strict=False):
        for way, (name, color) in WAYS.items():
            dots = [dot for each in shown if (each["way"], each["rate"]) == (way, rate) for dot in each["requests"]]
            x, y = [length for length, _ in dots], [latency_ms / 1e3 for _, latency_ms in dots]
            axes.plot(x, y, ".", markersize=2.5, color=color, label=name)
        axes.set_ylim(bottom=0)
        axes.set_title(f"{rate:g} arrivals a second: latency, s")
    panels[0][0].legend(loc="upper left", markerscale=3)
    for axes in panels[-1]:
        axes.set_xlabel("tokens of prompt and answer")
    return drawn


if __name__ == "__main__":
    if sentence := missing():
        sys.exit(sentence)
    Path(sys.argv[2]).write_text(latencies(json.loads(Path(sys.argv[1]).read_text())), encoding="utf-8")
