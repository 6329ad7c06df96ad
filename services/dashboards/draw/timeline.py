"""States over time: a band for each series, one colour as long as its state stays the same."""

from __future__ import annotations

from collections.abc import Sequence

from services.dashboards import colors
from services.dashboards.axes import time_ticks
from services.dashboards.draw.chart import MAX_SERIES, left_out
from services.dashboards.draw.html import Html, css_percent, element
from services.dashboards.fields import Field, of_frame
from services.dashboards.frames import Frame, Point, segments
from services.dashboards.model import COLUMNS
from services.dashboards.queries import Drawing
from services.dashboards.times import Range

_LABELLED = 0.06
"""A state's text is written into its band from this share of the time on."""


def draw(drawing: Drawing, span: Range) -> Html:
    """Return the panel's bands, each with its name before it."""
    panel, step_s = drawing.panel, drawing.result.step_s
    frames = [frame for frame in drawing.result.frames if frame.values]
    shown = [(frame, of_frame(panel.field_config, frame)) for frame in frames[:MAX_SERIES]]
    texts = dict.fromkeys(field.text(value) for frame, field in shown for value in frame.values)
    palette = {text: colors.of_series(order) for order, text in enumerate(texts)}
    lines = [
        element(
            "li", element("span", field.shown_name, title=field.shown_name), _band(frame, field, palette, span, step_s)
        )
        for frame, field in shown
    ]
    below = [
        element("span", tick.label, style=f"left:{css_percent(tick.at)}", class_="minor" if order % 2 else None)
        for order, tick in enumerate(time_ticks(span, 3 + panel.grid_pos.w * 5 // COLUMNS))
    ]
    times = element("li", element("span", ""), element("div", *below, class_="x"))
    return element("div", element("ul", *lines, times, class_="bands"), left_out(len(frames) - len(shown)))


def states(points: Sequence[Point], step_s: float) -> list[tuple[float, float, float]]:
    """Return begin, end and value of each state in a run of points; the last one holds for a step."""
    found: list[tuple[float, float, float]] = []
    for at, value in points:
        if found and found[-1][2] == value:
            found[-1] = (found[-1][0], at + step_s, value)
        else:
            if found:
                found[-1] = (found[-1][0], at, found[-1][2])
            found.append((at, at + step_s, value))
    return found


def _band(frame: Frame, field: Field, palette: dict[str, str], span: Range, step_s: float) -> Html:
    parts = []
    for run in segments(frame, step_s):
        for begin, end, value in states(run, step_s):
            left, right = (min(1.0, max(0.0, (at - span.start_s) / span.seconds)) for at in (begin, end))
            if right > left:
                text = field.text(value)
                color = field.color(value, default=palette[text])
                style = f"left:{css_percent(left)};width:{css_percent(right - left)};--c:{color}"
                parts.append(element("i", text if right - left >= _LABELLED else "", style=style, title=text))
    return element("div", *parts)
