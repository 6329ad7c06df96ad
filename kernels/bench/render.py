"""Rows of results as the tables that people read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bench.results import Row
from bench.table import markdown, number

RELATIVE: Final = {"elephants-table1": "fp16", "elephants-gemm": "fp16"}
"""Suites whose point is speed relative to a baseline, as their paper shows it."""


def for_suite(suite: str, rows: Sequence[Row]) -> str:
    parts = [relative(rows, RELATIVE[suite])] if suite in RELATIVE else []
    return "\n\n".join([*parts, side_by_side(rows)])


def relative(rows: Sequence[Row], baseline: str) -> str:
    """How many times as fast as the baseline; columns are providers, or dtypes where there is one provider."""
    groups: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        if row.timing:
            label = row.dtype if row.provider == "ours" else row.provider
            groups.setdefault((row.shape, row.rows), {})[label] = row.timing.p50
    labels = list(dict.fromkeys(label for times in groups.values() for label in times))
    body = [
        [shape, f"{count}", *(f"{times[baseline] / times[label]:.2f}" if label in times else "-" for label in labels)]
        for (shape, count), times in groups.items()
        if baseline in times
    ]
    return markdown(["shape", "rows", *(f"{label}" for label in labels)], body)


def side_by_side(rows: Sequence[Row]) -> str:
    """One line per op, shape, dtype and rows; one column per provider: microseconds (percent of the floor).

    The last column is the fastest peer's time over ours: above 1 we are faster.
    """
    providers = list(dict.fromkeys(row.provider for row in rows if row.timing))
    groups: dict[tuple[str, str, str, int], dict[str, Row]] = {}
    for row in rows:
        groups.setdefault((row.op, row.shape, row.dtype, row.rows), {})[row.provider] = row
    header = ["op", "shape", "dtype", "rows", "floor us", *providers, "peer / ours"]
    body = []
    for (op, shape, dtype, count), members in groups.items():
        floor = next(iter(members.values())).floor_us
        cells = [_cell(members.get(name)) for name in providers]
        body.append([op, shape, dtype, f"{count}", number(floor), *cells, _ratio(members)])
    return "\n\n".join([markdown(header, body), *_memory(rows), *_failures(rows)])


def _cell(row: Row | None) -> str:
    if row is None or row.timing is None:
        return "-"
    # Where launches take all the time, as for the router, a share of the bytes' time says nothing.
    share = f" ({row.percent:.0f} %)" if row.percent is not None and row.percent >= 0.5 else ""
    mark = {"graph": "", "events": " e", "host": " cpu"}[row.timing.clock]
    return f"{number(row.timing.p50)}{share}{mark}"


def _ratio(members: dict[str, Row]) -> str:
    ours = members.get("ours")
    peers = [row.timing.p50 for name, row in members.items() if name not in ("ours", "torch") and row.timing]
    return f"{min(peers) / ours.timing.p50:.2f}" if ours and ours.timing and peers else "-"


def _memory(rows: Sequence[Row]) -> list[str]:
    known = [row for row in rows if row.memory_mib is not None]
    body = [[row.op, row.shape, f"{row.rows}", row.provider, number((row.memory_mib or 0) / 1024)] for row in known]
    return [markdown(["op", "shape", "rows", "provider", "peak extra GiB"], body)] if known else []


def _failures(rows: Sequence[Row]) -> list[str]:
    """Each distinct error once, with where it happened first."""
    first: dict[tuple[str, str], Row] = {}
    for row in rows:
        if row.error:
            first.setdefault((row.provider, row.error), row)
    lines = [f"{who}: {row.op} {row.shape} {row.dtype} rows {row.rows}: {text}" for (who, text), row in first.items()]
    return ["\n".join(lines)] if lines else []
