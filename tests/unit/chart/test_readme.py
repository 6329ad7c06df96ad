"""The tables of values in the chart's README: nothing of values.yaml is lost where several values share a row."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import reduce
from typing import Any

import yaml
from testkit.kube.chart import CHART

PODS = ("gateway", "scheduler", "attention", "experts", "redis", "model.pvc.prefetch", "loadgen", "test")
"""What the README calls "all"."""


def rows() -> list[list[str]]:
    """Cells of all rows of both tables, without their heads."""
    text = (CHART / "README.md").read_text(encoding="utf-8")
    made = text.split("<!-- values: begin", 1)[1].split("<!-- /values -->", 1)[0]
    lines = [line for line in made.splitlines() if line.startswith("| `")]
    return [re.split(r"(?<!\\) \| ", line.removeprefix("| ").removesuffix(" |")) for line in lines]


def shown() -> Iterator[tuple[str, str]]:
    """Each value with the default that the README shows for it."""
    for name, *owners, default, _ in rows():
        for owner in _owners(owners[0]) if owners else [""]:
            yield f"{owner}.{name.strip('`')}".removeprefix("."), default


def _owners(cell: str) -> list[str]:
    if not cell.startswith("all"):
        return cell.split(", ")
    missing = cell.removeprefix("all").removeprefix(" but ").split(", ")
    return [pod for pod in PODS if pod not in missing]


def test_every_documented_value_is_in_one_row() -> None:
    documented = re.findall(r"^ *# -- ", (CHART / "values.yaml").read_text(encoding="utf-8"), re.MULTILINE)
    names = [name for name, _ in shown()]
    assert len(names) == len(set(names)) == len(documented)


def test_its_default_is_that_of_the_values() -> None:
    values: Any = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    for name, default in shown():
        found = reduce(lambda node, key: node[key], name.split("."), values)
        if default.startswith("`"):
            assert json.loads(default.strip("`")) == found, name
