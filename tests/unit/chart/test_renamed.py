"""Names of an earlier chart, and of an earlier server's settings, are refused with what to say now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml
from testkit.kube.chart import CHART

NAMES: dict[str, dict[str, str]] = yaml.safe_load((CHART / "files/renamed.yaml").read_text())
CONFIGS = ("config", "gateway.config", "scheduler.config", "attention.config", "experts.config")


@pytest.fixture
def said(helm: Callable[..., Any]) -> Callable[..., list[str]]:
    """What helm says of ``settings``, which it must not render, line by line."""

    def run(*settings: str) -> list[str]:
        done = helm("template", "mesh", str(CHART), *(word for each in settings for word in ("--set", each)))
        assert done.returncode != 0
        lines: list[str] = done.stderr.splitlines()
        return lines

    return run


@pytest.mark.parametrize("where", CONFIGS)
def test_old_settings_name_the_new_ones(said: Callable[..., list[str]], where: str) -> None:
    lines = said(*(f"{where}.{name}=1" for name in NAMES["settings"]))
    for name, now in NAMES["settings"].items():
        wanted = (
            f"{where}.{name} is no setting any more. {now} (An option such as --max-num-seqs is max_num_seqs here.)"
        )
        assert wanted in lines


def test_old_values_name_the_new_ones(said: Callable[..., list[str]]) -> None:
    chosen = (f"{name}={'{a: b}' if name.endswith('annotations') else 1}" for name in NAMES["values"])
    lines = said(*chosen)
    for name, now in NAMES["values"].items():
        assert f"{name} is no value any more. {now}" in lines


def test_values_of_an_earlier_chart_as_a_whole_name_the_way_to_take_this_ones(said: Callable[..., list[str]]) -> None:
    """``helm upgrade --reuse-values`` brings them all."""
    lines = said("layout=null", "attention.workers=null", "attention.colocated=null", "attention.experts=tcp")
    [line] = [line for line in lines if line.startswith("attention.experts")]
    assert "With --reset-then-reuse-values instead of --reuse-values" in line
