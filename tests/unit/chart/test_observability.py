"""Dashboards and alerts of the chart."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from testkit.kube.chart import CHART, SCALED, Objects, Render, named

BOARDS = {file.name: file.read_text() for file in sorted((CHART / "dashboards").glob("*.json"))}
RULES = "metrics.prometheusRule.enabled=true"
SERIES = 'namespace="there",app_kubernetes_io_instance="mesh"'
MIB = 1024 * 1024
ANNOTATION = 256 * 1024
"""What `kubectl apply` writes of an object into an annotation may be no larger."""


def _rules(objects: Objects) -> list[dict[str, Any]]:
    [group] = named(objects, "PrometheusRule", "alerts")["spec"]["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def _dashboards(objects: Objects, kind: str) -> dict[str, dict[str, Any]]:
    """By the name of their file."""
    prefix = "mesh-expertmesh-dashboard-"
    return {
        f"{name.removeprefix(prefix)}.json": each
        for (its, name), each in objects.items()
        if its == kind and prefix in name
    }


def test_dashboards_are_config_maps_that_the_sidecar_reads(render: Render) -> None:
    found = _dashboards(render("dashboards.enabled=true"), "ConfigMap")
    assert found.keys() == BOARDS.keys()
    for file, each in found.items():
        [(name, text)] = each["data"].items()
        assert (name, json.loads(text)) == (f"expertmesh-{file}", json.loads(BOARDS[file]))
        assert each["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert each["metadata"]["annotations"]["grafana_folder"] == "expertmesh"
        assert len(yaml.safe_dump(each)) < MIB
        assert len(json.dumps(each)) < ANNOTATION


def test_labels_and_folder_of_the_config_maps_are_values(render: Render) -> None:
    chosen = ("dashboards.labels.grafana_dashboard=null", "dashboards.labels.mine=yes", "dashboards.folder=")
    for each in _dashboards(render("dashboards.enabled=true", *chosen), "ConfigMap").values():
        assert each["metadata"]["labels"]["mine"] == "yes"
        assert "grafana_dashboard" not in each["metadata"]["labels"]
        assert "annotations" not in each["metadata"]


def test_dashboards_are_resources_of_the_operator_by_a_value(render: Render) -> None:
    chosen = ("dashboards.operator.enabled=true", "dashboards.operator.instanceLabels.dashboards=mine")
    objects = render(*chosen, "dashboards.operator.allowCrossNamespaceImport=true")
    found = _dashboards(objects, "GrafanaDashboard")
    assert found.keys() == BOARDS.keys()
    assert not _dashboards(objects, "ConfigMap")
    for file, each in found.items():
        spec = each["spec"]
        assert each["apiVersion"] == "grafana.integreatly.org/v1beta1"
        assert json.loads(spec.pop("json")) == json.loads(BOARDS[file])
        assert spec == {
            "instanceSelector": {"matchLabels": {"dashboards": "mine"}},
            "allowCrossNamespaceImport": True,
            "folder": "expertmesh",
        }


def test_there_are_none_by_default(render: Render) -> None:
    kinds = {kind for kind, _ in render()}
    assert not kinds & {"GrafanaDashboard", "PrometheusRule"}
    assert not _dashboards(render(), "ConfigMap")


def test_rules_are_the_plain_ones_for_the_releases_series(render: Render) -> None:
    plain = yaml.safe_load((CHART / "rules/expertmesh.rules.yaml").read_text())["groups"]
    groups = named(render(RULES), "PrometheusRule", "alerts")["spec"]["groups"]
    for group in groups:
        for rule in group["rules"]:
            rule["expr"] = rule["expr"].replace(f"{SERIES},", "").replace(f"{{{SERIES}}}", "")
    assert groups == plain


@pytest.mark.parametrize("matchers", ["", 'job="mesh"'])
def test_every_series_of_a_rule_is_the_releases(render: Render, matchers: str) -> None:
    chosen = [f"autoscaling.prometheus.matchers={matchers}"] if matchers else []
    for rule in _rules(render(RULES, *chosen)):
        asked = re.findall(r"(?:\bup|expertmesh_\w+)(\{[^}]*)?", rule["expr"])
        assert asked
        assert all(labels.startswith("{" + (matchers or SERIES)) for labels in asked), rule["expr"]


def test_thresholds_and_the_place_of_runbooks_are_values(render: Render) -> None:
    chosen = {"slo": 0.999, "goodput": 0.5, "queueSeconds": 7, "runbooks": "https://wiki/runbooks"}
    rules = _rules(render(RULES, *(f"metrics.prometheusRule.{name}={value}" for name, value in chosen.items())))
    exprs = {rule["alert"]: rule["expr"] for rule in rules}
    assert exprs["ExpertmeshSloBurnsFast"].count("> 14.4 * (1 - 0.999)") == 2
    assert exprs["ExpertmeshSloBurnsSlowly"].count("> 6 * (1 - 0.999)") == 2
    assert "< 0.5" in exprs["ExpertmeshGoodputLow"]
    assert " > 7 " in exprs["ExpertmeshQueueOld"].replace("\n", " ")
    assert all(rule["annotations"]["runbook_url"].startswith("https://wiki/runbooks/") for rule in rules)


@pytest.mark.parametrize(
    "wrong", ["slo=1", "slo=99%", "slo=1.5", "goodput=2", "goodput=x", "queueSeconds=0", "runbooks=a b"]
)
def test_values_that_would_break_a_rule_are_refused(refused: Callable[..., str], wrong: str) -> None:
    assert wrong.partition("=")[0] in refused(RULES, f"metrics.prometheusRule.{wrong}")


def test_what_prometheus_fills_in_is_left_to_it(render: Render) -> None:
    said = [text for rule in _rules(render(RULES)) for text in rule["annotations"].values()]
    assert any("{{ $labels.job }}" in text for text in said)
    assert not any(re.search(r"`\{\{|\}\}`", text) for text in said)


def test_the_pod_monitor_brings_the_labels_by_which_rules_and_dashboards_ask(render: Render) -> None:
    monitor = named(render(*SCALED), "PodMonitor", "roles")["spec"]
    assert "app.kubernetes.io/instance" in monitor["podTargetLabels"]
