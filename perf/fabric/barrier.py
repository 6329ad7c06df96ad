"""Idle share of expert workers with and without a barrier across attention workers (ExpertFlow, figures 3.2 and 3.3).

    PYTHONPATH=.:tests:examples/pocket-moe .venv/bin/python perf/fabric/barrier.py --svg docs/plots/barrier.svg

Expert servers in processes, tcp links, attention sources in threads. Experts and attention sleep for their time instead
of computing, so that two cores can play seven machines; frames, inbox, joining and routing are real. Two minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from perf.kit.barrier import Outcome, Source, measure, stage
from pocket_moe.card.plots import Picture, Scale

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
Results = Mapping[str, tuple[Outcome, Outcome]]
"""Load -> with the barrier, without."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--svg", type=Path, help="where the picture goes")
    args = parser.parse_args()
    print(f"{WORKERS} expert workers; rows of each source; 'idle' by worker, in per cent")
    print(f"{'load':20} {'rows':>16}   barrier idle  rows/s     free idle  rows/s   gain")
    results = {}
    for name, sources in LOADS.items():
        results[name] = both_ways(sources, args.seconds)
        print(line(name, sources, *results[name]), flush=True)
    if args.svg:
        args.svg.write_text(picture(results))


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


def picture(results: Results) -> str:
    """Two bars a load: the mean over workers, with a mark for the one that idles most."""
    left, height = 140, 14
    image = Picture(640, 76 + 42 * len(results), "Idle share of expert workers, with and without a barrier")
    image.text(left, 20, "Idle share of the expert workers, in per cent", size=15)
    image.text(left, 38, "bar: mean over 3 workers, line: the one that idles most", style="mild")
    image.text(left + 340, 38, "barrier in each layer", style="name a")
    image.text(left + 340, 54, "no barrier", style="name b")
    scale = Scale(0, 1, left, 590)
    for place, (name, ways) in enumerate(results.items()):
        top = 62 + 42 * place
        image.text(left - 8, top + height + 3, name, anchor="end")
        for row, (way, style) in enumerate(zip(ways, ("a", "b"), strict=True)):
            y = top + row * (height + 1)
            image.bar(left, y, scale.at(way.mean_idle) - left, height, style=style, opacity=0.75)
            image.bar(scale.at(max(way.idle)) - 1, y, 2, height, style=style)
            image.text(scale.at(max(way.idle)) + 6, y + 11, f"{100 * way.mean_idle:.0f}", size=10, style="mild")
    return image.svg()


if __name__ == "__main__":
    main()
