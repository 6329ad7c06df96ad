"""What Prometheus is asked for a run's time, and what becomes of its answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

import httpx
import promql_parser
import pytest

from loadgen.errors import BadSetting, ServerUnusable
from loadgen.prometheus import DEFAULT, LINES, POINTS, Prometheus, Query, query_of

Answer = Callable[[dict[str, str]], httpx.Response]


def good(*results: Any) -> httpx.Response:
    return httpx.Response(200, json={"status": "success", "data": {"resultType": "matrix", "result": list(results)}})


def prometheus(answer: Answer, **settings: Any) -> tuple[Prometheus, list[tuple[str, dict[str, str]]]]:
    """One that ``answer`` plays, and what it is asked: path and form."""
    asked: list[tuple[str, dict[str, str]]] = []

    def respond(request: httpx.Request) -> httpx.Response:
        form = {name: values[0] for name, values in parse_qs(request.content.decode()).items()}
        asked.append((request.url.path, form))
        return answer(form)

    transport = httpx.MockTransport(respond)
    return Prometheus("http://prometheus:9090/base/", transport=transport, **settings), asked


async def test_it_is_asked_for_the_time_of_the_run_in_steps_that_bound_the_points() -> None:
    there, asked = prometheus(lambda _: good(), matchers='namespace="mesh"', more=[Query(name="Up", text="up")])
    found = await there.series(1000.5, 6000.0)
    assert [series.name for series in found] == [*(query.name for query in DEFAULT), "Up"]
    assert {path for path, _ in asked} == {"/base/api/v1/query_range"}
    assert {(form["start"], form["end"], form["step"]) for _, form in asked} == {("1000.5", "7000.5", "20")}
    assert POINTS >= 6000 / 20
    assert all('namespace="mesh"' in form["query"] for _, form in asked[:-1])
    assert asked[-1][1]["query"] == "up"


@pytest.mark.parametrize("matchers", ["", 'namespace="mesh",job=~"a.*"'])
async def test_prometheus_understands_the_queries(matchers: str) -> None:
    there, asked = prometheus(lambda _: good(), matchers=matchers)
    await there.series(0.0, 10.0)
    for _, form in asked:
        promql_parser.parse(form["query"])


async def test_lines_are_on_the_runs_time_axis_with_their_labels_values() -> None:
    result = {
        "metric": {"__name__": "up", "of": "wanted", "role": "experts", "shard": "1", "empty": ""},
        "values": [[1000, "2"], [1001.25, "NaN"], [1002, "3.5"], [1003, "+Inf"]],
    }
    nothing = {"metric": {"role": "none"}, "values": [[1000, "NaN"]]}
    there, _ = prometheus(lambda _: good(result, nothing))
    [line] = (await there.series(998.0, 10.0))[0].lines
    assert line.label == "wanted experts 1"
    assert line.points == [(2.0, 2.0), (4.0, 3.5)]


async def test_of_many_lines_the_highest_stay() -> None:
    results = [{"metric": {"code": str(number)}, "values": [[0, str(number)]]} for number in range(LINES + 5)]
    there, _ = prometheus(lambda _: good(*results))
    found = (await there.series(0.0, 10.0))[0].lines
    assert [line.label for line in found] == [str(number) for number in range(LINES + 4, 4, -1)]


def _no_json(_: dict[str, str]) -> httpx.Response:
    return httpx.Response(502, text="<html>bad gateway</html>")


def _refused(_: dict[str, str]) -> httpx.Response:
    return httpx.Response(400, json={"status": "error", "error": "parse error: unexpected <by>"})


def _away(_: dict[str, str]) -> httpx.Response:
    raise httpx.ConnectError("connection refused")


def _other(_: dict[str, str]) -> httpx.Response:
    return httpx.Response(200, json={"status": "success", "data": {"result": [{"values": "none"}]}})


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (_no_json, "status 502"),
        (_refused, "parse error: unexpected <by>"),
        (_away, "connection refused"),
        (_other, "metric"),
    ],
)
async def test_what_cannot_be_had_says_why_and_ends_nothing(answer: Answer, says: str) -> None:
    there, _ = prometheus(answer)
    for series in await there.series(0.0, 10.0):
        assert series.lines == []
        assert says in str(series.error)


async def test_a_prometheus_that_is_none_is_found_before_the_load() -> None:
    there, asked = prometheus(lambda _: good())
    await there.check()
    assert asked == [("/base/api/v1/query", {"query": "1"})]
    for answer in (_no_json, _refused, _away):
        with pytest.raises(ServerUnusable, match="No Prometheus answers"):
            await prometheus(answer)[0].check()


def test_a_query_of_ones_own_has_a_name() -> None:
    assert query_of('GPU memory = sum(a{b="c"})') == Query(name="GPU memory", text='sum(a{b="c"})')
    for text in ("sum(a)", "=sum(a)", "a="):
        with pytest.raises(BadSetting, match="has no name"):
            query_of(text)
