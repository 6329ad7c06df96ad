"""Panels of single values: big numbers, bars and gauges, coloured by their thresholds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.dashboards import colors
from services.dashboards.axes import scale
from services.dashboards.draw.chart import MAX_SERIES, left_out
from services.dashboards.draw.html import SIZE, Html, css_percent, element, number, plot
from services.dashboards.fields import Field, of_frame
from services.dashboards.frames import Frame, reduced, segments
from services.dashboards.model import Panel
from services.dashboards.queries import Drawing
from services.dashboards.times import Range

_RADIUS, _WIDTH = 80.0, 18.0
_FROM, _SWEEP = math.radians(210), math.radians(240)
"""A gauge begins at the lower left and goes round the top."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One value of a panel. ``most`` is the largest of its panel, for bars without a maximum."""

    frame: Frame
    field: Field
    value: float | None
    most: float

    @property
    def text(self) -> str:
        return self.field.text(self.value)

    @property
    def color(self) -> str:
        return self.field.color(self.value, most=self.most)

    def share(self, value: float | None) -> float:
        """Return where ``value`` lies between the field's bounds."""
        low = self.field.number("min") or 0.0
        high = self.field.number("max")
        high = self.most if high is None else high
        if value is None or math.isnan(value) or high <= low:
            return 0.0
        return min(1.0, max(0.0, (value - low) / (high - low)))


def readings(drawing: Drawing) -> list[Reading]:
    """Return the panel's values by the first calculation that it names."""
    panel = drawing.panel
    calcs = panel.option("reduceOptions", "calcs") or ["lastNotNull"]
    found = [(frame, reduced(frame, str(calcs[0]))) for frame in drawing.result.frames if frame.points]
    most = max((value for _, value in found if value is not None), default=0.0)
    return [
        Reading(frame=frame, field=of_frame(panel.field_config, frame), value=value, most=most)
        for frame, value in found[:MAX_SERIES]
    ]


def draw_stat(drawing: Drawing, span: Range) -> Html:
    """Return big numbers, with their course behind them where the panel wants it."""
    found = readings(drawing)
    tiles = [_tile(drawing, each, span, named=_is_named(drawing.panel, len(found))) for each in found]
    return element("div", *tiles, class_="tiles")


def _is_named(panel: Panel, count: int) -> bool:
    mode = panel.option("textMode") or "auto"
    return mode in ("name", "value_and_name") or (mode == "auto" and count > 1)


def _tile(drawing: Drawing, reading: Reading, span: Range, *, named: bool) -> Html:
    panel = drawing.panel
    full = str(panel.option("colorMode") or "value").startswith("background")
    plain = panel.option("colorMode") == "none"
    style = f"--c:{'var(--text)' if plain else reading.color}"
    name = [element("span", reading.field.shown_name)] if named else []
    shown = [] if panel.option("textMode") == "name" and named else [element("b", reading.text)]
    spark = [_spark(reading, span, drawing.result.step_s)] if _has_spark(panel, reading.frame) else []
    return element("div", *spark, *name, *shown, class_="tile full" if full else "tile", style=style)


def _has_spark(panel: Panel, frame: Frame) -> bool:
    return (panel.option("graphMode") or "none") == "area" and len(frame.values) > 1


def _spark(reading: Reading, span: Range, step_s: float) -> Html:
    on = scale(reading.frame.values, low=reading.field.number("min"), from_zero=True)
    paths = []
    for run in segments(reading.frame, step_s):
        corners = [
            f"{number(SIZE * (at - span.start_s) / span.seconds)} {number(SIZE * (1 - on.share(value)))}"
            for at, value in run
        ]
        first, last = corners[0].split()[0], corners[-1].split()[0]
        paths.append(f"M{first} {SIZE:.0f}L{' '.join(corners)}L{last} {SIZE:.0f}Z")
    return plot(element("path", d="".join(paths), class_="area", fill_opacity="0.18"))


def draw_bars(drawing: Drawing, _span: Range) -> Html:
    """Return a horizontal bar for each value."""
    found = readings(drawing)
    lines = [
        element(
            "li",
            element("span", each.field.shown_name, title=each.field.shown_name),
            element("div", element("i", style=f"width:{css_percent(each.share(each.value))};background:{each.color}")),
            element("b", each.text, style=f"color:{each.color}"),
        )
        for each in found
    ]
    frames = [frame for frame in drawing.result.frames if frame.points]
    return element("div", element("ul", *lines, class_="bars"), left_out(len(frames) - len(found)))


def draw_gauge(drawing: Drawing, _span: Range) -> Html:
    """Return a dial for each value, with its thresholds around it."""
    found = readings(drawing)
    return element("div", *(_dial(each, named=len(found) > 1) for each in found), class_="tiles")


def _dial(reading: Reading, *, named: bool) -> Html:
    arcs = [
        _arc(0, 1, _RADIUS, _WIDTH, "var(--track)"),
        _arc(0, reading.share(reading.value), _RADIUS, _WIDTH, reading.color),
        *_rim(reading),
    ]
    label = element("text", reading.text, x=100, y=100, class_="value", style=f"fill:{reading.color}")
    name = [element("text", reading.field.shown_name, x=100, y=142, class_="name")] if named else []
    return element("svg", *arcs, label, *name, viewBox="0 0 200 150", class_="dial", role="img")


def _rim(reading: Reading) -> list[Html]:
    """Return arcs outside of the dial in the thresholds' colours."""
    steps = reading.field.thresholds()
    starts = [
        0.0 if step.value is None else reading.share(reading.field.absolute(step, reading.most)) for step in steps
    ]
    ends = [*starts, 1.0][1:]
    return [
        _arc(start, end, _RADIUS + 13, 4, colors.css(step.color))
        for step, start, end in zip(steps, starts, ends, strict=True)
    ]


def _arc(start: float, end: float, radius: float, width: float, color: str) -> Html:
    """Return an arc between two shares of the dial."""
    if end <= start:
        return Html("")
    ends = [_FROM - share * _SWEEP for share in (start, end)]
    (left, top), (right, bottom) = ((100 + radius * math.cos(angle), 100 - radius * math.sin(angle)) for angle in ends)
    large = 1 if (end - start) * _SWEEP > math.pi else 0
    path = (
        f"M{number(left)} {number(top)}A{number(radius)} {number(radius)} 0 {large} 1 {number(right)} {number(bottom)}"
    )
    return element("path", d=path, fill="none", stroke_width=width, style=f"stroke:{color}")
