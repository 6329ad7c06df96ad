"""What a panel's queries gave, ready to be drawn: named series, and one value of a series."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """A series with the name that its legend has. ``ref`` is the target's letter; points without a value are away."""

    name: str
    labels: Mapping[str, str]
    ref: str
    points: Sequence[Point]

    @property
    def values(self) -> list[float]:
        return [value for _, value in self.points if not math.isnan(value)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Frames of all targets of a panel; ``faults`` are sentences about queries that failed. ``step_s`` is the distance
    between neighbouring points; ``has_queries`` is False for a panel of text."""

    frames: Sequence[Frame] = ()
    faults: Sequence[str] = ()
    step_s: float = 15.0
    has_queries: bool = True
    queries: Sequence[str] = field(default=())

    @property
    def empty(self) -> bool:
        """Whether there is no value to draw although there should be."""
        return self.has_queries and not any(frame.values for frame in self.frames)


def legend(labels: Mapping[str, str], form: str | None, alone: bool) -> str:
    """Return the name of a series by its target's ``legendFormat``. ``alone``: the target gave one series."""
    if form and form != "__auto":
        return re.sub(r"\{\{\s*(.+?)\s*\}\}", lambda match: labels.get(match[1], ""), form)
    metric = labels.get("__name__", "")
    rest = {key: value for key, value in labels.items() if key != "__name__"}
    if form == "__auto" and (alone or not rest):
        return metric or "Value"
    inner = ", ".join(f'{key}="{value}"' for key, value in sorted(rest.items()))
    return f"{metric}{{{inner}}}" if inner or not metric else metric


def _delta(values: Sequence[float]) -> float:
    return values[-1] - values[0]


_CALCS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "lastNotNull": lambda values: values[-1],
    "last": lambda values: values[-1],
    "first": lambda values: values[0],
    "firstNotNull": lambda values: values[0],
    "min": min,
    "max": max,
    "mean": lambda values: math.fsum(values) / len(values),
    "sum": math.fsum,
    "count": lambda values: float(len(values)),
    "range": lambda values: max(values) - min(values),
    "diff": _delta,
    "delta": _delta,
}
_TITLES = {"lastNotNull": "last", "firstNotNull": "first", "sum": "total"}


def reduced(frame: Frame, calc: str) -> float | None:
    """Return one value for the series, by the name that Grafana has for the calculation; None without values."""
    values = frame.values
    return _CALCS.get(calc, _CALCS["lastNotNull"])(values) if values else None


def calc_title(calc: str) -> str:
    """Return the heading of a column of :func:`reduced` values."""
    return _TITLES.get(calc, calc if calc in _CALCS else "last")


def segments(frame: Frame, step_s: float) -> list[list[Point]]:
    """Return the runs of points between which no step is missing."""
    found: list[list[Point]] = []
    for point in frame.points:
        if math.isnan(point[1]):
            continue
        if not found or point[0] - found[-1][-1][0] > 1.5 * step_s:
            found.append([])
        found[-1].append(point)
    return found


def natural(name: str) -> list[tuple[int, str]]:
    """Return a key by which experts-2 comes before experts-10, whatever digits a name has, and however many."""
    parts = re.split(r"0*([0-9]+)", name)  # every second one is a number
    return [(len(part), part) if order % 2 else (-1, part) for order, part in enumerate(parts)]
