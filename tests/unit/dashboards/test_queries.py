"""Queries go out with the step and the text that Grafana would send, and a page comes of what they find."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from testkit.processes.servers import free_port
from testkit.prometheus import Found, StandIn, dashboard, panel, serving

from services.dashboards import __main__ as command
from services.dashboards import shipped
from services.dashboards.model import Dashboard, rows
from services.dashboards.page import Board, Frame, page
from services.dashboards.prometheus import Prometheus
from services.dashboards.queries import run
from services.dashboards.render import Look, board
from services.dashboards.times import Range
from services.dashboards.variables import Value
from services.errors import ConfigError, PrometheusUnavailable, QueryFailed

SPAN = Range(start_s=1000.0, end_s=4600.0)


def found(query: str) -> Found:
    if "wrong" in query:
        raise ValueError("parse error <here>")
    return [] if "nothing" in query else [({"role": "gateway"}, [(4000.0, 1.0), (4015.0, 2.0)])]


async def drawn(made: Dashboard, stand_in: StandIn, **values: Value) -> Board:
    with serving(stand_in):
        source = Prometheus(stand_in.url)
        try:
            drawings = await run(made, source, values, SPAN, 2.0)
        finally:
            await source.aclose()
    return Board(key="board", dashboard=made, values=values, drawings=drawings)


async def test_a_line_is_asked_at_steps_and_a_value_once() -> None:
    stand_in = StandIn(series=found)
    lines = panel("timeseries", 'rate(a{r=~"$r"}[$__rate_interval])')
    once = panel("stat", "increase(b[$__range])")
    once["targets"][0] |= {"instant": True, "range": False}
    await drawn(dashboard(lines, once), stand_in, r=Value(values=["x"], several=True))
    asked = {query["query"]: (path, query) for path, query in stand_in.asked}
    path, sent = asked['rate(a{r=~"x"}[32s])']
    assert path == "/api/v1/query_range"
    assert (sent["start"], sent["end"], sent["step"]) == ("990.0", "4590.0", "30.0")
    path, sent = asked["increase(b[3600s])"]
    assert (path, sent["time"]) == ("/api/v1/query", "4600.0")


async def test_hidden_targets_and_texts_ask_nothing_and_a_panel_may_set_its_step() -> None:
    stand_in = StandIn(series=found)
    hidden = panel("timeseries", "a", "b", interval="5m")
    hidden["targets"][1]["hide"] = True
    await drawn(dashboard(hidden, panel("text", options={"content": "x"})), stand_in)
    assert [(query["query"], query["step"]) for _, query in stand_in.asked] == [("a", "300.0")]


async def test_a_query_that_fails_leaves_the_others() -> None:
    made = dashboard(panel("timeseries", "wrong"), panel("stat", "nothing", title="N"), panel("stat", "b"))
    result = await drawn(made, StandIn(series=found))
    assert result.faulty() == ["T: parse error <here>"]
    assert result.without_data() == ["N"]
    text = page([result], Frame(source="there", span=SPAN))
    assert "parse error &lt;here&gt;" in text
    assert text.count("no data") == 1


async def test_a_page_needs_nothing_else_and_has_the_layout() -> None:
    row = {"type": "row", "title": "Second", "gridPos": {"y": 8, "h": 1, "w": 24, "x": 0}, "collapsed": True}
    folded = panel("stat", "c", gridPos={"h": 4, "w": 6, "x": 18, "y": 11})
    first = panel("timeseries", "a", gridPos={"h": 8, "w": 14, "x": 10, "y": 0}, title="on $r", description="of $r")
    made = dashboard(first, row | {"panels": [folded, panel("stat", "d", gridPos={"h": 4, "w": 24, "x": 6, "y": 9})]})
    result = await drawn(made, StandIn(series=found), r=Value(values=["x"]))
    text = page([result], Frame(source="there", span=SPAN, refresh_s=10))
    assert 'style="--x:11;--w:14;--y:1;--h:8"><h3 title="a">on x</h3><p class="about" title="of x">of x</p>' in text
    assert 'style="--x:19;--w:6;--y:3;--h:4"' in text
    assert 'style="--x:1;--w:24;--y:1;--h:4"' in text, "one that is too far to the right is moved, as Grafana does"
    assert "<details><summary>Second</summary>" in text
    assert [found.title for found in rows(made)] == [None, "Second"]
    assert '<meta http-equiv="refresh" content="10">' in text
    assert re.findall(r"<script|<link|<img|@import|url\(|src=|https?://", text) == []


async def test_a_look_has_the_values_and_the_scrape_interval_of_prometheus() -> None:
    stand_in = StandIn(series=found, values={"job": ["mesh"]})
    variables = [{"name": "job", "type": "query", "query": "label_values(up, job)", "label": "Job"}]
    made = dashboard(panel("timeseries", 'rate(a{job="$job"}[$__rate_interval])'), variables=variables)
    with serving(stand_in):
        source = Prometheus(stand_in.url)
        look = Look(given={"job": ["a"], "other": ["b"]})
        seen = await board(source, "board", made, look, Range(start_s=0, end_s=60))
        first = await board(source, "board", made, Look(given={}), Range(start_s=0, end_s=60))
        slow = await board(source, "board", made, Look(given={}, scrape_s=30), Range(start_s=0, end_s=60))
        await source.aclose()
    assert [each.values["job"].values for each in (seen, first)] == [["a"], ["mesh"]]
    queries = [drawing.result.queries for each in (first, slow) for drawing in each.drawings.values()]
    assert queries == [['rate(a{job="mesh"}[8s])'], ['rate(a{job="mesh"}[120s])']]
    assert "Job <code>mesh</code>" in page([first], Frame(source="there", span=SPAN))


def answering(answer: httpx.Response) -> Prometheus:
    return Prometheus("http://user:secret@there", transport=httpx.MockTransport(lambda _: answer))


async def test_an_address_that_is_no_prometheus_is_said_without_its_password() -> None:
    with pytest.raises(PrometheusUnavailable, match=r"user:\*\*\*@there answers 404, and not as Prometheus"):
        await answering(httpx.Response(404, text="<html>")).instant("up", 0)
    with pytest.raises(QueryFailed, match="out of bounds"):
        await answering(httpx.Response(422, json={"status": "error", "error": "out of bounds"})).instant("up", 0)
    scalar = {"status": "success", "data": {"resultType": "scalar", "result": [5, "2.5"]}}
    assert (await answering(httpx.Response(200, json=scalar)).instant("2.5", 5))[0].points == [(5.0, 2.5)]
    with pytest.raises(QueryFailed, match="gives a scalar"):
        await answering(httpx.Response(200, json=scalar)).range("2.5", SPAN, 1)
    refused = httpx.Response(404, json={"status": "error", "error": "no such path"})
    assert await answering(refused).scrape_interval_s() == 15.0
    with pytest.raises(ConfigError, match="no address"):
        Prometheus("http://a:b")


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder for output; the dashboards that come along are two small ones."""
    one = dashboard(
        panel("timeseries", "a"), title="some / One", uid="one", variables=[{"name": "r", "type": "textbox"}]
    )
    monkeypatch.setattr(
        command, "shipped", lambda: {"one": one, "two": dashboard(panel("stat", "nothing"), title="Two")}
    )
    return tmp_path / "out"


def call(stand_in: StandIn, *words: str | Path) -> int:
    with serving(stand_in):
        return command.main(["--prometheus", stand_in.url, *map(str, words)])


def test_the_command_writes_one_page_or_a_folder(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stand_in = StandIn(series=found)
    assert call(stand_in, "--out", two / "all.html", "--from", "-1h", "--to", "-5m") == 0
    whole = (two / "all.html").read_text()
    assert 'href="#one"' in whole
    assert whole.count("<h1>") == 2
    assert call(stand_in, "--out", two) == 0
    assert sorted(file.name for file in two.glob("*")) == ["all.html", "index.html", "one.html", "two.html"]
    assert '<a href="one.html">One</a><a href="two.html">Two</a>' in (two / "one.html").read_text()
    assert "  two: T: no data\n" in capsys.readouterr().err


def test_strict_fails_where_a_panel_is_empty(two: Path) -> None:
    out = two / "x.html"
    assert call(StandIn(series=found), "--out", out, "--strict", "--dashboard", "ONE", "--var", "r=v") == 0
    assert call(StandIn(series=found), "--out", out, "--strict") == 1
    assert call(StandIn(series=lambda _: found("wrong")), "--out", out, "--dashboard", "one", "--strict") == 1


def test_a_watch_goes_on_where_prometheus_is_away_for_a_while(
    two: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, written = [0], list[str]()

    def series(query: str) -> Found:
        asked[0] += 1
        if asked[0] == 2:
            raise ConnectionError
        return found(query)

    def write(file: Path, text: str) -> Path:
        written.append(text)
        if len(written) == 2:
            raise KeyboardInterrupt
        return file

    monkeypatch.setattr(command, "WATCH_S", 0.01)
    monkeypatch.setattr(command, "_write", write)
    with pytest.raises(KeyboardInterrupt):
        call(StandIn(series=series), "--watch", "--dashboard", "one", "--out", two / "x.html")
    assert asked == [3]
    assert "does not answer" in capsys.readouterr().err
    assert 'http-equiv="refresh"' in written[0]


def test_a_watch_goes_on_where_a_variable_is_refused_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variable = {"name": "j", "type": "query", "query": "label_values(up, job)"}
    made = dashboard(panel("timeseries", "a{job='$j'}"), title="One", uid="one", variables=[variable])
    monkeypatch.setattr(command, "shipped", lambda: {"one": made})
    monkeypatch.setattr(command, "WATCH_S", 0.01)
    answers = iter([(422, {"status": "error", "error": "too many samples"})])
    stand_in, written = Refusing(series=found, values={"job": ["mesh"]}, answers=answers), list[str]()

    def write(_file: Path, text: str) -> Path:
        written.append(text)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_write", write)
    with pytest.raises(KeyboardInterrupt):
        call(stand_in, "--watch", "--out", tmp_path / "x.html")
    assert "too many samples" in capsys.readouterr().err
    assert "mesh" in written[0]


@dataclass(kw_only=True)
class Refusing(StandIn):
    """What it is asked for values of labels gets ``answers`` first."""

    answers: Iterator[tuple[int, Any]]

    def answer(self, path: str, query: dict[str, str]) -> tuple[int, Any]:
        usual = super().answer(path, query)
        return next(self.answers, usual) if "/label/" in path else usual


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--dashboard", "tw"], "Unknown dashboard 'tw'. Did you mean two?"),
        (["--dashboard", "zzz"], "There are: one, two."),
        (["--var", "s=1"], "Unknown variable 's'"),
        (["--var", "r"], "has no value"),
        (["--from", "soon"], "is no time"),
        (["--out", "/proc/none/x.html"], "cannot be written"),
        (["--scrape-interval", "fast"], "no duration"),
    ],
)
def test_a_wrong_option_is_a_sentence(two: Path, words: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        call(StandIn(series=found), "--out", two / "x.html", *words)
    assert says in raised.value.message
    assert not two.exists()


def test_without_prometheus_it_says_so(two: Path) -> None:
    with pytest.raises(ConfigError, match="Which Prometheus"):
        command.main([])
    with pytest.raises(PrometheusUnavailable, match="does not answer"):
        command.main(["--prometheus", f"127.0.0.1:{free_port()}", "--out", str(two)])
    assert command.main(["--list"]) == 0


def kinds(made: Dashboard) -> dict[str, Any]:
    """What of the JSON's words a dashboard uses that are drawn by name here."""
    panels = [each for each in made.drawn() if each.type != "row"]
    return {
        "panel": {each.type for each in panels},
        "repeat": {each.repeat for each in panels},
        "stacking": {
            (each.field_config.defaults.get("custom") or {}).get("stacking", {}).get("mode") for each in panels
        },
    }


@pytest.mark.parametrize("name", shipped.shipped())
async def test_each_dashboard_that_comes_along_is_drawn_without_a_fault(name: str) -> None:
    """Each kind of panel, variable and transformation in it is known here."""
    labels = {"layer": "0", "shard": "0", "rank": "1", "role": "r", "le": "1", "status": "ready", "quantile": "0.5"}

    def series(_: str) -> Found:
        return [(labels, [(4000.0, 1.0), (4600.0, 2.0)])]

    made = shipped.shipped()[name]
    used = kinds(made)
    assert used["repeat"] == {None}
    assert used["stacking"] <= {None, "normal"}
    with serving(StandIn(series=series, values={"namespace": ["n"], "job": ["j"]})) as stand_in:
        source = Prometheus(stand_in.url)
        seen = await board(source, name, made, Look(given={}), SPAN)
        await source.aclose()
    text = page([seen], Frame(source="there", span=SPAN))
    assert (seen.faulty(), seen.without_data()) == ([], [])
    assert re.findall('class="fault"|no data|drawn by Grafana alone', text) == []
    assert not re.search(r"\$\w+", " ".join(query for each in seen.drawings.values() for query in each.result.queries))


def test_a_file_that_is_no_dashboard_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no dashboards in"):
        shipped.shipped(tmp_path)
    (tmp_path / "bad.json").write_text('{"panels": 5}')
    with pytest.raises(ConfigError, match=r"bad\.json is no dashboard"):
        shipped.shipped(tmp_path)
