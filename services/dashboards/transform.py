"""A panel's frames as the table that Grafana makes of them: one line for each series, changed by transformations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.dashboards.frames import Frame, natural, reduced
from services.dashboards.model import Transformation
from services.errors import QueryFailed

Cell = str | float | None
_TIME = "Time"


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """``rows`` have a cell for each of ``columns`` that they know."""

    columns: Sequence[str]
    rows: Sequence[Mapping[str, Cell]]


def table(frames: Sequence[Frame], refs: Sequence[str], transformations: Sequence[Transformation]) -> Table:
    """Return the table of ``frames``, whose targets are ``refs``.

    Series of several targets with the same labels are one line, with a column of values for each target, as the
    transformation ``merge`` leaves them.

    Raises:
        QueryFailed: a transformation is not known here.
    """
    made = _joined(frames, refs)
    for each in transformations:
        if not each.disabled:
            made = _step(each.id)(made, each.options)
    return made


def _joined(frames: Sequence[Frame], refs: Sequence[str]) -> Table:
    several = len(refs) > 1
    values = {ref: f"Value #{ref}" if several else "Value" for ref in refs}
    rows: dict[frozenset[tuple[str, str]], dict[str, Cell]] = {}
    labels: dict[str, None] = {}
    for frame in frames:
        own = {key: value for key, value in frame.labels.items() if key != "__name__"}
        labels |= dict.fromkeys(own)
        row = rows.setdefault(frozenset(own.items()), {**own})
        row[_TIME] = frame.points[-1][0] if frame.points else None
        row[values.get(frame.ref, "Value")] = reduced(frame, "lastNotNull")
    present = [name for name in values.values() if any(name in row for row in rows.values())]
    return Table(columns=[_TIME, *sorted(labels), *present], rows=list(rows.values()))


def _step(name: str) -> Callable[[Table, Mapping[str, Any]], Table]:
    if name not in _STEPS:
        raise QueryFailed(f"The transformation {name!r} is not known here.")
    return _STEPS[name]


def _unchanged(made: Table, _options: Mapping[str, Any]) -> Table:
    return made


def _organize(made: Table, options: Mapping[str, Any]) -> Table:
    """Leave out, order and rename columns."""
    hidden = {name for name, out in (options.get("excludeByName") or {}).items() if out}
    place: Mapping[str, int] = options.get("indexByName") or {}
    names: Mapping[str, str] = {old: new for old, new in (options.get("renameByName") or {}).items() if new}
    kept = [name for name in made.columns if name not in hidden]
    kept.sort(key=lambda name: place.get(name, len(place)))
    renamed = [{names.get(key, key): value for key, value in row.items() if key in kept} for row in made.rows]
    return Table(columns=[names.get(name, name) for name in kept], rows=renamed)


def _sort(made: Table, options: Mapping[str, Any]) -> Table:
    rows = list(made.rows)
    for each in reversed(options.get("sort") or []):
        rows = _by(rows, str(each.get("field")), bool(each.get("desc")))
    return Table(columns=made.columns, rows=rows)


def _by(rows: Sequence[Mapping[str, Cell]], name: str, down: bool) -> list[Mapping[str, Cell]]:
    known = [row for row in rows if not _is_empty(row.get(name))]
    empty = [row for row in rows if _is_empty(row.get(name))]
    return sorted(known, key=lambda row: _sortable(row[name]), reverse=down) + empty


def _is_empty(cell: Cell) -> bool:
    return cell is None or (isinstance(cell, float) and math.isnan(cell))


def _sortable(cell: Cell) -> tuple[int, float, str]:
    return (0, cell, "") if isinstance(cell, int | float) else (1, 0.0, str(cell))


def _filter_names(made: Table, options: Mapping[str, Any]) -> Table:
    kept = (options.get("include") or {}).get("names")
    return made if kept is None else Table(columns=[name for name in made.columns if name in kept], rows=made.rows)


def _limit(made: Table, options: Mapping[str, Any]) -> Table:
    return Table(columns=made.columns, rows=made.rows[: int(options.get("limitField") or 10)])


def _join_by(made: Table, options: Mapping[str, Any]) -> Table:
    """Put rows with the same cell in one column into one."""
    name = str(options.get("byField") or _TIME)
    rows: dict[Cell, dict[str, Cell]] = {}
    for row in made.rows:
        rows.setdefault(row.get(name), {}).update(row)
    return Table(columns=made.columns, rows=list(rows.values()))


def _matrix(made: Table, options: Mapping[str, Any]) -> Table:
    """Make a row for each value of one column, and a column for each of another."""
    across, down = str(options.get("columnField") or _TIME), str(options.get("rowField") or _TIME)
    value = str(options.get("valueField") or "Value")
    corner = f"{down}\\{across}"
    rows: dict[str, dict[str, Cell]] = {}
    for row in made.rows:
        key = str(row.get(down, ""))
        rows.setdefault(key, {corner: key})[str(row.get(across, ""))] = row.get(value)
    columns = sorted({str(row.get(across, "")) for row in made.rows}, key=natural)
    return Table(columns=[corner, *columns], rows=[rows[key] for key in sorted(rows, key=natural)])


_STEPS = {
    "organize": _organize,
    "sortBy": _sort,
    "filterFieldsByName": _filter_names,
    "limit": _limit,
    "joinByField": _join_by,
    "groupingToMatrix": _matrix,
    "merge": _unchanged,
}
"""Transformations that are known, by Grafana's names. :func:`table` has merged already."""


def sorted_as_panel_wants(made: Table, sort_by: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table in the order of the panel's option ``sortBy``."""
    options = [{"field": each.get("displayName"), "desc": each.get("desc")} for each in sort_by]
    return _sort(made, {"sort": options})
