"""Tables have the rows and columns that Grafana makes of series and transformations."""

from __future__ import annotations

import pytest
from testkit.prometheus import dashboard, panel

from services.dashboards.draw.panel import draw
from services.dashboards.frames import Frame, Result
from services.dashboards.model import Transformation
from services.dashboards.queries import Drawing
from services.dashboards.times import Range
from services.dashboards.transform import Table, sorted_as_panel_wants, table
from services.errors import QueryFailed


def frame(value: float, ref: str = "A", **labels: str) -> Frame:
    return Frame(name="", labels={"__name__": "up"} | labels, ref=ref, points=[(9.0, value)])


def step(name: str, **options: object) -> Transformation:
    return Transformation(id=name, options=options)


WORKERS = [frame(1.0, role="a", layer="10"), frame(3.0, role="b", layer="10"), frame(2.0, role="a", layer="9")]


def test_a_series_is_a_row() -> None:
    assert table(WORKERS[:2], ["A"], []) == Table(
        columns=["Time", "layer", "role", "Value"],
        rows=[
            {"role": "a", "layer": "10", "Time": 9.0, "Value": 1.0},
            {"role": "b", "layer": "10", "Time": 9.0, "Value": 3.0},
        ],
    )


def test_targets_are_columns_beside_one_another() -> None:
    made = table([frame(1.0, role="a"), frame(5.0, "B", role="a"), frame(6.0, "B", role="b")], ["A", "B"], [])
    assert made.columns == ["Time", "role", "Value #A", "Value #B"]
    assert [(row.get("Value #A"), row["Value #B"]) for row in made.rows] == [(1.0, 5.0), (None, 6.0)]


def test_columns_are_left_out_ordered_and_renamed() -> None:
    options = {
        "excludeByName": {"Time": True, "layer": True, "role": False},
        "indexByName": {"Value": 0, "role": 1},
        "renameByName": {"Value": "Rows", "role": ""},
    }
    made = table(WORKERS[:1], ["A"], [step("organize", **options)])
    assert made == Table(columns=["Rows", "role"], rows=[{"role": "a", "Rows": 1.0}])


def test_rows_are_ordered_by_number_with_empty_ones_last() -> None:
    rows = [{"v": 2.0}, {"v": None}, {"v": 10.0}, {"v": float("nan")}]
    made = sorted_as_panel_wants(Table(columns=["v"], rows=rows), [{"displayName": "v", "desc": True}])
    assert [str(row["v"]) for row in made.rows] == ["10.0", "2.0", "None", "nan"]
    by_two = table(WORKERS, ["A"], [step("sortBy", sort=[{"field": "role"}, {"field": "Value", "desc": True}])])
    assert [row["Value"] for row in by_two.rows] == [2.0, 1.0, 3.0]


def test_a_matrix_has_a_row_and_a_column_for_each_value() -> None:
    made = table(WORKERS, ["A"], [step("groupingToMatrix", columnField="role", rowField="layer", valueField="Value")])
    assert made.columns == ["layer\\role", "a", "b"]
    assert made.rows == [{"layer\\role": "9", "a": 2.0}, {"layer\\role": "10", "a": 1.0, "b": 3.0}]


def test_rows_are_joined_by_a_column() -> None:
    frames = [frame(1.0, role="a", x="1"), frame(5.0, "B", role="a", y="2")]
    made = table(frames, ["A", "B"], [step("joinByField", byField="role"), step("limit", limitField=1)])
    assert made.rows == [{"role": "a", "x": "1", "y": "2", "Time": 9.0, "Value #A": 1.0, "Value #B": 5.0}]
    named = table(WORKERS, ["A"], [step("filterFieldsByName", include={"names": ["role"]}), step("merge")])
    assert named.columns == ["role"]


def test_a_transformation_that_is_not_known_is_said() -> None:
    with pytest.raises(QueryFailed, match="'spatial' is not known"):
        table(WORKERS, ["A"], [step("spatial")])
    assert table(WORKERS, ["A"], [Transformation(id="spatial", disabled=True)]).columns == [
        "Time",
        "layer",
        "role",
        "Value",
    ]


def test_cells_have_units_and_colours() -> None:
    made = panel("table", "x", title="")
    thresholds = {"steps": [{"color": "green"}, {"color": "red", "value": 2}]}
    made["fieldConfig"] = {
        "defaults": {"unit": "reqps", "thresholds": thresholds},
        "overrides": [
            {"matcher": {"id": "byName", "options": "Time"}, "properties": [{"id": "custom.hidden", "value": True}]},
            {
                "matcher": {"id": "byType", "options": "number"},
                "properties": [{"id": "custom.cellOptions", "value": {"type": "color-background"}}],
            },
        ],
    }
    [read] = dashboard(made).panels or []
    result = Result(frames=[frame(3.0, role="a"), frame(1.0, role="b")])
    text = draw(Drawing(panel=read, title="", description="", result=result), Range(start_s=0, end_s=9), 0)
    assert text.endswith(
        "<table><tr><th>role</th><th>Value</th></tr>"
        '<tr><td>a</td><td class="n full" style="--c:var(--red)">3 req/s</td></tr>'
        '<tr><td>b</td><td class="n full" style="--c:var(--green)">1 req/s</td></tr></table></div></section>'
    )


def test_a_scheme_of_colours_goes_from_one_to_the_next() -> None:
    made = panel("table", "x")
    cell = {"id": "custom.cellOptions", "value": {"type": "color-text"}}
    made["fieldConfig"] = {
        "defaults": {"color": {"mode": "continuous-GrYlRd"}, "min": 0, "max": 100},
        "overrides": [{"matcher": {"id": "byName", "options": "Value"}, "properties": [cell]}],
    }
    [read] = dashboard(made).panels or []
    result = Result(frames=[frame(25.0, role="a")])
    text = draw(Drawing(panel=read, title="", description="", result=result), Range(start_s=0, end_s=9), 0)
    assert "color:color-mix(in srgb, var(--yellow) 50%, var(--green))" in text
