"""Names of an earlier chart, and of an earlier server's settings, are refused with what to say now."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import yaml
from testkit.kube.chart import CHART, ROLES

NAMES: dict[str, dict[str, str]] = yaml.safe_load((CHART / "files/renamed.yaml").read_text())


@pytest.mark.parametrize("where", ["config", *(f"{role}.config" for role in ROLES)])
def test_old_settings_name_the_new_ones(refused: Callable[..., str], where: str) -> None:
    lines = refused(*(f"{where}.{name}=1" for name in NAMES["settings"])).splitlines()
    rest = "(An option such as --max-num-seqs is max_num_seqs here.)"
    for name, now in NAMES["settings"].items():
        assert f"{where}.{name} is no longer a setting. {now} {rest}" in lines


def test_old_values_name_the_new_ones(refused: Callable[..., str]) -> None:
    chosen = (f"{name}={'{a: b}' if name.endswith('annotations') else 1}" for name in NAMES["values"])
    lines = refused(*chosen).splitlines()
    for name, now in NAMES["values"].items():
        assert f"{name} is no longer a value. {now}" in lines


def test_values_of_an_earlier_chart_as_a_whole_name_the_way_to_take_this_ones(refused: Callable[..., str]) -> None:
    """``helm upgrade --reuse-values`` brings them all."""
    said = refused("layout=null", "attention.workers=null", "attention.colocated=null", "attention.experts=tcp")
    [line] = [line for line in said.splitlines() if line.startswith("attention.experts")]
    assert "With --reset-then-reuse-values instead of --reuse-values" in line
