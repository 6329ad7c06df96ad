"""A dashboard as its JSON file has it: the part of Grafana's schema that is drawn here. Other keys are not read, and
those that are null or away have the defaults."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

COLUMNS = 24
"""Width of a dashboard in units of :class:`GridPos`."""


class GridPos(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    h: int = 8
    w: int = 12
    x: int = 0
    y: int = 0


class Threshold(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The colour from ``value`` on; None: from below all others."""

    color: str = "green"
    value: float | None = None


class Thresholds(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    mode: str = "absolute"
    steps: list[Threshold] = []


class Property(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    id: str
    value: Any = None


class Matcher(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    id: str
    options: Any = None


class Override(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    matcher: Matcher
    properties: list[Property] = []


class FieldConfig(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """``defaults`` holds options of a field by their names, as the properties of ``overrides`` do."""

    defaults: dict[str, Any] = {}
    overrides: list[Override] = []


class Target(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A query. ``instant`` asks for one value per series, at the end of the range."""

    expr: str = ""
    legend_format: str | None = None
    ref_id: str = ""
    instant: bool | None = None
    range: bool | None = None
    format: str | None = None
    hide: bool | None = None
    interval: str | None = None


class Transformation(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    id: str
    options: dict[str, Any] = {}
    disabled: bool | None = None


class Panel(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """``panels`` are those of a row that is collapsed."""

    type: str
    title: str | None = None
    description: str | None = None
    grid_pos: GridPos = GridPos()
    targets: list[Target] | None = None
    field_config: FieldConfig = FieldConfig()
    options: dict[str, Any] | None = None
    transformations: list[Transformation] | None = None
    collapsed: bool | None = None
    panels: list[Panel] | None = None
    interval: str | None = None
    max_data_points: float | None = None
    repeat: str | None = None

    def option(self, *path: str) -> Any:
        """Return what ``path`` leads to in the panel's options, None where there is nothing."""
        found: Any = self.options
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        return found


class Variable(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """``query`` is text, or for queries also an object with the text in ``query``."""

    name: str
    type: str
    label: str | None = None
    hide: int | None = None
    query: Any = None
    current: dict[str, Any] | None = None
    multi: bool | None = None
    include_all: bool | None = None
    all_value: str | None = None
    regex: str | None = None
    sort: int | None = None


class Templating(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    variables: list[Variable] = msgspec.field(name="list", default_factory=list)


class TimeRange(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    from_: str = msgspec.field(name="from", default="now-1h")
    to: str = "now"


class Dashboard(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    title: str
    uid: str = ""
    description: str | None = None
    panels: list[Panel] | None = None
    templating: Templating = Templating()
    time: TimeRange = TimeRange()

    @property
    def short_title(self) -> str:
        """The title without the folder before it."""
        return self.title.rpartition(" / ")[2]

    @property
    def variables(self) -> list[Variable]:
        return self.templating.variables

    def drawn(self) -> Iterator[Panel]:
        """Yield the panels that show something, those of collapsed rows included."""
        for row in rows(self):
            yield from row.panels


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Panels under a heading, or those at the top without one. ``folded``: they are shown at a click."""

    title: str | None
    panels: list[Panel]
    folded: bool = False


def rows(dashboard: Dashboard) -> list[Row]:
    """Return the dashboard's rows from top to bottom, with the panels of each in reading order."""
    found = [Row(title=None, panels=[])]
    for panel in sorted(dashboard.panels or [], key=_place):
        if panel.type == "row":
            inner = sorted(panel.panels or [], key=_place)
            found.append(Row(title=panel.title or "", panels=inner, folded=bool(panel.collapsed)))
        else:
            found[-1].panels.append(panel)
    return [row for row in found if row.title is not None or row.panels]


def _place(panel: Panel) -> tuple[int, int]:
    return panel.grid_pos.y, panel.grid_pos.x


def parse(text: bytes) -> Dashboard:
    """Return the dashboard of a file.

    Raises:
        msgspec.DecodeError: the file is no dashboard.
    """
    return msgspec.convert(_without_nulls(msgspec.json.decode(text)), Dashboard)


def _without_nulls(value: Any) -> Any:
    """Return ``value`` without the keys whose value is null; the first threshold's is one."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
