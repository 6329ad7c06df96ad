"""What a dashboard is made of: rows of panels, and settings of its own that a reader may type in."""

from __future__ import annotations

from dataclasses import dataclass

from observability.panels import Panel


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A variable that is typed in, such as a price."""

    name: str
    title: str
    value: str
    shows: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Board:
    """``name`` is that of its file and its address."""

    name: str
    title: str
    shows: str
    rows: tuple[Row, ...]
    settings: tuple[Setting, ...] = ()


SLO = Setting(
    name="slo",
    title="Objective",
    value="0.99",
    shows="Share of requests that are to meet their targets; 1 minus this is the error budget.",
)
