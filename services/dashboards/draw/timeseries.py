"""Lines, areas, bars and points over time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from services.dashboards import colors
from services.dashboards.axes import Scale, Tick, scale, ticks, time_ticks
from services.dashboards.draw.chart import MAX_SERIES, Axis, at_right, framed, left_out, legend
from services.dashboards.draw.html import SIZE, Html, element, join, number
from services.dashboards.fields import Field, of_frame
from services.dashboards.frames import Frame, Point, segments
from services.dashboards.model import COLUMNS, Panel
from services.dashboards.queries import Drawing
from services.dashboards.times import Range

_BAR = 0.8
_TICKS_OF_HEIGHT = 2
_FILL = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A series as it is drawn. ``base`` has the heights that it stands on, by time: those of a stack below it."""

    frame: Frame
    field: Field
    color: str
    base: Mapping[float, float]

    def custom(self, name: str) -> object:
        return self.field.options.get(f"custom.{name}")

    @property
    def right(self) -> bool:
        return self.custom("axisPlacement") == "right"

    @property
    def stacked(self) -> bool:
        return bool(self.base)

    def top(self, point: Point) -> float:
        return self.base.get(point[0], 0.0) + point[1]

    @property
    def filled(self) -> float:
        """Opacity of the area below the line; a stack's areas are seen even where none is set."""
        set_to = self.custom("fillOpacity")
        share = float(set_to) / 100 if isinstance(set_to, int | float) else 0.0
        return share or (_FILL if self.stacked else 0.0)


def draw(drawing: Drawing, span: Range) -> Html:
    """Return the panel's plot with its legend."""
    panel = drawing.panel
    frames = [frame for frame in drawing.result.frames if frame.values]
    lines = _lines(panel, frames[:MAX_SERIES])
    times = time_ticks(span, 3 + panel.grid_pos.w * 8 // COLUMNS)
    scales = {side: _scale([line for line in lines if line.right is side]) for side in (False, True)}
    axes = {side: _axis(panel, [line for line in lines if line.right is side], scales[side]) for side in scales}
    drawn = [
        _thresholds(lines, scales[False]),
        *(_one(line, span, drawing.result.step_s, scales[line.right]) for line in lines),
    ]
    chart = framed(join(drawn), axes[False], axes[True] if axes[True].ticks else None, times)
    entries = [(line.frame, line.field, line.color) for line in lines]
    shown = [chart, legend(panel, entries), left_out(len(frames) - len(lines))]
    return element("div", *shown, class_="with-legend beside" if at_right(panel) else "with-legend")


def _lines(panel: Panel, frames: Sequence[Frame]) -> list[Line]:
    below: dict[tuple[str, bool], dict[float, float]] = {}
    found = []
    for order, frame in enumerate(frames):
        field = of_frame(panel.field_config, frame)
        color = _color(field, frame, order)
        stacking = field.options.get("custom.stacking") or {}
        base: Mapping[float, float] = {}
        if stacking.get("mode") in ("normal", "percent"):
            right = field.options.get("custom.axisPlacement") == "right"
            stack = below.setdefault((str(stacking.get("group", "A")), right), {})
            base = {at: stack.get(at, 0.0) for at, _ in frame.points}
            for at, value in frame.points:
                stack[at] = stack.get(at, 0.0) + (0.0 if math.isnan(value) else value)
        found.append(Line(frame=frame, field=field, color=color, base=base))
    return found


def _color(field: Field, frame: Frame, order: int) -> str:
    by_value = (field.options.get("color") or {}).get("mode") == "thresholds"
    own = colors.of_series(order)
    return field.color(frame.values[-1], default=own) if by_value else field.fixed_color() or own


def _scale(lines: Sequence[Line]) -> Scale:
    values = [line.top(point) for line in lines for point in line.frame.points if not math.isnan(point[1])]
    fields = [line.field for line in lines]
    for line in lines:
        values += [
            bound for name in ("Min", "Max") if (bound := line.field.number(f"custom.axisSoft{name}")) is not None
        ]
    spread = next((each for line in lines if isinstance(each := line.custom("scaleDistribution"), dict)), {})
    return scale(
        values,
        low=_bound(fields, "min", min),
        high=_bound(fields, "max", max),
        from_zero=any(line.stacked or line.filled or line.custom("drawStyle") == "bars" for line in lines),
        log=float(spread.get("log", 10)) if spread.get("type") == "log" else None,
    )


def _bound(fields: Sequence[Field], name: str, choose: Callable[[list[float]], float]) -> float | None:
    found = [value for field in fields if (value := field.number(name)) is not None]
    return choose(found) if found else None


def _axis(panel: Panel, lines: Sequence[Line], found: Scale) -> Axis:
    if not lines:
        return Axis(ticks=[])
    field = lines[0].field
    count = max(2, panel.grid_pos.h // _TICKS_OF_HEIGHT)
    label = str(field.options.get("custom.axisLabel") or "")
    return Axis(ticks=_labelled(found, field, count), label=label)


def _labelled(found: Scale, field: Field, count: int) -> list[Tick]:
    return ticks(found, field.unit, field.decimals, count)


def _one(line: Line, span: Range, step_s: float, on: Scale) -> Html:
    """Return the elements of a series, with its name as hover text."""

    def x(at: float) -> float:
        return SIZE * (at - span.start_s) / span.seconds

    def y(value: float) -> float:
        return SIZE * (1 - on.share(value))

    runs = segments(line.frame, span.seconds if line.custom("spanNulls") is True else step_s)
    style, kind = f"--c:{line.color}", line.custom("drawStyle") or "line"
    parts = [element("title", line.field.shown_name)]
    if kind == "bars":
        parts.append(element("path", d=_bars(line, runs, x, y, step_s), class_="bars"))
    elif kind == "points":
        parts.append(element("path", d=_dots(line, [[point] for run in runs for point in run], x, y), class_="dots"))
    else:
        shape = str(line.custom("lineInterpolation") or "linear")
        if line.filled:
            areas = "".join(_area(line, run, x, y, shape, on) for run in runs if len(run) > 1)
            parts.append(
                element("path", d=areas, class_="area", fill_opacity=f"{line.filled:g}") if areas else Html("")
            )
        parts += _strokes(line, runs, x, y, shape)
    return element("g", *parts, style=style)


Place = Callable[[float], float]


def _strokes(line: Line, runs: Sequence[Sequence[Point]], x: Place, y: Place, shape: str) -> list[Html]:
    width = line.custom("lineWidth")
    dashed = line.custom("lineStyle")
    style = f"stroke-width:{width:g}px" if isinstance(width, int | float) and width != 1 else None
    dashes = "dashed" if isinstance(dashed, dict) and dashed.get("fill") in ("dash", "dot") else None
    paths = "".join(
        _path(_corners([(x(point[0]), y(line.top(point))) for point in run], shape)) for run in runs if len(run) > 1
    )
    single = [run for run in runs if len(run) == 1]
    found = [element("path", d=paths, class_=f"line {dashes}" if dashes else "line", style=style)] if paths else []
    return found + ([element("path", d=_dots(line, single, x, y), class_="dots")] if single else [])


def _corners(points: Sequence[Point], shape: str) -> list[Point]:
    """Return the corners of a line: of steps, where values hold until the next, or from the last."""
    if shape not in ("stepAfter", "stepBefore"):
        return list(points)
    found = [points[0]]
    for before, after in pairwise(points):
        found.append((after[0], before[1]) if shape == "stepAfter" else (before[0], after[1]))
        found.append(after)
    return found


def _path(points: Sequence[Point]) -> str:
    first, *rest = (f"{number(at)} {number(height)}" for at, height in points)
    return f"M{first}L{' '.join(rest)}"


def _area(line: Line, run: Sequence[Point], x: Place, y: Place, shape: str, on: Scale) -> str:
    floor = max(0.0, on.low) if on.log is None else on.low
    over = _corners([(x(point[0]), y(line.top(point))) for point in run], shape)
    under = _corners([(x(at), y(line.base.get(at, floor) or floor)) for at, _ in run], shape)
    return _path([*over, *reversed(under)]) + "Z"


def _bars(line: Line, runs: Sequence[Sequence[Point]], x: Place, y: Place, step_s: float) -> str:
    half = _BAR * step_s / 2
    found = []
    for point in (point for run in runs for point in run):
        left, right = x(point[0] - half), x(point[0] + half)
        top, bottom = y(line.top(point)), y(line.base.get(point[0], 0.0))
        found.append(f"M{number(left)} {number(bottom)}V{number(top)}H{number(right)}V{number(bottom)}Z")
    return "".join(found)


def _dots(line: Line, runs: Sequence[Sequence[Point]], x: Place, y: Place) -> str:
    """Return lines without length, whose round ends are dots that no stretching makes into ellipses."""
    return "".join(f"M{number(x(run[0][0]))} {number(y(line.top(run[0])))}h0" for run in runs)


def _thresholds(lines: Sequence[Line], on: Scale) -> Html:
    """Return lines or areas at the thresholds, where the panel shows them."""
    if not lines:
        return Html("")
    field = lines[0].field
    style = lines[0].custom("thresholdsStyle")
    mode = str(style.get("mode", "off")) if isinstance(style, dict) else "off"
    if mode == "off":
        return Html("")
    steps = [(value, step.color) for step in field.thresholds() if (value := field.absolute(step, on.high)) is not None]
    found = []
    for order, (value, color) in enumerate(steps):
        above = steps[order + 1][0] if order + 1 < len(steps) else on.high
        top, bottom = SIZE * (1 - on.share(above)), SIZE * (1 - on.share(value))
        if "area" in mode and bottom > top:
            found.append(
                element(
                    "rect", y=top, width=SIZE, height=bottom - top, style=f"fill:{colors.css(color)}", class_="zone"
                )
            )
        if mode != "area" and on.low <= value <= on.high:
            line = f"M0 {number(bottom)}H{SIZE:.0f}"
            found.append(element("path", d=line, style=f"--c:{colors.css(color)}", class_="line dashed"))
    return join(found)
