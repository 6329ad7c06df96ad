"""ExpertFlow's plan, and shard groups from load."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.errors import ConfigError
from services.placement.groups import group_loads, shard_groups
from services.placement.load import imbalance, peak_load, smoothed
from services.placement.planning.expertflow import parallel_plan
from services.routing import RoutingTable

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
    assert (plan.data_degree, plan.blocks, plan.blocks_per_device) == (min(P, D), blocks, each)


@pytest.mark.parametrize("position", range(4))
def test_a_plan_of_nothing_is_refused_by_name(position: int) -> None:
    numbers = [4, 4, 4, 4]
    numbers[position] = 0
    with pytest.raises(ConfigError, match=f"with {('P', 'D', 'E_total', 'E_block')[position]} = 0"):
        parallel_plan(*numbers)


@given(LOAD, st.data())
def test_every_expert_is_in_one_group_within_memory(rows: list[list[int]], data: st.DataObject) -> None:
    experts = len(rows[0])
    count = data.draw(st.integers(1, experts))
    limit = data.draw(st.integers(-(-experts // count), experts))
    capacities = data.draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
    load = dict(enumerate(rows))
    groups = shard_groups(load, groups=count, limit=limit, capacities=capacities)
    table = RoutingTable(epoch=1, fingerprint="", num_experts=experts, groups=groups)
    assert set(table.group_of) == set(load)
    assert all(1 <= len(ids) <= limit for group in groups for ids in group.experts.values())
    assert groups == shard_groups(load, groups=count, limit=limit, capacities=capacities)


def test_popular_experts_are_apart_and_groups_are_of_unequal_size() -> None:
    groups = shard_groups({0: [90, 10, 10, 10, 10, 10, 10, 30]}, groups=2)
    assert [group.experts[0] for group in groups] == [(0,), (1, 2, 3, 4, 5, 6, 7)]


def test_exchanges_find_what_the_greedy_misses() -> None:
    groups = shard_groups({0: [8, 7, 6, 5, 4]}, groups=2)
    assert group_loads({0: [8, 7, 6, 5, 4]}, groups) == [[15, 15]]


def test_a_group_with_stronger_seats_takes_more() -> None:
    load = {0: [1.0] * 12}
    assert group_loads(load, shard_groups(load, groups=2, capacities=[2, 1])) == [[8, 4]]


def test_without_load_groups_are_even() -> None:
    groups = shard_groups({3: [0.0] * 6}, groups=3)
    assert [len(group.experts[3]) for group in groups] == [2, 2, 2]


@pytest.mark.parametrize(
    ("load", "options", "said"),
    [
        ({0: [1.0, 2.0]}, {"groups": 3}, "2 experts cannot be split into 3"),
        ({0: [1.0] * 8}, {"groups": 2, "limit": 3}, "at most 3 experts a layer cannot hold 8"),
        ({0: [1.0] * 8}, {"groups": 2, "capacities": [1.0, 0.0]}, "capacities, all above 0"),
        ({0: [1.0], 1: [1.0, 2.0]}, {"groups": 1}, "all with the same experts"),
        ({}, {"groups": 1}, "needs layers"),
        ({0: [1.0, float("nan")]}, {"groups": 1}, "layer 0 is negative or not finite"),
        ({0: [1.0, -1.0]}, {"groups": 1}, "layer 0 is negative or not finite"),
    ],
)
def test_what_cannot_be_is_refused(load: dict[int, list[float]], options: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        shard_groups(load, **options)


def test_strain_adds_the_slowest_of_each_layer() -> None:
    assert peak_load([[2, 4], [6, 2]], [1, 2]) == 2 + 6
    assert imbalance([[3, 1], [1, 3]], [1, 1]) == pytest.approx(1.5)
    assert peak_load([[1, 1]], [1, 0]) == float("inf")


def test_smoothing_weighs_the_latest() -> None:
    assert smoothed(None, {0: [4, 0]}) == {0: [4, 0]}
    assert smoothed({0: [4, 0]}, {0: [0, 8]}, weight=0.25) == {0: [3, 2]}
