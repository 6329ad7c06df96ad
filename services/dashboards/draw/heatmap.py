"""Histograms over time: a row of cells for each bucket, darker where more values fell into it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.dashboards import units
from services.dashboards.axes import Tick, time_ticks
from services.dashboards.draw.chart import Axis, framed
from services.dashboards.draw.html import SIZE, Html, element, join, number
from services.dashboards.frames import Frame
from services.dashboards.model import COLUMNS, Panel
from services.dashboards.queries import Drawing
from services.dashboards.times import Range

LEVELS = 8
"""Shades of cells: ``--h1`` and on."""
_LABELS_PER_HEIGHT = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Values of a row by time: how many fell between the bound below and this one."""

    label: str
    bound: float
    counts: Mapping[float, float]


def draw(drawing: Drawing, span: Range) -> Html:
    """Return the panel's plot, with the shades' meaning below it."""
    panel, step_s = drawing.panel, drawing.result.step_s
    rows = buckets(drawing.result.frames)
    most = max((count for row in rows for count in row.counts.values()), default=0.0)
    cells: dict[int, list[str]] = defaultdict(list)
    for order, row in enumerate(rows):
        for at, count in row.counts.items():
            if count > 0 and span.start_s <= at <= span.end_s:
                cells[level(count, most)].append(_cell(order, len(rows), at, span, step_s))
    drawn = [element("path", d="".join(paths), style=f"fill:var(--h{shade})") for shade, paths in sorted(cells.items())]
    times = time_ticks(span, 3 + panel.grid_pos.w * 8 // COLUMNS)
    chart = framed(join(drawn), Axis(ticks=_labels(panel, rows)), None, times)
    return element("div", chart, _key(drawing, most), class_="with-legend")


def buckets(frames: Sequence[Frame]) -> list[Bucket]:
    """Return the rows from bottom to top. Series with a label ``le`` count all values up to it, so each loses what the
    one below has; others are rows as they are."""
    if not all("le" in frame.labels for frame in frames):
        ordinary = [(frame.name, float(order), dict(_finite(frame))) for order, frame in enumerate(frames)]
        return [Bucket(label=name, bound=bound, counts=counts) for name, bound, counts in ordinary]
    found, below = [], dict[float, float]()
    for frame in sorted(frames, key=lambda each: float(each.labels["le"])):
        total = dict(_finite(frame))
        counts = {at: max(0.0, value - below.get(at, 0.0)) for at, value in total.items()}
        found.append(Bucket(label=frame.labels["le"], bound=float(frame.labels["le"]), counts=counts))
        below = total
    return _cut(found)


def _cut(rows: list[Bucket]) -> list[Bucket]:
    """Leave out empty rows at the top and at the bottom, all but one on each side."""
    full = [order for order, row in enumerate(rows) if any(count > 0 for count in row.counts.values())]
    return rows[max(0, full[0] - 1) : full[-1] + 2] if full else rows


def _finite(frame: Frame) -> list[tuple[float, float]]:
    return [point for point in frame.points if math.isfinite(point[1])]


def level(count: float, most: float) -> int:
    """Return the shade of a cell, 1 to :data:`LEVELS`; it grows with the root, so that few values are seen, too."""
    return max(1, math.ceil(LEVELS * math.sqrt(count / most) - 1e-9))


def _cell(order: int, rows: int, at: float, span: Range, step_s: float) -> str:
    """Return the rectangle of a bucket's values in the step that ends at ``at``."""
    height = SIZE / rows
    left = max(0.0, SIZE * (at - step_s - span.start_s) / span.seconds)
    right = SIZE * (at - span.start_s) / span.seconds
    top = SIZE - (order + 1) * height
    return f"M{number(left)} {number(top)}H{number(right)}V{number(top + height)}H{number(left)}Z"


def _labels(panel: Panel, rows: Sequence[Bucket]) -> list[Tick]:
    """Return labels at the upper bounds of some rows."""
    unit = str(panel.option("yAxis", "unit") or panel.field_config.defaults.get("unit") or "")
    every = max(1, math.ceil(len(rows) / max(2.0, panel.grid_pos.h * _LABELS_PER_HEIGHT)))
    numeric = all(row.label == row.label.strip() and _is_number(row.label) for row in rows)
    return [
        Tick(at=(order + 1) / len(rows), label=units.text(row.bound, unit) if numeric else row.label)
        for order, row in enumerate(rows)
        if (len(rows) - 1 - order) % every == 0
    ]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _key(drawing: Drawing, most: float) -> Html:
    """Return what the lightest and the darkest shade mean."""
    unit = str(drawing.panel.option("cellValues", "unit") or "short")
    shades = [element("i", style=f"background:var(--h{shade})") for shade in range(1, LEVELS + 1)]
    return element("p", "more than 0 ", *shades, f" {units.text(most, unit)} in a cell", class_="note key")
