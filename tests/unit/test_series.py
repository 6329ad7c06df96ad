"""Series have bounds that hold whatever their labels are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.metrics import (
    OTHER,
    ExpertMetrics,
    GatewayMetrics,
    MachineMetrics,
    SchedulerMetrics,
    ServerMetrics,
    WorkerMetrics,
    catalogue,
)
from services.metrics.series import Definition, Label, Series

ROLES: tuple[Callable[[CollectorRegistry], Any], ...] = (
    *(GatewayMetrics, SchedulerMetrics, WorkerMetrics, ExpertMetrics, MachineMetrics, ServerMetrics),
)
HOSTILE = 5000


def test_all_names_have_the_project_s_prefix_and_the_unit_of_their_end() -> None:
    series = catalogue()
    assert all(one.name.startswith("expertmesh_") for one in series)
    assert all((one.kind == "counter") == one.name.endswith("_total") for one in series)
    assert all(one.unit == "seconds" for one in series if "_seconds" in one.name)
    assert len({(one.role, one.name) for one in series}) == len(series)


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.__name__)
def test_what_a_role_registers_is_what_it_declares(role: Callable[[CollectorRegistry], Any]) -> None:
    registry = CollectorRegistry()
    made = role(registry)
    registered = {family.name for family in registry.collect()}
    assert registered == {one.name.removesuffix("_total") for one in made.definitions}


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.__name__)
def test_hostile_labels_give_no_more_series_than_the_bound(role: Callable[[CollectorRegistry], Any]) -> None:
    """Thousands of tenants, unknown routes, codes of errors that nobody knows, many layers: anything as any label."""
    registry = CollectorRegistry()
    made = role(registry)
    bounds = {one.name.removesuffix("_total"): one for one in made.definitions}
    for metric in vars(made).values():
        if isinstance(metric, Counter | Gauge | Histogram) and metric._labelnames:
            one = bounds[metric._name]
            for number in range(HOSTILE):
                _touch(metric.labels(*_hostile(one, number)))
    for family in registry.collect():
        lines = [sample for sample in family.samples if not sample.name.endswith("_created")]
        assert len(lines) <= bounds[family.name].most, family.name
        assert bounds[family.name].most < HOSTILE * 500, "no bound worth the name"


def _hostile(one: Definition, number: int) -> list[str]:
    """One label at a time varies, so that a missing bound shows as thousands of series and not as millions."""
    varied = number % len(one.labels)
    return [f"value {number}" if at == varied else _first(label) for at, label in enumerate(one.labels)]


def _first(label: Label) -> str:
    return label.values[0] if label.values else "first"


def _touch(metric: Any) -> None:
    metric.observe(1) if isinstance(metric, Histogram) else metric.inc()


def made(*labels: Label) -> tuple[CollectorRegistry, Counter]:
    registry = CollectorRegistry()
    return registry, Series(registry, "test").counter("things_total", "Things.", *labels)


def counted(registry: CollectorRegistry) -> dict[tuple[str, ...], float]:
    [family] = registry.collect()
    return {tuple(one.labels.values()): one.value for one in family.samples if one.name.endswith("_total")}


def test_values_outside_a_set_count_as_other() -> None:
    registry, counter = made(Label("kind", values=("a", "b")))
    for kind in ("a", "c", "b", "d", "a"):
        counter.labels(kind).inc()
    assert counted(registry) == {("a",): 2, ("b",): 1, (OTHER,): 2}


def test_the_first_values_have_series_and_the_rest_is_other() -> None:
    registry, counter = made(Label("tenant", most=2))
    for tenant in ("x", "y", "z", "x", "w"):
        counter.labels(tenant=tenant).inc()
    assert counted(registry) == {("x",): 2, ("y",): 1, (OTHER,): 2}


def test_other_takes_no_place_of_a_value() -> None:
    registry, counter = made(Label("tenant", most=1))
    for tenant in (OTHER, "x", "y"):
        counter.labels(tenant).inc()
    assert counted(registry) == {(OTHER,): 2, ("x",): 1}


def test_after_a_clear_other_values_may_come() -> None:
    registry, counter = made(Label("tenant", most=1))
    counter.labels("x").inc()
    counter.clear()
    counter.labels("y").inc()
    assert counted(registry) == {("y",): 1}


def test_a_label_needs_a_bound() -> None:
    with pytest.raises(AssertionError, match="needs one bound"):
        Label("tenant")
