"""Every alert has a section of a runbook, and every section an alert."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from testkit.kube.chart import CHART, ROOT

from services.cli.main import COMMANDS
from services.config import Settings

RULES = yaml.safe_load((CHART / "rules/expertmesh.rules.yaml").read_text())["groups"][0]["rules"]
FOLDER = ROOT / "docs/runbooks"
PAGES = {file.stem: file.read_text() for file in sorted(FOLDER.glob("*.md"))}
OPTIONS_OF_OTHERS = {
    *("--previous", "--tail", "--prefix", "--replicas", "--wait"),  # kubectl, helm
    *("--max-concurrency", "--api-keys-file"),  # expertmesh keys
}


def _sections(text: str) -> dict[str, str]:
    found = re.split(r"^## (\w+)$", text, flags=re.M)[1:]
    return dict(zip(found[::2], found[1::2], strict=True))


SECTIONS = {alert: page for page, text in PAGES.items() if page != "README" for alert in _sections(text)}


def test_every_alert_has_a_section_and_every_section_an_alert() -> None:
    assert sorted(SECTIONS) == sorted(rule["alert"] for rule in RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_leads_to_its_section(rule: Any) -> None:
    name = rule["alert"]
    assert rule["annotations"]["runbook_url"] == f"docs/runbooks/{SECTIONS[name]}.md#{name.lower()}"
    assert {"summary", "description", "runbook_url"} == rule["annotations"].keys()
    section = _sections(PAGES[SECTIONS[name]])[name]
    assert all(f"**{word}" in section for word in ("Means.", "Look at**", "Do"))


def test_the_index_has_every_page() -> None:
    assert set(re.findall(r"^\| \[([\w-]+)\]", PAGES["README"], re.M)) == PAGES.keys() - {"README"}


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_options_exist(page: str) -> None:
    named = set(re.findall(r"expertmesh ([a-z][a-z-]*)", " ".join(_code(PAGES[page]))))
    assert named <= COMMANDS.keys()
    options = {f"--{name.replace('_', '-')}" for name in Settings.model_fields} | OPTIONS_OF_OTHERS
    assert set(re.findall(r"--[a-z][a-z-]+", PAGES[page])) <= options


def _code(text: str) -> list[str]:
    return [block or inline for block, inline in re.findall(r"```(.*?)```|`([^`]*)`", text, re.S)]
