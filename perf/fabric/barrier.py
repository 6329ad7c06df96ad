"""Idle share of expert workers with and without a barrier across attention workers (ExpertFlow, figures 3.2 and 3.3).

    PYTHONPATH=.:tests .venv/bin/python perf/fabric/barrier.py --json FIGURES.json --svg PICTURE.svg

Expert servers in processes, tcp links, attention sources in threads. Experts and attention sleep for their time instead
of computing, so that two cores can play seven machines; frames, inbox, joining and routing are real. Two minutes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.pictures import BLUE, INK, ORANGE, figure, missing, picture
from perf.kit.barrier import Outcome, Source, measure, stage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORKERS = 3
EXPERT_ROW_S, ATTENTION_ROW_S = 500e-6, 1000e-6
"""Seconds per row and slot of experts, and per row of attention."""
LOADS: Mapping[str, Sequence[Source]] = {
    f"{len(rows)} sources, {name}": [Source(rows=count, row_s=ATTENTION_ROW_S) for count in rows]
    for name, rows in (
        ("even", (24, 24)),
        ("uneven", (40, 8)),
        ("even", (16, 16, 16)),
        ("uneven", (32, 12, 4)),
        ("even", (12, 12, 12, 12)),
        ("uneven", (30, 10, 5, 3)),
    )
}
WAYS = ("barrier in each layer", "no barrier")
Results = Mapping[str, tuple[Outcome, Outcome]]
"""Load -> with the barrier, without."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--json", type=Path, help="where the figures of the picture go")
    parser.add_argument("--svg", type=Path, help="where the picture goes")
    args = parser.parse_args()
    if args.svg and (sentence := missing()):
        parser.error(sentence)
    print(f"{WORKERS} expert workers; rows of each source; 'idle' by worker, in per cent")
    print(f"{'load':20} {'rows':>16}   barrier idle  rows/s     free idle  rows/s   gain")
    results = {}
    for name, sources in LOADS.items():
        results[name] = both_ways(sources, args.seconds)
        print(line(name, sources, *results[name]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(figures(results), indent=1) + "\n", encoding="utf-8")
    if args.svg:
        args.svg.write_text(idle(figures(results)), encoding="utf-8")


def both_ways(sources: Sequence[Source], seconds: float) -> tuple[Outcome, Outcome]:
    with stage(WORKERS, len(sources), row_s=EXPERT_ROW_S) as (experts, links):
        held, free = (measure(experts, links, sources, barrier=barrier, seconds=seconds) for barrier in (True, False))
    return held, free


def line(name: str, sources: Sequence[Source], held: Outcome, free: Outcome) -> str:
    rows = "+".join(str(source.rows) for source in sources)
    cells = [f"{_per_cent(way.idle):>14} {sum(way.rows_per_s):7.0f}" for way in (held, free)]
    gain = sum(free.rows_per_s) / sum(held.rows_per_s)
    return f"{name:20} {rows:>16} {cells[0]} {cells[1]} {gain:6.2f}"


def _per_cent(shares: Sequence[float]) -> str:
    return " ".join(f"{100 * share:.0f}" for share in shares)


def figures(results: Results) -> dict[str, Any]:
    """What the picture shows: load -> way -> idle shares, the mean over workers and the one that idles most."""
    return {
        name: {
            way: {"mean": round(outcome.mean_idle, 4), "most": round(max(outcome.idle), 4)}
            for way, outcome in zip(WAYS, ways, strict=True)
        }
        for name, ways in results.items()
    }


@picture
def idle(figures: Mapping[str, Any]) -> Figure:
    """Two bars a load: the mean over workers, with a mark for the one that idles most."""
    drawn = figure(6.6, 1.2 + 0.48 * len(figures), "Idle share of the expert workers")
    axes = drawn.subplots()
    for way, shift, colour in zip(WAYS, (-0.2, 0.2), (ORANGE, BLUE), strict=True):
        places, shares = [place + shift for place in range(len(figures))], [ways[way] for ways in figures.values()]
        bars = axes.barh(places, [share["mean"] for share in shares], height=0.37, color=colour, alpha=0.7, label=way)
        axes.bar_label(bars, [f"{100 * share['mean']:.0f} %" for share in shares], label_type="center", color=INK)
        axes.scatter([share["most"] for share in shares], places, marker="D", s=16, color=colour)
    axes.set_yticks(range(len(figures)), list(figures), color=INK)
    axes.set_ylim(len(figures) - 0.5, -0.5)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
    axes.grid(visible=False)
    axes.set_title(f"bar: mean over {WORKERS} workers, diamond: the one that idles most")
    drawn.legend(loc="outside lower center", ncols=2)
    return drawn


if __name__ == "__main__":
    main()
