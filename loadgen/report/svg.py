"""Plots side by side as one picture in SVG, for pages that take no HTML. The plots are those of reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loadgen.report.plots import Curve, Plot, bars_of, dots_of, lines_of
from services.dashboards.draw.html import SIZE, Html, element, join

WIDTH, HEIGHT = 380.0, 230.0
"""Pixels of a plot without its words."""
_LEFT, _RIGHT, _TOP, _BELOW, _LINE = 70.0, 20.0, 46.0, 30.0, 16.0
_INK, _SOFT, _GRID = "#1f2328", "#59636e", "#d1d9e0"
_FONT = "system-ui, sans-serif"


def picture(plots: Sequence[Plot], title: str) -> str:
    """Returns a document of SVG. Colours of curves must be plain ones, such as ``#1f77b4``."""
    wide = _LEFT + WIDTH + _RIGHT
    legend = max((len(plot.curves) for plot in plots), default=0) * _LINE
    width, height = wide * len(plots), _TOP + HEIGHT + _BELOW + legend + 10
    parts = [_moved(_plot(plot), wide * place, 0) for place, plot in enumerate(plots)]
    whole = element(
        "svg",
        element("title", title),
        element("rect", width=width, height=height, fill="#ffffff"),
        _text(title, 12, 20, size=14, weight="600"),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:g} {height:g}",
        width=width,
        height=height,
        font_family=_FONT,
    )
    return f"{whole}\n"


def _plot(plot: Plot) -> Html:
    curves = element(
        "svg",
        *(part for curve in plot.curves for part in _curve(curve, plot)),
        x=_LEFT,
        y=_TOP,
        width=WIDTH,
        height=HEIGHT,
        viewBox=f"0 0 {SIZE:.0f} {SIZE:.0f}",
        preserveAspectRatio="none",
        overflow="visible",
    )
    return join([*_frame(plot), curves, *_legend(plot)])


def _frame(plot: Plot) -> Iterator[Html]:
    yield _text(plot.title, _LEFT, _TOP - 8, size=12, color=_INK)
    for tick in plot.y_ticks:
        y = _TOP + HEIGHT * (1 - tick.at)
        yield element("path", d=f"M{_LEFT:g} {y:.1f}h{WIDTH:g}", stroke=_GRID)
        yield _text(tick.label, _LEFT - 6, y + 4, anchor="end")
    for tick in plot.x_ticks:
        yield _text(tick.label, _LEFT + WIDTH * tick.at, _TOP + HEIGHT + 16, anchor="middle")


def _legend(plot: Plot) -> Iterator[Html]:
    for line, curve in enumerate(plot.curves):
        y = _TOP + HEIGHT + _BELOW + _LINE * line
        yield element("rect", x=_LEFT, y=y, width=10, height=10, fill=curve.color)
        yield _text(curve.name, _LEFT + 16, y + 9)


def _curve(curve: Curve, plot: Plot) -> Iterator[Html]:
    if curve.kind == "bars":
        yield element("path", d=bars_of(curve, plot), fill=curve.color)
        return
    lines, dots = ("", dots_of(curve, plot)) if curve.kind == "dots" else lines_of(curve, plot)
    dashes = "5 4" if curve.dashed else None
    if lines:
        yield _stroke(lines, curve.color, 2, dashes)
    if dots:
        yield _stroke(dots, curve.color, 6, None)


def _stroke(path: str, color: str, width: float, dashes: str | None) -> Html:
    return element(
        "path",
        d=path,
        fill="none",
        stroke=color,
        stroke_width=width,
        stroke_linecap="round",
        stroke_dasharray=dashes,
        vector_effect="non-scaling-stroke",
    )


def _moved(part: Html, x: float, y: float) -> Html:
    return element("g", part, transform=f"translate({x:g} {y:g})")


def _text(
    text: str, x: float, y: float, *, size: int = 11, color: str = _SOFT, anchor: str | None = None, weight: str = ""
) -> Html:
    return element("text", text, x=x, y=y, font_size=size, fill=color, text_anchor=anchor, font_weight=weight or None)
