"""Rules and panels ask for series and labels that the roles write. No program is needed for that."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from testkit.alerts.promql import (
    Fault,
    counters_without_rate,
    known,
    labels,
    parsed,
    placeholders,
    quantiles_in_aggregates,
    selectors,
)
from testkit.kube.chart import CHART

RULES = yaml.safe_load((CHART / "rules/expertmesh.rules.yaml").read_text())["groups"][0]["rules"]
BOARDS = {file.stem: json.loads(file.read_text()) for file in sorted((CHART / "dashboards").glob("*.json"))}


def _targets(board: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for panel in BOARDS[board]["panels"]:
        for target in panel.get("targets", ()):
            yield panel, target


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_a_rule_asks_for_what_there_is(rule: Any) -> None:
    found = labels(parsed(rule["expr"]))
    said = " ".join(rule["annotations"].values())
    assert set(re.findall(r"\$labels\.(\w+)", said)) <= found
    assert "$value" not in said or "absent" not in rule["expr"]


@pytest.mark.parametrize("board", BOARDS)
def test_panels_ask_for_what_there_is(board: str) -> None:
    for panel, target in _targets(board):
        found = labels(parsed(target["expr"]))
        matrix = [each["options"] for each in panel["transformations"] if each["id"] == "groupingToMatrix"]
        sides = {options[side] for options in matrix for side in ("rowField", "columnField")}
        assert placeholders(target["legendFormat"]) | sides <= found, panel["title"]


@pytest.mark.parametrize("board", BOARDS)
def test_every_series_of_a_panel_is_narrowed_by_the_variables(board: str) -> None:
    variables = {"namespace": "$namespace", "app_kubernetes_io_instance": "$release", "job": "$job"}
    for panel, target in _targets(board):
        for selector in selectors(parsed(target["expr"])):
            asked = {matcher.name: matcher.value for matcher in selector.matchers.matchers}
            assert selector.name == "up" or asked.items() >= variables.items(), panel["title"]


@pytest.mark.parametrize("board", BOARDS)
def test_no_panel_shows_lifetimes_or_averages_of_quantiles_or_means(board: str) -> None:
    for panel, target in _targets(board):
        tree = parsed(target["expr"])
        assert set(counters_without_rate(tree)) <= COUNTED, panel["title"]
        assert not quantiles_in_aggregates(tree), panel["title"]
        assert not re.search(r"_(sum|count)\{", target["expr"]), panel["title"]


COUNTED = frozenset(
    {
        "expertmesh_repartitions_total",
        "expertmesh_engine_idle_seconds_total",
        "expertmesh_step_graph_failures_total",  # they happen before the first scrape: no increase shows them
    }
)
"""Counters that a panel shows as steps, or counts the processes of."""


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("expertmesh_no_such_series", "no series"),
        ("rate(expertmesh_preemptions[5m])", "no series"),
        (
            "histogram_quantile(0.9, sum (rate(expertmesh_engine_step_seconds_bucket[5m])))",
            "histogram_quantile names le",
        ),
        ("sum by (shard) (expertmesh_workers)", "by names shard"),
        ('expertmesh_workers{tenant="a"}', "a matcher of expertmesh_workers names tenant"),
        ("expertmesh_workers / on (shard) expertmesh_expert_seats", "on names shard"),
    ],
)
def test_what_there_is_not_is_found(expression: str, said: str) -> None:
    with pytest.raises(Fault, match=said):
        labels(parsed(expression))


def test_lifetimes_and_averages_of_quantiles_are_found() -> None:
    buckets = "sum by (le, pod) (rate(expertmesh_engine_step_seconds_bucket[5m]))"
    assert quantiles_in_aggregates(parsed(f"avg (histogram_quantile(0.9, {buckets}))"))
    assert not quantiles_in_aggregates(parsed(f"histogram_quantile(0.9, {buckets})"))
    assert set(counters_without_rate(parsed("sum (expertmesh_preemptions_total)"))) == {"expertmesh_preemptions_total"}
    assert not set(counters_without_rate(parsed("sum (increase(expertmesh_preemptions_total[5m]))")))
    now = "expertmesh_preemptions_total"
    assert not set(counters_without_rate(parsed(f"sum ({now} unless {now} offset 5m)")))
    assert set(counters_without_rate(parsed(f"sum ({now} unless {now})"))) == {now}


def test_every_series_is_shown_by_a_panel_or_a_rule() -> None:
    asked = {
        selector.name
        for expr in (
            *(target["expr"] for board in BOARDS for _, target in _targets(board)),
            *(rule["expr"] for rule in RULES),
        )
        for selector in selectors(parsed(expr))
    }
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    unseen = {re.sub(r"_(bucket|sum|count)$", "", name) for name in known()} - families
    assert unseen == set()
