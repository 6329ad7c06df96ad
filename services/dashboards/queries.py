"""Runs the queries of a dashboard's panels and returns what each panel has to draw."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.dashboards.frames import Frame, Result, legend, natural
from services.dashboards.model import Dashboard, Panel, Target
from services.dashboards.prometheus import Series
from services.dashboards.times import Range, seconds, step_for
from services.dashboards.variables import Value, builtins, expand
from services.errors import ConfigError, QueryFailed

_POINTS_PER_COLUMN = 12
"""Values of a line for each column of the grid that its panel has: one for about five pixels."""
_HEATMAP_POINTS_PER_COLUMN = 4
_AT_ONCE = 8


class Source(Protocol):
    """A Prometheus, as a dashboard uses it."""

    async def range(self, query: str, span: Range, step_s: float) -> list[Series]: ...

    async def instant(self, query: str, at_s: float) -> list[Series]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """A panel with the text of its variables filled in, and what its queries gave."""

    panel: Panel
    title: str
    description: str
    result: Result
    values: Mapping[str, Value] = field(default_factory=dict)


async def run(
    dashboard: Dashboard, source: Source, values: Mapping[str, Value], span: Range, scrape_s: float
) -> dict[int, Drawing]:
    """Return the drawings of a dashboard's panels, by the panels' :func:`id`.

    Raises:
        PrometheusUnavailable: no answer.
    """
    turn = asyncio.Semaphore(_AT_ONCE)

    async def one(panel: Panel) -> tuple[int, Drawing]:
        async with turn:
            return id(panel), await _drawing(panel, source, values, span, scrape_s)

    return dict(await asyncio.gather(*map(one, dashboard.drawn())))


async def _drawing(panel: Panel, source: Source, values: Mapping[str, Value], span: Range, scrape_s: float) -> Drawing:
    step_s = _step_s(panel, span, scrape_s)
    known = {**values, **builtins(span, step_s, scrape_s)}
    frames: list[Frame] = []
    faults, asked = [], []
    targets = [target for target in panel.targets or [] if target.expr and not target.hide]
    for target in targets:
        asked.append(expand(target.expr, known))
        try:
            frames += await _frames(panel, target, asked[-1], source, span, _own_step_s(target, step_s))
        except (QueryFailed, ConfigError) as error:
            faults.append(error.message)
    result = Result(frames=frames, faults=faults, step_s=step_s, has_queries=panel.type != "text", queries=asked)
    return Drawing(
        panel=panel,
        title=expand(panel.title or "", known),
        description=expand(panel.description or "", known),
        result=result,
        values=known,
    )


def _step_s(panel: Panel, span: Range, scrape_s: float) -> float:
    per_column = _HEATMAP_POINTS_PER_COLUMN if panel.type == "heatmap" else _POINTS_PER_COLUMN
    points = min(panel.max_data_points or 10_000, max(4, panel.grid_pos.w) * per_column)
    return step_for(span.seconds, points, seconds(panel.interval.lstrip(">")) if panel.interval else scrape_s)


def _own_step_s(target: Target, step_s: float) -> float:
    return max(step_s, seconds(target.interval)) if target.interval else step_s


async def _frames(panel: Panel, target: Target, query: str, source: Source, span: Range, step_s: float) -> list[Frame]:
    if is_instant(panel, target):
        series = await source.instant(query, span.end_s)
    else:
        series = await source.range(query, span, step_s)
        return sorted(named(series, target), key=lambda frame: natural(frame.name))
    return named(series, target)


def is_instant(panel: Panel, target: Target) -> bool:
    """Return whether the query is for one moment: where it says so, and in a table that asks for both ways."""
    return bool(target.instant) and (not target.range or panel.type == "table")


def named(series: Sequence[Series], target: Target) -> list[Frame]:
    """Return the frames of one target's series, in their order: ``topk`` and ``sort`` of PromQL make one."""
    alone = len(series) == 1
    return [
        Frame(
            name=legend(each.labels, target.legend_format, alone),
            labels=each.labels,
            ref=target.ref_id,
            points=each.points,
        )
        for each in series
    ]
