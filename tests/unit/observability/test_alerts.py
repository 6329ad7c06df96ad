"""Each alert fires when it is to and stays quiet when it is not, by Prometheus' own program."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from testkit.alerts.case import CHART, SERVE, Case
from testkit.alerts.cases import CASES
from testkit.alerts.promtool import ABSENT, expected, judged, promtool, trial, tried
from testkit.kube.chart import CHART as FOLDER
from testkit.kube.chart import rendered

PLAIN = FOLDER / "rules/expertmesh.rules.yaml"
needs_promtool = pytest.mark.skipif(promtool() is None, reason=ABSENT)


Rules = Mapping[str, dict[str, Any]]


def _by_name(rules: Mapping[str, Any]) -> Rules:
    return {rule["alert"]: rule for group in rules["groups"] for rule in group["rules"]}


@pytest.fixture(scope="session")
def plain() -> Rules:
    return _by_name(yaml.safe_load(PLAIN.read_text()))


@pytest.fixture(scope="session")
def chart() -> Rules:
    """The rules of the chart's PrometheusRule, for the release `mesh` in `there`."""
    [made] = [each for each in rendered("metrics.prometheusRule.enabled=true") if each["kind"] == "PrometheusRule"]
    return _by_name(made["spec"])


def test_each_alert_has_a_case(plain: Rules) -> None:
    assert sorted(plain) == sorted(case.alert for case in CASES)


@needs_promtool
def test_prometheus_takes_the_rules() -> None:
    done = judged("check", "rules", PLAIN)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_a_plain_rule_fires_for_either_scrape(case: Case, plain: Rules, tmp_path: Path) -> None:
    rule = plain[case.alert]
    done = tried(tmp_path, rule, expected(case, rule["labels"]["severity"], [CHART, SERVE], chart=False))
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_a_rule_of_the_chart_fires_for_its_release_alone(case: Case, chart: Rules, tmp_path: Path) -> None:
    rule = chart[case.alert]
    tests = expected(case, rule["labels"]["severity"], [CHART], chart=True)
    if case.keeps != "selector":  # what is absent is absent whatever another release has
        other = {**CHART, "app_kubernetes_io_instance": "other"}
        tests += [trial(case, lines, other, []) for lines in case.fires]
    done = tried(tmp_path, rule, tests)
    assert done.returncode == 0, done.stdout + done.stderr
