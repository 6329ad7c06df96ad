"""ExpertFlow's plan, and shard groups from load."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.errors import ConfigError
from services.placement.groups import group_loads, regrouped
from services.placement.load import Load, checked_load, peak_load, smoothed
from services.placement.planning.expertflow import parallel_plan
from services.routing import RoutingTable, ShardGroup

LOAD = st.integers(1, 3).flatmap(
    lambda layers: st.integers(2, 12).flatmap(
        lambda experts: st.lists(
            st.lists(st.integers(0, 50), min_size=experts, max_size=experts), min_size=layers, max_size=layers
        )
    )
)


@pytest.mark.parametrize(
    ("P", "D", "E_total", "E_block", "data", "expert", "pipeline", "blocks", "each"),
    [
        (8, 4, 64, 8, True, True, True, 8, 2),
        (4, 4, 64, 8, True, True, False, 8, 2),
        (1, 4, 64, 60, False, True, False, 2, 1),
        (2, 4, 8, 8, True, False, False, 1, 1),
        (8, 1, 64, 8, False, False, True, 8, 8),
    ],
)
def test_expertflows_equations(
    P: int, D: int, E_total: int, E_block: int, data: bool, expert: bool, pipeline: bool, blocks: int, each: int
) -> None:
    plan = parallel_plan(P, D, E_total, E_block)
    assert (plan.data, plan.expert, plan.pipeline) == (data, expert, pipeline)
    assert (plan.blocks, plan.blocks_per_device) == (blocks, each)


@pytest.mark.parametrize("position", range(4))
def test_a_plan_of_nothing_is_refused_by_name(position: int) -> None:
    numbers = [4, 4, 4, 4]
    numbers[position] = 0
    with pytest.raises(ConfigError, match=f"with {('P', 'D', 'E_total', 'E_block')[position]} = 0"):
        parallel_plan(*numbers)


def grouped(
    load: Load, groups: int, *, limit: int | None = None, capacities: list[float] | None = None
) -> tuple[ShardGroup, ...]:
    """Groups of experts that were in none."""
    empty = [ShardGroup(number=number, experts={}) for number in range(groups)]
    capacities = capacities or [1.0] * groups
    return regrouped(checked_load(load), empty, limit=limit, capacities=capacities, prices=[0.0] * groups)


@given(LOAD, st.data())
def test_every_expert_is_in_one_group_within_memory(rows: list[list[int]], data: st.DataObject) -> None:
    experts = len(rows[0])
    count = data.draw(st.integers(1, experts))
    limit = data.draw(st.integers(-(-experts // count), experts))
    capacities = data.draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
    load = dict(enumerate(rows))
    groups = grouped(load, count, limit=limit, capacities=capacities)
    table = RoutingTable(epoch=1, fingerprint="", num_experts=experts, groups=groups)
    assert set(table.group_of) == set(load)
    assert all(1 <= len(ids) <= limit for group in groups for ids in group.experts.values())
    assert groups == grouped(load, count, limit=limit, capacities=capacities)


@pytest.mark.parametrize(
    ("load", "groups", "capacities", "sizes", "loads"),
    [
        pytest.param([90, 10, 10, 10, 10, 10, 10, 30], 2, None, [1, 7], [90, 90], id="a popular expert is separate"),
        pytest.param([8, 7, 6, 5, 4], 2, None, [3, 2], [15, 15], id="exchanges find what the greedy misses"),
        pytest.param([1.0] * 12, 2, [2, 1], [8, 4], [8, 4], id="a group with stronger seats takes more"),
        pytest.param([0.0] * 6, 3, None, [2, 2, 2], [0, 0, 0], id="without load they are even"),
    ],
)
def test_groups_by_load(
    load: list[float], groups: int, capacities: list[float] | None, sizes: list[int], loads: list[float]
) -> None:
    made = grouped({3: load}, groups, capacities=capacities)
    assert [len(group.experts[3]) for group in made] == sizes
    assert group_loads({3: load}, made) == [loads]


def test_the_peak_load_adds_the_slowest_of_each_layer() -> None:
    assert peak_load([[2, 4], [6, 2]], [1, 2]) == 2 + 6
    assert peak_load([[1, 1]], [1, 0]) == float("inf")


def test_smoothing_weighs_the_latest() -> None:
    assert smoothed(None, {0: [4, 0]}) == {0: [4, 0]}
    assert smoothed({0: [4, 0]}, {0: [0, 8]}, weight=0.25) == {0: [3, 2]}
