"""``python -m testkit.docs.plots``: draws what it can of `docs/plots` again, from the figures that lie there and from
the kernels' measurements. The replayed day takes minutes and has a command of its own (docs/autoscaling.md)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from chaos.picture import timeline as chaos_timeline

from bench import plot
from bench.pictures import missing
from bench.report import latest
from bench.results import DEFAULT_CSV, Row, parse, read
from perf.fabric.barrier import idle
from perf.server.expertflow_picture import latencies
from testkit.kube.scaling_picture import timeline as scaling_timeline

FOLDER: Final = Path(__file__).parents[3] / "docs/plots"
SUITES: Final = {"figures": "bf16", "int4": "int4"}
"""Suites of the benchmark whose rows are drawn, and the type of the weights in them."""


def drawn() -> Iterator[tuple[str, str]]:
    """Names and texts of the pictures."""
    yield "chaos.svg", chaos_timeline(_figures("chaos"))
    scaled = _figures("scaling")
    yield "scaling.svg", scaling_timeline(scaled, scaled["title"])
    yield "barrier.svg", idle(_figures("barrier"))
    yield "expertflow.svg", latencies(_figures("expertflow"))
    yield from ((name, text) for name, text in plot.pictures(measured()) if (FOLDER / name).is_file())


def measured() -> list[Row]:
    """The last run of each suite, its fused operator alone."""
    rows = [parse(record) for record in latest(read(DEFAULT_CSV)) if record["op"] == "fused_moe"]
    return [row for row in rows if row.dtype == SUITES.get(row.suite)]


def _figures(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    if sentence := missing():
        sys.exit(sentence)
    for name, text in drawn():
        (FOLDER / name).write_text(text, encoding="utf-8")
