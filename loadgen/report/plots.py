"""A plot of curves over one axis, with what happened marked on it. The frame and the style are those of dashboards."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from loadgen.report.words import ms
from services.dashboards.axes import Scale, Tick, ticks
from services.dashboards.draw.chart import Axis, framed
from services.dashboards.draw.html import SIZE, Html, css_percent, element, join, number

Point = tuple[float, float]
Kind = Literal["line", "steps", "bars", "dots"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """``points`` in the order of x; a y of NaN is a gap. ``steps``: a value holds until the next point; bars are
    ``width`` wide, to the right of their x, and stand on ``base``, whose values belong to the points."""

    name: str
    points: Sequence[Point]
    color: str
    kind: Kind = "line"
    dashed: bool = False
    width: float = 0.0
    base: Sequence[float] = ()

    def tops(self) -> list[float]:
        """The heights that the plot must have room for."""
        bases = self.base or [0.0] * len(self.points)
        return [y + base for (_, y), base in zip(self.points, bases, strict=True) if not math.isnan(y)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A vertical line at ``x``, named by ``label`` above the plot where ``shown``."""

    x: float
    label: str
    title: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Zone:
    """From ``start`` to ``end`` of x, with what a reader sees who points there."""

    start: float
    end: float
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """``level``: heights at which a dashed line lies, with their names. ``named``: marks have their labels above."""

    title: str
    curves: Sequence[Curve]
    x: Scale
    y: Scale
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    marks: Sequence[Mark] = ()
    levels: Sequence[tuple[float, str]] = ()
    zones: Sequence[Zone] = ()
    named: bool = False
    note: str = ""


def latency_ticks(axis: Scale, count: int) -> list[Tick]:
    """Returns ticks of a logarithmic axis in ms."""
    found = ticks(axis, "none", None, count)
    return [Tick(at=tick.at, label=ms(axis.low * (axis.high / axis.low) ** tick.at)) for tick in found]


def drawn(plot: Plot) -> Html:
    """Returns the plot with title, legend and note."""
    inner = join([*(_curve(curve, plot) for curve in plot.curves), *_levels(plot), *_marks(plot), *_zones(plot)])
    flags = [
        element("span", mark.label, title=mark.title, style=f"left:{css_percent(plot.x.share(mark.x))}")
        for mark in plot.marks
    ]
    above = [element("div", *flags, class_="flags")] if plot.named and flags else []
    note = [element("p", plot.note, class_="note")] if plot.note else []
    chart = framed(inner, Axis(ticks=plot.y_ticks), None, plot.x_ticks)
    return element(
        "figure", element("figcaption", plot.title), _legend(plot), *above, chart, *note, class_="with-legend"
    )


def _legend(plot: Plot) -> Html:
    entries = [(curve.name, curve.color) for curve in plot.curves] + [(name, "var(--red)") for _, name in plot.levels]
    if len(entries) < 2 and not plot.levels:
        return Html("")
    items = [element("li", element("i", style=f"background:{color}"), name, title=name) for name, color in entries]
    return element("ul", *items, class_="legend")


def _zones(plot: Plot) -> Iterator[Html]:
    for zone in plot.zones:
        left, right = (SIZE * plot.x.share(at) for at in (zone.start, zone.end))
        yield element(
            "rect", element("title", zone.text), x=left, width=max(right - left, 1.0), height=SIZE, class_="point-at"
        )


def _marks(plot: Plot) -> Iterator[Html]:
    for mark in plot.marks:
        line = f"M{number(SIZE * plot.x.share(mark.x))} 0V{SIZE:.0f}"
        yield element("path", element("title", mark.title), d=line, class_="mark")


def _levels(plot: Plot) -> Iterator[Html]:
    for value, _ in plot.levels:
        line = f"M0 {number(SIZE * (1 - plot.y.share(value)))}H{SIZE:.0f}"
        yield element("path", d=line, class_="line dashed", style="--c:var(--red)")


def _curve(curve: Curve, plot: Plot) -> Html:
    style = f"--c:{curve.color}"
    if curve.kind == "bars":
        return element("path", d=bars_of(curve, plot), class_="bars", style=style)
    if curve.kind == "dots":
        return element("path", d=dots_of(curve, plot), class_="dots", style=style)
    paths, dots = lines_of(curve, plot)
    found = [element("path", d=paths, class_="line dashed" if curve.dashed else "line", style=style)] if paths else []
    return join(found + ([element("path", d=dots, class_="dots", style=style)] if dots else []))


def lines_of(curve: Curve, plot: Plot) -> tuple[str, str]:
    """Returns the paths of a curve's lines, and of points between two gaps, in the coordinates of a plot."""
    runs = [
        list(run) for is_gap, run in itertools.groupby(curve.points, lambda point: math.isnan(point[1])) if not is_gap
    ]
    paths = "".join(_path(run, plot, steps=curve.kind == "steps") for run in runs if len(run) > 1)
    return paths, "".join(_dot(run[0], plot) for run in runs if len(run) == 1)


def dots_of(curve: Curve, plot: Plot) -> str:
    """Returns the path of a curve's points."""
    return "".join(_dot(point, plot) for point in curve.points)


def _place(point: Point, plot: Plot) -> str:
    return f"{number(SIZE * plot.x.share(point[0]))} {number(SIZE * (1 - plot.y.share(point[1])))}"


def _path(run: Sequence[Point], plot: Plot, *, steps: bool) -> str:
    corners = [run[0]]
    for before, after in itertools.pairwise(run):
        corners += [(after[0], before[1]), after] if steps else [after]
    first, *rest = (_place(corner, plot) for corner in corners)
    return f"M{first}L{' '.join(rest)}"


def _dot(point: Point, plot: Plot) -> str:
    """Returns a line without length, whose round end is a dot that no stretching makes into an ellipse."""
    return f"M{_place(point, plot)}h0"


def bars_of(curve: Curve, plot: Plot) -> str:
    """Returns the path of a curve's bars."""
    bases = curve.base or [0.0] * len(curve.points)
    found = []
    for (x, y), base in zip(curve.points, bases, strict=True):
        if y > 0:
            corner, far = _place((x, base), plot), _place((x + curve.width, base + y), plot)
            right, top = far.split()
            found.append(f"M{corner}V{top}H{right}V{corner.split()[1]}Z")
    return "".join(found)
