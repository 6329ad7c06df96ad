"""Tables."""

from __future__ import annotations

from services.dashboards.draw.html import Html, css_percent, element
from services.dashboards.fields import Field, field
from services.dashboards.queries import Drawing
from services.dashboards.times import Range, full
from services.dashboards.transform import Cell, sorted_as_panel_wants, table

MAX_ROWS = 100


def draw(drawing: Drawing, _span: Range) -> Html:
    """Return the panel's table."""
    panel = drawing.panel
    refs = [target.ref_id for target in panel.targets or [] if target.expr and not target.hide]
    made = table(drawing.result.frames, refs, panel.transformations or [])
    made = sorted_as_panel_wants(made, panel.option("sortBy") or [])
    columns = {}
    for name in made.columns:
        cells = [cell for row in made.rows if isinstance(cell := row.get(name), float)]
        found = field(panel.field_config, name, values=cells)
        if found.options.get("custom.hidden") is not True and not (name == "Time" and not cells):
            columns[name] = found, max(cells, default=0.0)
    head = element("tr", *(element("th", found.shown_name) for found, _ in columns.values()))
    rows = [
        element("tr", *(_cell(row.get(name), found, most) for name, (found, most) in columns.items()))
        for row in made.rows[:MAX_ROWS]
    ]
    more = len(made.rows) - len(rows)
    note = [element("p", f"and {more} more", class_="note")] if more > 0 else []
    return element("div", element("table", head, *rows), *note, class_="table")


def _cell(cell: Cell, found: Field, most: float) -> Html:
    if isinstance(cell, str):
        return element("td", cell)
    if found.name == "Time" and cell is not None:
        return element("td", full(cell))
    kind = str((found.options.get("custom.cellOptions") or {}).get("type") or "auto")
    color = found.color(cell, most=most)
    if kind == "color-background":
        return element("td", found.text(cell), class_="n full", style=f"--c:{color}")
    if kind == "gauge" and cell is not None:
        low, high = found.number("min") or 0.0, found.number("max")
        high = most if high is None else high
        share = min(1.0, max(0.0, (cell - low) / (high - low))) if high > low else 0.0
        bar = element("i", style=f"width:{css_percent(share)};background:{color}")
        return element("td", element("div", bar), element("span", found.text(cell)), class_="n bar")
    return element("td", found.text(cell), class_="n", style=f"color:{color}" if kind == "color-text" else None)
