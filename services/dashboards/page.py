"""Dashboards as one page of HTML that needs nothing else: no script, no other file, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.dashboards.draw import html
from services.dashboards.draw.chart import STYLE
from services.dashboards.draw.html import Html, element, join
from services.dashboards.draw.panel import draw
from services.dashboards.model import Dashboard, Row, rows
from services.dashboards.queries import Drawing
from services.dashboards.times import Range, full
from services.dashboards.variables import Value

_STYLES = (STYLE, Path(__file__).with_name("page.css"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Board:
    """A dashboard with what its panels draw, by their :func:`id`."""

    key: str
    dashboard: Dashboard
    values: Mapping[str, Value]
    drawings: Mapping[int, Drawing]

    def without_data(self) -> list[str]:
        """Return the titles of the panels that have queries and nothing to draw."""
        return [each.title for each in self.drawings.values() if each.result.empty and not each.result.faults]

    def faulty(self) -> list[str]:
        """Return title and reason of each panel with a query that failed."""
        return [f"{each.title}: {fault}" for each in self.drawings.values() for fault in each.result.faults]


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """What is around the dashboards: where their numbers come from, and every how many seconds a browser asks again
    (None: never). ``links`` are titles and addresses of other pages."""

    source: str
    span: Range
    refresh_s: float | None = None
    links: Sequence[tuple[str, str]] = ()


def page(boards: Sequence[Board], frame: Frame) -> str:
    """Return the whole page."""
    title = boards[0].dashboard.title if len(boards) == 1 else "expertmesh / Dashboards"
    links = frame.links or (
        [(each.dashboard.short_title, f"#{each.key}") for each in boards] if len(boards) > 1 else []
    )
    return document(
        title,
        element("nav", *(element("a", name, href=target) for name, target in links)) if links else Html(""),
        *(_board(each, frame) for each in boards),
        element("footer", f"From {frame.source}, drawn at {full(frame.span.end_s)} by expertmesh dashboards."),
        refresh_s=frame.refresh_s,
    )


def document(title: str, *body: Html, refresh_s: float | None = None) -> str:
    """Return a page with this project's style."""
    again = f'<meta http-equiv="refresh" content="{refresh_s:.0f}">' if refresh_s else ""
    return html.document(title, *body, styles=_STYLES, head=again)


def _board(board: Board, frame: Frame) -> Html:
    about = [element("p", board.dashboard.description)] if board.dashboard.description else []
    span = f"{full(frame.span.start_s)} to {full(frame.span.end_s)}"
    chosen = [
        join([" · ", variable.label or variable.name, " ", element("code", board.values[variable.name].shown())])
        for variable in board.dashboard.variables
        if variable.type != "datasource" and not variable.hide
    ]
    head = element("header", element("h1", board.dashboard.title), *about, element("p", span, *chosen), id=board.key)
    return element("article", head, *(_row(row, board, frame) for row in rows(board.dashboard)))


def _row(row: Row, board: Board, frame: Frame) -> Html:
    top = min((panel.grid_pos.y for panel in row.panels), default=0)
    panels = [draw(board.drawings[id(panel)], frame.span, top) for panel in row.panels]
    grid = element("div", *panels, class_="board")
    if row.title is None:
        return grid
    if row.folded:
        return element("details", element("summary", row.title), grid)
    return join([element("h2", row.title), grid])
