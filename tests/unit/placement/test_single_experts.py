"""Single experts on devices, and the claim against EPLB's greedy on the pocket model's recorded choices."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.fabric.eplb import eplb
from testkit.fabric.placement_replay import (
    device_loads,
    experts_to_load,
    greedy,
    helped_greedy,
    imbalance,
    ours,
    replay,
    shifting,
)

from pocket_moe.records import ExpertTrace
from services.errors import ConfigError
from services.placement.load import Load, peak_load
from services.placement.single_experts import Placement, place_experts

TRACE = Path(__file__).resolve().parents[3] / "examples/pocket-moe/records/experts.npz"


def max_over_mean(load: Load, placement: Placement) -> float:
    return imbalance(device_loads(load, placement), [1.0] * len(placement[0]))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[dict[int, list[float]]], int, int]:
    """Three windows, devices, slots."""
    experts, devices = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    slots = draw(st.integers(-(-experts // devices), experts + 1))
    row = st.lists(st.integers(0, 30).map(float), min_size=experts, max_size=experts)
    return [{0: draw(row), 1: draw(row)} for _ in range(3)], devices, slots


@given(worlds(), st.data())
def test_a_placement_holds_every_expert_within_its_slots(
    world: tuple[list[dict[int, list[float]]], int, int], data: st.DataObject
) -> None:
    (first, second, third), devices, slots = world
    placed = place_experts(first, devices, slots)
    lost = {layer: tuple(() if data.draw(st.booleans()) else held for held in row) for layer, row in placed.items()}
    for made in (placed, place_experts(third, devices, slots, lost, earlier=[first, second])):
        for row in made.values():
            assert {expert for held in row for expert in held} == set(range(len(first[0])))
            assert all(len(set(held)) == len(held) <= slots for held in row)
    assert placed == place_experts(first, devices, slots)


@given(worlds())
def test_what_is_placed_stays_while_the_load_does(world: tuple[list[dict[int, list[float]]], int, int]) -> None:
    (load, other, _), devices, slots = world
    placed = place_experts(other, devices, slots, place_experts(load, devices, slots))
    again = place_experts(other, devices, slots, placed)
    assert experts_to_load(placed, again) == 0


@given(worlds())
def test_max_over_mean_never_rises(world: tuple[list[dict[int, list[float]]], int, int]) -> None:
    (load, other, _), devices, slots = world
    before = place_experts(load, devices, slots)
    after = place_experts(other, devices, slots, before)
    for layer, row in other.items():
        loads = {layer: row if any(row) else [1.0] * len(row)}
        here, there = ({layer: placed[layer]} for placed in (before, after))
        assert peak_load(device_loads(loads, there), [1.0] * devices) <= peak_load(
            device_loads(loads, here), [1.0] * devices
        ) * (1 + 1e-9)


def test_a_hot_expert_is_replicated() -> None:
    placed = place_experts({0: [6.0, 1, 1, 1, 1]}, 2, 3)
    assert [0 in held for held in placed[0]] == [True, True]
    assert max_over_mean({0: [6.0, 1, 1, 1, 1]}, placed) == 1


def test_windows_before_count_as_much() -> None:
    morning, evening = {0: [4.0, 0, 4, 0, 0, 0]}, {0: [0.0, 0, 0, 0, 4, 4]}
    assert max_over_mean(morning, place_experts(evening, 2, 3)) == 2
    placed = place_experts(evening, 2, 3, earlier=[morning])
    assert max_over_mean(morning, placed) == max_over_mean(evening, placed) == 1


def test_an_expert_moves_only_for_what_it_is_worth() -> None:
    current = {0: ((0, 1), (2, 3))}
    assert place_experts({0: [1.02, 1, 1, 0.98]}, 2, 2, current, price=0.05) == current
    assert place_experts({0: [2.0, 2, 1, 1]}, 2, 2, current, price=0.05) != current


@pytest.mark.parametrize(("devices", "slots"), [(0, 4), (2, 1)])
def test_too_few_slots_are_refused(devices: int, slots: int) -> None:
    with pytest.raises(ConfigError, match=f"{devices} devices with {slots} slots a layer cannot hold 4 experts"):
        place_experts({0: [1.0] * 4}, devices, slots)


def test_the_baseline_is_the_published_greedy() -> None:
    assert eplb({0: [9.0, 4, 3, 2]}, 2, 3) == {0: ((0, 1, 3), (0, 0, 2))}


@pytest.mark.parametrize(("devices", "slots"), [(4, 5), (8, 3)])
def test_recorded_load_is_evener_than_with_eplbs_greedy_and_fewer_experts_move(devices: int, slots: int) -> None:
    windows = shifting(ExpertTrace.load(TRACE), [0, 1, 8, 13, 18], tokens=2500, steps=3)
    (here, published, helped) = (
        replay(windows, planner(devices, slots), devices) for planner in (ours, greedy, helped_greedy)
    )
    assert here.imbalance < min(published.imbalance, helped.imbalance)
    assert here.moves < min(published.moves, helped.moves) / 2
