"""The frame of a plot: ticks with their labels, grid lines, and the legend beside or below it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.dashboards.axes import Tick
from services.dashboards.draw.html import SIZE, Html, css_percent, element, join, number, plot
from services.dashboards.fields import Field
from services.dashboards.frames import Frame, calc_title, reduced
from services.dashboards.model import Panel

STYLE = Path(__file__).with_name("chart.css")
"""The style sheet of plots, which a page puts into its head."""
MAX_SERIES = 60
"""Series that a panel draws; more would only be a block of colour."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """Ticks at the left or right of a plot, and what is measured."""

    ticks: Sequence[Tick]
    label: str = ""

    def html(self, side: str) -> Html:
        width = max((len(tick.label) for tick in self.ticks), default=0)
        labels = [element("span", tick.label, style=f"bottom:{css_percent(tick.at)}") for tick in self.ticks]
        name = [element("b", self.label)] if self.label else []
        return element("div", *name, *labels, class_=f"y {side}", style=f"--chars:{width}")


def framed(drawn: str, left: Axis, right: Axis | None, times: Sequence[Tick]) -> Html:
    """Return a plot with its axes. ``drawn``: elements of SVG, above the grid's lines."""
    lines = "".join(f"M0 {number(SIZE * (1 - tick.at))}H{SIZE:.0f}" for tick in left.ticks)
    lines += "".join(f"M{number(SIZE * tick.at)} 0V{SIZE:.0f}" for tick in times)
    grid = element("path", d=lines, class_="lines") if lines else Html("")
    below = [
        element("span", tick.label, style=f"left:{css_percent(tick.at)}", class_="minor" if order % 2 else None)
        for order, tick in enumerate(times)
    ]
    return element(
        "div",
        left.html("left"),
        element("div", plot(grid, drawn), class_="plot"),
        right.html("right") if right else Html(""),
        element("div", *below, class_="x"),
        class_="chart",
    )


def legend(panel: Panel, entries: Sequence[tuple[Frame, Field, str]]) -> Html:
    """Return the legend of series with their options and colours, as the panel wants it."""
    mode = panel.option("legend", "displayMode") or "list"
    if mode == "hidden" or panel.option("legend", "showLegend") is False or not entries:
        return Html("")
    calcs = [str(calc) for calc in panel.option("legend", "calcs") or []]
    return _table(entries, calcs) if mode == "table" else _list(entries, calcs)


def at_right(panel: Panel) -> bool:
    """Return whether the legend stands beside the plot."""
    return bool(panel.option("legend", "placement") == "right")


def _mark(color: str) -> Html:
    return element("i", style=f"background:{color}")


def _list(entries: Sequence[tuple[Frame, Field, str]], calcs: Sequence[str]) -> Html:
    items = [
        element(
            "li",
            _mark(color),
            field.shown_name,
            *(
                join([" ", element("small", f"{calc_title(calc)} {field.text(reduced(frame, calc))}")])
                for calc in calcs
            ),
            title=field.shown_name,
        )
        for frame, field, color in entries
    ]
    return element("ul", *items, class_="legend")


def _table(entries: Sequence[tuple[Frame, Field, str]], calcs: Sequence[str]) -> Html:
    head = element("tr", element("th", ""), *(element("th", calc_title(calc)) for calc in calcs))
    lines = [
        element(
            "tr",
            element("td", _mark(color), field.shown_name, title=field.shown_name),
            *(element("td", field.text(reduced(frame, calc))) for calc in calcs),
        )
        for frame, field, color in entries
    ]
    return element("div", element("table", head, *lines), class_="legend")


def left_out(count: int) -> Html:
    """Return a note on series that are not drawn."""
    return element("p", f"and {count} more", class_="note") if count > 0 else Html("")
