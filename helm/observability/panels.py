"""Panels of Grafana. In: what to show and what to say of it. Out: builders of the SDK, all in one look.

Every panel has a unit, a description that says what it shows and what to do about it, and thresholds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.variants import Dataquery
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode, HeatmapColorScale
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from observability.queries import quantile, rate

Panel = timeseries.Panel | stat.Panel | heatmap.Panel | statetimeline.Panel | table.Panel
_Any = TypeVar("_Any", timeseries.Panel, stat.Panel, heatmap.Panel, statetimeline.Panel, table.Panel)
DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
WIDTH = 24
"""Columns of a dashboard."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """An expression and the name of its lines."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Where a value turns amber, then red: from there upwards, or with ``below`` from there downwards."""

    amber: float
    red: float
    below: bool = False

    def steps(self) -> list[tuple[float | None, str]]:
        if self.below:
            return [(None, "red"), (self.red, "orange"), (self.amber, "green")]
        return [(None, "green"), (self.amber, "orange"), (self.red, "red")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Says:
    """A panel's title, unit, what it shows, what to do when it is red (or what it is for), and limits if it has any."""

    title: str
    unit: str
    shows: str
    act: str
    limits: Limits | None = None
    span: int = 12
    height: int = 8

    @property
    def description(self) -> str:
        return f"{self.shows}\n\n{'When red' if self.limits else 'What for'}: {self.act}"


def lines(says: Says, *queries: Query, stacked: bool = False, most: float | None = None) -> timeseries.Panel:
    """Values over time. A dashed line marks each limit."""
    panel = _panel(timeseries.Panel(), says, queries, _ranged)
    panel = panel.fill_opacity(30 if stacked else 8).line_width(1).show_points(common_models.VisibilityMode.NEVER)
    panel = panel.min(0).tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
    panel = panel.legend(_legend())
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    if says.limits:
        style = common.GraphThresholdsStyleConfig().mode(common_models.GraphTresholdsStyleMode.DASHED)
        panel = panel.thresholds_style(style)
    return panel if most is None else panel.max(most)


def quantiles(says: Says, name: str) -> timeseries.Panel:
    """Median and tail of a histogram, over all processes that have it."""
    parts = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return lines(says, *(Query(expr=quantile(part, name), legend=legend) for legend, part in parts.items()))


def number(says: Says, query: Query, *, decimals: int | None = None) -> stat.Panel:
    """The last value, with its course behind it."""
    panel = _panel(stat.Panel(), says, [query], _ranged).graph_mode(common_models.BigValueGraphMode.AREA)
    panel = panel.color_mode(common_models.BigValueColorMode.VALUE)
    panel = panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    return panel if decimals is None else panel.decimals(decimals)


def once(says: Says, query: Query, *, decimals: int | None = None) -> stat.Panel:
    """One value for the whole time that the dashboard shows."""
    panel = _panel(stat.Panel(), says, [query], _instant).graph_mode(common_models.BigValueGraphMode.NONE)
    panel = panel.color_mode(common_models.BigValueColorMode.VALUE)
    panel = panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    return panel if decimals is None else panel.decimals(decimals)


def spread(says: Says, name: str) -> heatmap.Panel:
    """How many observations of a histogram fell into each bucket: shows two peaks where quantiles show one line."""
    query = Query(expr=rate(f"{name}_bucket", "le"), legend="{{le}}")
    panel = _panel(heatmap.Panel(), says, [query], _buckets)
    return _coloured(panel.calculate(False).y_axis(heatmap.YAxisConfig().unit(says.unit)), "Oranges", "cps")


def rows(says: Says, query: Query) -> heatmap.Panel:
    """One row for each line of ``query``, its values as colours over time."""
    panel = _panel(heatmap.Panel(), says, [query], _ranged).calculate(False)
    return _coloured(panel.y_axis(heatmap.YAxisConfig().unit("short")), "Spectral", says.unit)


def matrix(says: Says, query: Query, *, row: str, column: str, coloured: bool = True) -> table.Panel:
    """One cell for each value of the labels ``row`` and ``column``, as it is now; coloured by its value."""
    panel = _panel(table.Panel(), says, [query], _tabled).show_header(True)
    grouped = {"columnField": column, "rowField": row, "valueField": "Value", "emptyValue": "null"}
    panel = panel.with_transformation(models.DataTransformerConfig(id_val="groupingToMatrix", options=grouped))
    if not coloured:
        return panel
    cells = models.DynamicConfigValue(id_val="custom.cellOptions", value={"type": "color-background", "mode": "basic"})
    scheme = dashboard.FieldColor().mode(models.FieldColorModeId.CONTINUOUS_GR_YL_RD)
    return panel.color_scheme(scheme).override_by_field_type("number", [cells])


def states(says: Says, *queries: Query, names: dict[str, str] | None = None) -> statetimeline.Panel:
    """What holds when. ``names`` has texts for values."""
    panel = _panel(statetimeline.Panel(), says, queries, _ranged).merge_values(True)
    panel = panel.show_value(common_models.VisibilityMode.AUTO).legend(_legend())
    if not names:
        return panel
    texts = {
        value: models.ValueMappingResult(text=text, index=index) for index, (value, text) in enumerate(names.items())
    }
    return panel.mappings([models.ValueMap(options=texts)])


def _panel(panel: _Any, says: Says, queries: Sequence[Query], how: Callable[[Query], prometheus.Dataquery]) -> _Any:
    targets: list[Builder[Dataquery]] = [
        how(query).ref_id(chr(ord("A") + index)) for index, query in enumerate(queries)
    ]
    return (
        panel.title(says.title)
        .description(says.description)
        .unit(says.unit)
        .datasource(DATASOURCE)
        .span(says.span)
        .height(says.height)
        .thresholds(_thresholds(says.limits))
        .targets(targets)
    )


def _thresholds(limits: Limits | None) -> dashboard.ThresholdsConfig:
    steps = limits.steps() if limits else [(None, "green")]
    made = [models.Threshold(value=value, color=color) for value, color in steps]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(made)


def _ranged(query: Query) -> prometheus.Dataquery:
    return prometheus.Dataquery().expr(query.expr).legend_format(query.legend).range().datasource(DATASOURCE)


def _instant(query: Query) -> prometheus.Dataquery:
    return prometheus.Dataquery().expr(query.expr).legend_format(query.legend).instant().datasource(DATASOURCE)


def _tabled(query: Query) -> prometheus.Dataquery:
    return _instant(query).format(PromQueryFormat.TABLE)


def _buckets(query: Query) -> prometheus.Dataquery:
    """With exemplars: a dot for a traced request, which leads to its trace."""
    return _ranged(query).format(PromQueryFormat.HEATMAP).exemplar(True)


def _coloured(panel: heatmap.Panel, scheme: str, unit: str) -> heatmap.Panel:
    color = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme(scheme).steps(64)
    color = color.scale(HeatmapColorScale.EXPONENTIAL).exponent(0.5).fill("dark-orange").reverse(scheme == "Spectral")
    shown = panel.show_value(common_models.VisibilityMode.NEVER)
    return shown.color(color).cell_values(heatmap.CellValues().unit(unit)).show_legend().show_tooltip()


def _legend() -> Any:
    legend = common.VizLegendOptions().show_legend(True).placement(common_models.LegendPlacement.BOTTOM)
    return legend.display_mode(common_models.LegendDisplayMode.LIST).calcs([])
