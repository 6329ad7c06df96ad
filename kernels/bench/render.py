"""Rows of results as the tables that people read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from bench.results import Row
from bench.table import markdown, number

RELATIVE: Final = {"elephants-table1": "fp16", "elephants-gemm": "fp16"}
"""Suites whose point is speed relative to a baseline, as their paper shows it."""
BY_DTYPE: Final = ("int4",)
"""Suites with one peer, whose point is what the weights' dtype changes."""
_MISSING: Final = "-"
Line = tuple[Sequence[str], Sequence[str]]
"""What was measured, and what came out."""


def for_suite(suite: str, rows: Sequence[Row]) -> str:
    if suite in RELATIVE:
        return relative(rows, RELATIVE[suite])
    return by_dtype(rows) if suite in BY_DTYPE else side_by_side(rows)


def relative(rows: Sequence[Row], baseline: str) -> str:
    """One column per provider, or per dtype where there is one provider: microseconds (percent of the floor), and how
    many times as fast as the baseline.
    """
    labelled = [(row.dtype if row.provider == "ours" else row.provider, row) for row in rows]
    times = {_place(row): row.timing.p50 for label, row in labelled if label == baseline and row.timing}
    cells = {
        (_place(row), label): _cell(row) if label == baseline else _compared(row, times.get(_place(row)))
        for label, row in labelled
    }
    return _parts(_pivot(cells), rows)


def by_dtype(rows: Sequence[Row]) -> str:
    """One column per dtype: our microseconds (percent of the floor), and the fastest peer's time over ours."""
    times: dict[tuple[object, ...], float] = {}
    for row in rows:
        if _is_peer(row) and row.timing:
            key = (_place(row), row.dtype)
            times[key] = min(row.timing.p50, times.get(key, row.timing.p50))
    ours = [row for row in rows if row.provider == "ours"]
    cells = {(_place(row), row.dtype): _compared(row, times.get((_place(row), row.dtype))) for row in ours}
    return _parts(_pivot(cells), rows)


def side_by_side(rows: Sequence[Row]) -> str:
    """One line per op, shape, dtype and rows; one column per provider: microseconds (percent of the floor). Then the
    fastest peer's time over ours, above 1 where we are faster, and the most memory that each provider took.
    """
    providers = list(dict.fromkeys(row.provider for row in rows if row.timing))
    groups: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        groups.setdefault((row.op, row.shape, row.dtype, f"{row.rows}"), {})[row.provider] = row
    lines = []
    for keys, members in groups.items():
        floor = number(next(iter(members.values())).floor_us)
        found = [members.get(name) for name in providers]
        lines.append((keys, [floor, *map(_cell, found), _ratio(members), *map(_memory, found)]))
    header = ["floor us", *providers, "peer / ours", *(f"{name} GiB" for name in providers)]
    return _parts(_table(("op", "shape", "dtype", "rows"), header, lines), rows)


def _place(row: Row) -> tuple[str, str, str]:
    return row.op, row.shape, f"{row.rows}"


def _pivot(cells: Mapping[tuple[tuple[str, str, str], str], str]) -> str:
    """Cells by (op, shape, rows) and the column's label."""
    labels = list(dict.fromkeys(label for _, label in cells))
    places = list(dict.fromkeys(place for place, _ in cells))
    lines = [(place, [cells.get((place, label), _MISSING) for label in labels]) for place in places]
    return _table(("op", "shape", "rows"), labels, lines)


def _table(keys: Sequence[str], header: Sequence[str], lines: Sequence[Line]) -> str:
    """What all lines share is said once, above; columns without a number are left out."""
    same = [at for at in range(len(keys)) if len({line[0][at] for line in lines}) == 1]
    full = [at for at in range(len(header)) if any(line[1][at] != _MISSING for line in lines)]

    def kept(names: Sequence[str], cells: Sequence[str]) -> list[str]:
        return [*(name for at, name in enumerate(names) if at not in same), *(cells[at] for at in full)]

    table = markdown(kept(keys, header), [kept(*line) for line in lines])
    shared = ", ".join(f"{keys[at]} {lines[0][0][at]}" for at in same)
    return f"All lines: {shared}.\n\n{table}" if shared else table


def _parts(table: str, rows: Iterable[Row]) -> str:
    return "\n\n".join([table, *_failures(rows)])


def _cell(row: Row | None) -> str:
    if row is None or row.timing is None:
        return _MISSING
    # Where launches take all the time, as for the router, a share of the bytes' time says nothing.
    share = f" ({row.percent:.0f} %)" if row.percent is not None and row.percent >= 0.5 else ""
    mark = {"graph": "", "events": " e", "host": " cpu"}[row.timing.clock]
    return f"{number(row.timing.p50)}{share}{mark}"


def _compared(row: Row, other: float | None) -> str:
    """The cell, and ``other`` (microseconds) over the row's time. Example: "106 (79 %) 1.04x"."""
    return f"{_cell(row)} {other / row.timing.p50:.2f}x" if other and row.timing else _cell(row)


def _ratio(members: Mapping[str, Row]) -> str:
    ours = members.get("ours")
    peers = [row.timing.p50 for row in members.values() if _is_peer(row) and row.timing]
    return f"{min(peers) / ours.timing.p50:.2f}" if ours and ours.timing and peers else _MISSING


def _is_peer(row: Row) -> bool:
    """Another way of ours and the plain-torch way are none."""
    return row.provider not in ("ours", "ours_weight_only", "torch")


def _memory(row: Row | None) -> str:
    return _MISSING if row is None or row.memory_mib is None else number(row.memory_mib / 1024)


def _failures(rows: Iterable[Row]) -> list[str]:
    """Each distinct error once, with where it happened first."""
    first: dict[tuple[str, str], Row] = {}
    for row in rows:
        if row.error:
            first.setdefault((row.provider, row.error), row)
    lines = [f"{who}: {row.op} {row.shape} {row.dtype} rows {row.rows}: {text}" for (who, text), row in first.items()]
    return ["\n".join(lines)] if lines else []
