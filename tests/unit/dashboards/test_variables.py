"""Variables get the values that Grafana gives them, and queries the text that Grafana makes of these."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.dashboards.model import Variable
from services.dashboards.times import Range
from services.dashboards.variables import ALL, Value, builtins, check_names, expand, resolve
from services.errors import ConfigError

SPAN = Range(start_s=1000.0, end_s=4600.0)


class Labels:
    """Values by label; ``asked`` has what was asked for."""

    def __init__(self, **values: list[str]) -> None:
        self._values = values
        self.asked: list[tuple[str, str | None]] = []

    async def label_values(self, label: str, match: str | None, span: Range) -> list[str]:
        assert span == SPAN
        self.asked.append((label, match))
        return self._values[label]


def variable(**options: Any) -> Variable:
    return msgspec.convert({"name": "v", "type": "query"} | options, Variable)


async def value(source: Labels | None = None, *given: str, **options: Any) -> Value:
    chosen = {"v": given} if given else {}
    return (await resolve([variable(**options)], chosen, source or Labels(), SPAN))["v"]


@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        ('up{job=~"$job"}', 'up{job=~"(a|b\\\\.c)"}'),
        ("${job}", "(a|b\\\\.c)"),
        ("[[job]]", "(a|b\\\\.c)"),
        ("${job:regex}", "(a|b\\.c)"),
        ("${job:pipe}", "a|b.c"),
        ("[[job:csv]]", "a,b.c"),
        ("${job:doublequote}", '"a","b.c"'),
        ("$one and $jobs", "x and $jobs"),
        ('label_replace(x, "a", "$1", "b", "(.*)")', 'label_replace(x, "a", "$1", "b", "(.*)")'),
        ("$all", ".*"),
        ("$hostile", 'x\\"} or up{a=\\"'),
        ("$regex", 'a\\\\\\\\b\\"c'),
    ],
)
def test_a_text_gets_the_values(text: str, becomes: str) -> None:
    values = {
        "job": Value(values=["a", "b.c"], several=True),
        "one": Value(values=["x"]),
        "all": Value(values=[ALL], several=True, everything=".*"),
        "hostile": Value(values=['x"} or up{a="']),
        "regex": Value(values=['a\\b"c'], several=True),
    }
    assert expand(text, values) == becomes


def test_the_intervals_are_those_that_grafana_computes() -> None:
    found = {name: value.values[0] for name, value in builtins(SPAN, 10.0, 15.0).items()}
    assert found["__interval"] == "10s"
    assert found["__rate_interval"] == "60s"
    assert found["__range"] == "3600s"
    assert found["__range_s"] == "3600"
    assert found["__interval_ms"] == "10000"
    assert builtins(SPAN, 300.0, 15.0)["__rate_interval"].values == ["315s"]


async def test_a_value_is_given_or_saved_or_the_first() -> None:
    source = Labels(job=["b", "a"])
    asks = {"query": "label_values(up, job)"}
    assert await value(source, "z", **asks) == Value(values=["z"])
    assert await value(source, **asks, current={"value": "saved"}) == Value(values=["saved"])
    assert source.asked == []
    assert await value(source, **asks) == Value(values=["b"])
    assert await value(source, **asks, sort=1) == Value(values=["a"])
    assert source.asked == [("job", "up"), ("job", "up")]


async def test_all_is_its_own_text_or_every_value() -> None:
    source = Labels(job=["a", "b"])
    many = {"query": {"query": "label_values(job)"}, "includeAll": True, "multi": True}
    assert await value(source, **many) == Value(values=["a", "b"], several=True)
    dots = await value(source, **many, allValue=".*", current={"value": ["$__all"]})
    assert (dots.everything, dots.shown()) == (".*", "all")
    assert await value(source, **many, current={"value": ["a"]}) == Value(values=["a"], several=True)
    assert source.asked == [("job", None)]


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ({"type": "custom", "query": "p50 : 0.5, p90 : 0.9"}, ["0.5"]),
        ({"type": "custom", "query": "x,y", "current": {"value": "y"}}, ["y"]),
        ({"type": "textbox", "query": ".*"}, [".*"]),
        ({"type": "textbox", "query": ".*", "current": {"value": "gpu"}}, ["gpu"]),
        ({"type": "constant", "query": "7"}, ["7"]),
        ({"type": "datasource", "query": "prometheus"}, ["default"]),
    ],
)
async def test_other_kinds(options: dict[str, Any], values: list[str]) -> None:
    assert (await value(**options)).values == values


async def test_a_query_knows_the_variables_before_it_and_takes_a_part_of_what_it_finds() -> None:
    source = Labels(worker=["experts-10", "experts-2", "gateway"])
    asks = variable(query='label_values(x{job=~"$job"}, worker)', regex="/experts-(\\d+)/", sort=3, includeAll=True)
    job = variable(name="job", type="textbox", query="a.*")
    found = await resolve([job, asks], {}, source, SPAN)
    assert source.asked == [("worker", 'x{job=~"a.*"}')]
    assert found["v"].values == ["2", "10"]


async def test_what_is_not_known_is_said() -> None:
    with pytest.raises(ConfigError, match=r"only label_values\(\) is known"):
        await value(query="query_result(up)")
    with pytest.raises(ConfigError, match="kind 'adhoc'"):
        await value(type="adhoc")
    with pytest.raises(ConfigError, match="Did you mean release"):
        check_names({"releas": ["x"]}, ["release"])
