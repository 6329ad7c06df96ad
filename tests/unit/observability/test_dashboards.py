"""The dashboards are what Grafana's schema says, and say what they show."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from testkit.kube.chart import CHART, ROOT

from services.config import Settings

FILES = sorted((CHART / "dashboards").glob("*.json"))
UNITS = {"s", "h", "reqps", "ops", "cps", "percentunit", "short", "none", "bytes", "Bps"}
PAGES = {file.stem for file in (ROOT / "docs/runbooks").glob("*.md")} - {"README"}


@pytest.fixture(params=FILES, ids=lambda file: file.stem)
def board(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(request.param.read_text())
    return found


def _panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def test_there_is_a_board_for_each_question() -> None:
    names = {"overview", "latency", "experts", "autoscaler", "queue", "workers", "cost"}
    assert {file.stem for file in FILES} == names


def test_grafanas_types_read_it_and_write_the_same(board: dict[str, Any]) -> None:
    register_default_plugins()
    assert json.loads(json.dumps(Dashboard.from_json(board), cls=JSONEncoder)) == board


def test_ids_and_places_are_its_own(board: dict[str, Any]) -> None:
    ids = [panel["id"] for panel in board["panels"]]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    assert len(set(places)) == len(places)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in board["panels"])


def test_each_panel_has_a_unit_limits_and_says_what_to_do(board: dict[str, Any]) -> None:
    for panel in _panels(board):
        defaults = panel["fieldConfig"]["defaults"]
        steps = defaults["thresholds"]["steps"]
        shows, _, act = panel["description"].partition("\n\n")
        assert defaults["unit"] in UNITS, panel["title"]
        assert shows.endswith("."), panel["title"]
        assert act.startswith("When red: " if len(steps) > 1 else "What for: "), panel["title"]
        assert [step["value"] for step in steps[1:]] == sorted(step["value"] for step in steps[1:]), panel["title"]


def test_runbooks_and_options_that_it_names_are_there(board: dict[str, Any]) -> None:
    said = " ".join(panel["description"] for panel in _panels(board))
    options = {f"--{name.replace('_', '-')}" for name in Settings.model_fields}
    assert set(re.findall(r"--[a-z][a-z-]+", said)) <= options
    assert set(re.findall(r"runbook ([a-z-]+)", said)) <= PAGES


def test_its_variables_are_those_of_the_selector(board: dict[str, Any]) -> None:
    variables = {each["name"]: each for each in board["templating"]["list"]}
    assert variables.keys() >= {"datasource", "namespace", "release", "job"}
    for name in ("namespace", "release", "job"):
        assert variables[name]["allValue"] == ".*", "matches series without the label"
        assert variables[name]["current"]["value"] == "$__all"
    used = set(re.findall(r"\$(\w+)", " ".join(t["expr"] for p in _panels(board) for t in p["targets"])))
    assert used <= variables.keys() | {"__rate_interval", "__range"}
    assert variables.keys() - {"datasource"} <= used
