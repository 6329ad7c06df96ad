"""One panel: its title, its description and what its kind draws; or why there is nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from services.dashboards.draw import heatmap, single, table, timeline, timeseries
from services.dashboards.draw.html import Html, element
from services.dashboards.draw.text import inline, markdown
from services.dashboards.model import COLUMNS, Panel
from services.dashboards.queries import Drawing
from services.dashboards.times import Range
from services.dashboards.variables import expand
from services.errors import QueryFailed

_KINDS: Mapping[str, Callable[[Drawing, Range], Html]] = {
    "timeseries": timeseries.draw,
    "heatmap": heatmap.draw,
    "stat": single.draw_stat,
    "gauge": single.draw_gauge,
    "bargauge": single.draw_bars,
    "state-timeline": timeline.draw,
    "table": table.draw,
}
NO_DATA = "no data"


def draw(drawing: Drawing, span: Range, top: int) -> Html:
    """Return the panel. ``top`` is the line of the dashboard in which its row begins."""
    panel = drawing.panel
    place = panel.grid_pos
    left = min(place.x, COLUMNS - place.w)
    style = f"--x:{left + 1};--w:{place.w};--y:{place.y - top + 1};--h:{place.h}"
    head = [element("h3", drawing.title, title="\n".join(drawing.result.queries) or None)] if drawing.title else []
    if drawing.description:
        head.append(element("p", inline(drawing.description), class_="about", title=drawing.description))
    faults = [element("p", fault, class_="fault") for fault in drawing.result.faults]
    return element("section", *head, *faults, _body(drawing, span), class_=f"panel {_css_class(panel)}", style=style)


def _css_class(panel: Panel) -> str:
    return panel.type if panel.type in _KINDS or panel.type == "text" else "other"


def _body(drawing: Drawing, span: Range) -> Html:
    panel = drawing.panel
    if panel.type == "text":
        return markdown(expand(str(panel.option("content") or ""), drawing.values))
    if panel.type not in _KINDS:
        return element("p", f"Panels of the kind {panel.type} are drawn by Grafana alone.", class_="nothing")
    if drawing.result.empty:
        return Html("") if drawing.result.faults else element("p", NO_DATA, class_="nothing")
    try:
        return _KINDS[panel.type](drawing, span)
    except QueryFailed as error:
        return element("p", error.message, class_="fault")
