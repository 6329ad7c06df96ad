"""What panels draw, to the coordinate in small cases. Plots are 1000 wide and high, whatever room they have."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
from testkit.prometheus import dashboard, panel

from services.dashboards.axes import Tick
from services.dashboards.colors import css
from services.dashboards.draw import panel as drawn_panel
from services.dashboards.draw.chart import Axis
from services.dashboards.draw.heatmap import buckets, level
from services.dashboards.draw.html import Html, element, join, number
from services.dashboards.draw.text import markdown
from services.dashboards.draw.timeline import states
from services.dashboards.frames import Frame, Result, legend, natural, reduced, segments
from services.dashboards.queries import Drawing
from services.dashboards.times import Range

SPAN = Range(start_s=0.0, end_s=100.0)
NAN = math.nan


def frame(*points: tuple[float, float], name: str = "a", ref: str = "A", **labels: str) -> Frame:
    return Frame(name=name, labels=labels, ref=ref, points=points)


def drawing(made: dict[str, Any], *frames: Frame, step_s: float = 50.0, faults: Sequence[str] = ()) -> Drawing:
    [read] = dashboard(made).panels or []
    has_queries = read.type != "text"
    result = Result(frames=frames, faults=faults, step_s=step_s, has_queries=has_queries)
    return Drawing(panel=read, title=read.title or "", description=read.description or "", result=result)


def html(made: dict[str, Any], *frames: Frame, step_s: float = 50.0) -> str:
    return drawn_panel.draw(drawing(made, *frames, step_s=step_s), SPAN, 0)


def paths(text: str, kind: str) -> list[str]:
    """The paths of a class, in order."""
    return re.findall(rf'<path d="([^"]*)" class="{kind}"', text)


def with_custom(kind: str = "timeseries", **custom: Any) -> dict[str, Any]:
    defaults = {"unit": "s", "min": 0, "max": 10, "custom": custom}
    return panel(kind, "x", fieldConfig={"defaults": defaults, "overrides": []})


LINE = ((0.0, 0.0), (50.0, 5.0), (100.0, 10.0))


def test_a_line_goes_through_its_values() -> None:
    text = html(with_custom(), frame(*LINE))
    assert paths(text, "line") == ["M0 1000L500 500 1000 0"]
    assert "<title>a</title>" in text


def test_a_line_breaks_where_a_step_has_no_value() -> None:
    points = [(0.0, 1.0), (10.0, 1.0), (40.0, 1.0), (50.0, NAN), (60.0, 1.0), (70.0, 1.0)]
    text = html(with_custom(), frame(*points), step_s=10)
    assert paths(text, "line") == ["M0 900L100 900M600 900L700 900"]
    assert paths(text, "dots") == ["M400 900h0"]
    joined = html(with_custom(spanNulls=True), frame(*points), step_s=10)
    assert paths(joined, "line") == ["M0 900L100 900 400 900 600 900 700 900"]


def test_a_step_holds_until_the_next_value() -> None:
    text = html(with_custom(lineInterpolation="stepAfter"), frame(*LINE))
    assert paths(text, "line") == ["M0 1000L500 1000 500 500 1000 500 1000 0"]


def test_an_area_ends_at_zero() -> None:
    text = html(with_custom(fillOpacity=10), frame(*LINE))
    assert paths(text, "area") == ["M0 1000L500 500 1000 0 1000 1000 500 1000 0 1000Z"]
    assert 'fill-opacity="0.1"' in text


def test_stacked_areas_stand_on_one_another() -> None:
    text = html(with_custom(stacking={"mode": "normal"}), frame(*LINE), frame((0, 5), (50, 5), name="b"))
    assert paths(text, "line") == ["M0 1000L500 500 1000 0", "M0 500L500 0"]
    assert paths(text, "area")[1] == "M0 500L500 0 500 500 0 1000Z"


def test_bars_are_as_wide_as_their_step() -> None:
    text = html(with_custom(drawStyle="bars"), frame((50, 5.0)), step_s=10)
    assert paths(text, "bars") == ["M460 1000V500H540V1000Z"]


def test_thresholds_are_lines_where_the_panel_shows_them() -> None:
    made = with_custom(thresholdsStyle={"mode": "dashed"})
    made["fieldConfig"]["defaults"]["thresholds"] = {"steps": [{"color": "green"}, {"color": "red", "value": 2.5}]}
    text = html(made, frame(*LINE))
    assert '<path d="M0 750H1000" style="--c:var(--red)" class="line dashed">' in text
    made["fieldConfig"]["defaults"]["custom"] = {}
    assert "dashed" not in html(made, frame(*LINE))


def test_an_override_has_its_own_colour_unit_and_axis() -> None:
    made = with_custom()
    properties = [
        {"id": "color", "value": {"mode": "fixed", "fixedColor": "dark-red"}},
        {"id": "unit", "value": "bytes"},
        {"id": "custom.axisPlacement", "value": "right"},
        {"id": "max", "value": 20},
    ]
    made["fieldConfig"]["overrides"] = [{"matcher": {"id": "byName", "options": "b"}, "properties": properties}]
    text = html(made, frame(*LINE), frame(*LINE, name="b"))
    assert paths(text, "line") == ["M0 1000L500 500 1000 0", "M0 1000L500 750 1000 500"]
    assert 'style="--c:var(--red)"' in text
    [right] = re.findall(r'<div class="y right"[^>]*>(.*?)</div>', text)
    assert "20 B" in right


def test_ticks_stand_beside_their_lines() -> None:
    axis = Axis(ticks=[Tick(at=0.25, label="2 s")], label="time").html("left")
    assert axis == '<div class="y left" style="--chars:3"><b>time</b><span style="bottom:25%">2 s</span></div>'


def test_the_legend_has_the_values_that_it_names() -> None:
    options = {"legend": {"displayMode": "table", "placement": "right", "calcs": ["mean", "lastNotNull", "max"]}}
    text = html(with_custom() | {"options": options}, frame(*LINE, (100.0, NAN)))
    assert "<tr><th></th><th>mean</th><th>last</th><th>max</th></tr>" in text
    assert "<td>5 s</td><td>10 s</td><td>10 s</td>" in text
    assert 'class="with-legend beside"' in text
    hidden = {"legend": {"displayMode": "hidden"}}
    assert "legend" not in html(with_custom() | {"options": hidden}, frame(*LINE)).replace("with-legend", "")


def test_a_stat_has_the_colour_of_its_threshold() -> None:
    made = panel("stat", "x", options={"colorMode": "background", "graphMode": "area"})
    steps = [{"color": "green"}, {"color": "orange", "value": 5}, {"color": "red", "value": 9}]
    made["fieldConfig"]["defaults"] = {"unit": "short", "thresholds": {"steps": steps}}
    text = html(made, frame(*LINE))
    assert '<div class="tile full" style="--c:var(--red)">' in text
    assert "<b>10</b>" in text
    assert 'd="M0 1000L0 1000 500 523.8 1000 47.6L1000 1000Z"' in text
    assert "var(--orange)" in html(made, frame((0, 0.0), (50, 8.9)))
    assert "<span>" not in text
    assert "<span>b</span>" in html(made, frame(*LINE), frame(*LINE, name="b"))


@pytest.mark.parametrize(
    ("value", "mapping", "shown", "color"),
    [
        (1.0, {"type": "value", "options": {"1": {"text": "up", "color": "green"}}}, "up", "var(--green)"),
        (7.0, {"type": "range", "options": {"from": 5, "to": 9, "result": {"text": "some"}}}, "some", "var(--text)"),
        (3.0, {"type": "range", "options": {"from": 5, "result": {"text": "some"}}}, "3", "var(--text)"),
        (2.0, {"type": "value", "options": {"1": {"text": "up"}}}, "2", "var(--text)"),
    ],
)
def test_a_value_may_be_a_word(value: float, mapping: dict[str, Any], shown: str, color: str) -> None:
    made = panel("stat", "x")
    made["fieldConfig"]["defaults"] = {"mappings": [mapping]}
    text = html(made, frame((50, value)))
    assert f"<b>{shown}</b>" in text
    assert f"--c:{color}" in text


def test_bars_are_shares_of_their_bounds() -> None:
    made = panel("bargauge", "x")
    made["fieldConfig"]["defaults"] = {"min": 0, "max": 8, "unit": "none"}
    text = html(made, frame((0, 2.0)), frame((0, 16.0), name="b"))
    assert re.findall(r"width:([\d.]+%)", text) == ["25%", "100%"]
    made["fieldConfig"]["defaults"] = {}
    assert re.findall(r"width:([\d.]+%)", html(made, frame((0, 2.0)), frame((0, 16.0), name="b"))) == ["12.5%", "100%"]


def test_a_gauge_is_an_arc() -> None:
    made = panel("gauge", "x")
    steps = [{"color": "green"}, {"color": "red", "value": 50}]
    made["fieldConfig"]["defaults"] = {"min": 0, "max": 100, "thresholds": {"mode": "percentage", "steps": steps}}
    text = html(made, frame((0, 50.0)))
    assert '<path d="M30.7 140A80 80 0 0 1 100 20" fill="none" stroke-width="18" style="stroke:var(--red)">' in text
    assert '<text x="100" y="100" class="value" style="fill:var(--red)">50</text>' in text


def test_buckets_lose_what_is_below_them() -> None:
    frames = [
        frame((0, 1.0), (50, 0.0), name="0.1", le="0.1"),
        frame((0, 9.0), (50, 4.0), name="10", le="10"),
        frame((0, 4.0), (50, 4.0), name="1", le="1"),
        frame((0, 9.0), (50, 4.0), name="+Inf", le="+Inf"),
    ]
    assert [(row.label, dict(row.counts)) for row in buckets(frames)] == [
        ("0.1", {0: 1, 50: 0}),
        ("1", {0: 3, 50: 4}),
        ("10", {0: 5, 50: 0}),
        ("+Inf", {0: 0, 50: 0}),
    ]
    assert [level(count, 64) for count in (0.5, 1, 16, 63, 64)] == [1, 1, 4, 8, 8]


def test_a_cell_is_as_wide_as_its_step_and_as_high_as_its_bucket() -> None:
    made = panel("heatmap", "x", options={"yAxis": {"unit": "s"}})
    text = html(made, frame((50, 1.0), name="0.5", le="0.5"), frame((50, 5.0), name="1", le="1"), step_s=10)
    assert 'd="M400 500H500V1000H400Z" style="fill:var(--h4)"' in text
    assert 'd="M400 0H500V500H400Z" style="fill:var(--h8)"' in text
    assert '<span style="bottom:50%">500 ms</span><span style="bottom:100%">1 s</span>' in text
    rows = html(made, frame((50, 1.0), name="layer 0"), frame((50, 4.0), name="layer 1"), step_s=10)
    assert 'd="M400 0H500V500H400Z" style="fill:var(--h8)"' in rows
    assert "layer 0</span>" in rows


def test_states_hold_until_they_change() -> None:
    assert states([(0, 1.0), (10, 1.0), (20, 2.0)], 10) == [(0, 20, 1.0), (20, 30, 2.0)]
    made = panel("state-timeline", "x")
    made["fieldConfig"]["defaults"] = {
        "mappings": [{"type": "value", "options": {"1": {"text": "up", "color": "green"}}}]
    }
    text = html(made, frame((0, 1.0), (50, 1.0)))
    assert '<i style="left:0%;width:100%;--c:var(--green)" title="up">up</i>' in text


def test_nothing_is_said_to_be_nothing() -> None:
    assert '<p class="nothing">no data</p>' in html(panel("timeseries", "x"))
    assert '<p class="nothing">no data</p>' in html(panel("stat", "x"), frame((0, NAN)))
    assert "no data" not in html(panel("text", options={"content": "hi"}))
    wrong = drawn_panel.draw(drawing(panel("stat", "x"), faults=["bad <query>"]), SPAN, 0)
    assert '<p class="fault">bad &lt;query&gt;</p>' in wrong
    assert "no data" not in wrong
    assert "drawn by Grafana alone" in html(panel("nodeGraph", "x"), frame(*LINE))


HOSTILE = '"><script>alert(1)</script>'


@pytest.mark.parametrize("kind", ["timeseries", "stat", "bargauge", "gauge", "table", "heatmap", "state-timeline"])
def test_names_of_others_are_text(kind: str) -> None:
    made = panel(kind, "x", title=HOSTILE, description=HOSTILE)
    made["fieldConfig"]["defaults"] = {"color": {"mode": "fixed", "fixedColor": HOSTILE}, "unit": HOSTILE}
    text = html(made, frame(*LINE, name=HOSTILE, label=HOSTILE), frame(*LINE, name="b", label="b"))
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert f'style="--c:{HOSTILE}' not in text


@pytest.mark.parametrize(
    ("name", "becomes"),
    [
        ("semi-dark-orange", "var(--orange)"),
        ("#a1B2c3", "#a1B2c3"),
        ("transparent", "transparent"),
        ("#fff;background:url(there)", "var(--text)"),
        ("text", "var(--text)"),
    ],
)
def test_a_colour_is_a_colour_and_nothing_else(name: str, becomes: str) -> None:
    assert css(name) == becomes


def test_markup_is_made_by_elements_alone() -> None:
    assert element("b", "a<b", element("i", "&"), title='"', class_="x", data_a=None) == (
        '<b title="&quot;" class="x">a&lt;b<i>&amp;</i></b>'
    )
    assert join([Html("<br>"), "<br>"]) == "<br>&lt;br&gt;"
    assert [number(value) for value in (0.04, -0.04, 12.0, 0.25, 999.96)] == ["0", "0", "12", "0.2", "1000"]


def test_notes_are_a_little_markdown() -> None:
    text = markdown(
        "# Head\nSome **bold** `a<b`\nmore\n\n- one\n- [two](https://x/y)\n\n[x](javascript:alert)\n```\n# code\n```"
    )
    assert text == (
        '<div class="text"><h4>Head</h4><p>Some <b>bold</b> <code>a&lt;b</code> more</p>'
        '<ul><li>one</li><li><a href="https://x/y">two</a></li></ul><p>[x](javascript:alert)</p><pre># code</pre></div>'
    )


def test_series_are_named_as_grafana_names_them() -> None:
    labels = {"__name__": "up", "job": "a", "role": "gateway"}
    assert legend(labels, "{{role}} {{ job }}{{none}}", True) == "gateway a"
    assert legend(labels, None, True) == 'up{job="a", role="gateway"}'
    assert legend(labels, "__auto", True) == "up"
    assert legend({}, "__auto", False) == "Value"
    assert legend({}, "", False) == "{}"
    assert sorted(["experts-10", "experts-2", "a"], key=natural) == ["a", "experts-2", "experts-10"]
    assert sorted(["2", "\u00b2", "1" * 5000], key=natural) == ["2", "1" * 5000, "\u00b2"], "what people name"


@pytest.mark.parametrize(
    ("calc", "value"),
    [("lastNotNull", 3.0), ("mean", 2.0), ("min", 1.0), ("max", 3.0), ("sum", 6.0), ("count", 3.0), ("range", 2.0)],
)
def test_a_series_is_reduced_to_a_value(calc: str, value: float) -> None:
    assert reduced(frame((0, 1.0), (1, 2.0), (2, 3.0), (3, NAN)), calc) == value
    assert reduced(frame((0, NAN)), calc) is None


def test_a_run_of_points_has_no_gap() -> None:
    points = frame((0, 1.0), (10, 1.0), (26, 1.0), (36, NAN), (46, 1.0))
    assert [[at for at, _ in run] for run in segments(points, 10)] == [[0, 10], [26], [46]]
