"""The next routing table: groups and seats follow the load when it pays, with as few experts loaded as will do."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.errors import ConfigError, NotReady
from services.placement.replan import Hysteresis, replan
from services.routing import RoutingTable, Seat, even_groups

LAYERS, EXPERTS = 2, 8
NO_GAIN_SUFFICES = Hysteresis(gain=1.0)


def seat(number: int, group: int = 0, *, capacity: float = 1.0) -> Seat:
    return Seat(number=number, worker=f"w{number}", group=group, host="h", port=number, capacity=capacity)


def table(groups: int, seats: Sequence[Seat]) -> RoutingTable:
    split = even_groups(list(range(LAYERS)), EXPERTS, groups)
    return RoutingTable(epoch=4, fingerprint="f", num_experts=EXPERTS, groups=split, seats=tuple(seats))


def alike(loads: list[float]) -> dict[int, list[float]]:
    return dict.fromkeys(range(LAYERS), loads)


EVEN = alike([1.0] * EXPERTS)


LOAD = st.lists(st.lists(st.integers(0, 60), min_size=EXPERTS, max_size=EXPERTS), min_size=LAYERS, max_size=LAYERS).map(
    lambda rows: dict(enumerate(rows))
)


@st.composite
def tables(draw: st.DrawFn) -> RoutingTable:
    """A table some of whose seats are gone, so that there may be groups without seats and fewer seats than groups."""
    groups = draw(st.integers(1, 4))
    count = draw(st.integers(groups, 7))
    seats = [seat(n, n % groups, capacity=draw(st.sampled_from([1.0, 1.0, 2.0]))) for n in range(count)]
    return table(groups, [each for each in seats if draw(st.integers(0, 4))] or seats[:1])


@given(tables(), LOAD)
def test_a_plan_keeps_every_promise(current: RoutingTable, load: dict[int, list[float]]) -> None:
    made = replan(current, load)
    assert {layer: len(row) for layer, row in made.table.group_of.items()} == dict.fromkeys(range(LAYERS), EXPERTS)
    assert [s.number for s in made.table.seats] == [s.number for s in current.seats]
    assert all(made.table.seats_of.values()), "every group has a seat"
    assert made.after <= made.before * (1 + 1e-9)
    assert made.table.epoch == current.epoch + (made.table != current)
    backwards = RoutingTable(
        epoch=4, fingerprint="f", num_experts=EXPERTS, groups=current.groups, seats=current.seats[::-1]
    )
    assert made.table.groups == replan(backwards, load).table.groups
    assert replan(made.table, load).table is made.table


@given(LOAD, st.integers(2, 4), st.integers(0, 4))
def test_memory_bounds_hold(load: dict[int, list[float]], limit: int, spare: int) -> None:
    groups = -(-EXPERTS // limit)
    seats = [seat(n, n % groups) for n in range(groups + spare)]
    made = replan(table(groups, seats), load, limit=limit)
    assert all(1 <= len(ids) <= limit for group in made.table.groups for ids in group.experts.values())


def test_no_change_for_a_small_gain() -> None:
    current = table(2, [seat(0, 0), seat(1, 1)])
    assert replan(current, alike([9.0, 9, 9, 9, 1, 1, 1, 1])).after == pytest.approx(1)
    assert replan(current, alike([10.5, 10, 10, 10, 10, 10, 10, 10])).table is current


def test_a_spare_seat_follows_the_load_and_loads_that_group_alone() -> None:
    current = table(2, [seat(0, 0), seat(1, 0), seat(2, 1)])
    made = replan(current, alike([1.0, 1, 1, 1, 2, 2, 2, 2]), limit=4)
    assert made.table.groups == current.groups
    assert [s.group for s in made.table.seats] == [0, 1, 1]
    assert (made.before, made.after) == (2, 1)


def test_a_group_without_load_keeps_its_only_seat() -> None:
    made = replan(table(2, [seat(0, 0), seat(1, 1)]), alike([0.0, 0, 0, 0, 9, 0, 0, 0]))
    assert made.table.epoch == 4


def test_a_lost_group_is_served_by_a_spare_seat_of_another() -> None:
    made = replan(table(2, [seat(0, 0), seat(1, 0)]), EVEN, hysteresis=NO_GAIN_SUFFICES)
    assert made.before == math.inf
    assert [group for group, of in made.table.seats_of.items() if len(of) == 1] == [0, 1]


def test_groups_merge_when_seats_are_too_few() -> None:
    current = table(4, [seat(1, 1), seat(3, 3)])
    merged = replan(current, EVEN, hysteresis=NO_GAIN_SUFFICES)
    assert [group.number for group in merged.table.groups] == [1, 3]
    assert [len(ids) for group in merged.table.groups for ids in group.experts.values()] == [4] * 2 * LAYERS
    before = {group.number: group.experts for group in current.groups}
    for group in merged.table.groups:
        assert all(set(before[group.number][layer]) <= set(ids) for layer, ids in group.experts.items()), "they stay"


def test_too_little_memory_for_all_experts_or_no_seat_at_all_is_not_ready() -> None:
    with pytest.raises(NotReady, match="1 expert workers with memory for 2 experts of each layer cannot hold 8"):
        replan(table(4, [seat(0, 0)]), EVEN, limit=2)
    with pytest.raises(NotReady, match="0 expert workers"):
        replan(table(1, []), EVEN)


@pytest.mark.parametrize(
    ("load", "seats", "said"),
    [
        ({0: [1.0] * EXPERTS}, [seat(0)], "other layers or experts than the routing table of epoch 4"),
        (alike([1.0]), [seat(0)], "other layers or experts"),
        (EVEN, [seat(0, capacity=0)], "not above 0"),
        ({0: [1.0], 1: [1.0, 2.0]}, [seat(0)], "all with the same experts"),
        ({}, [seat(0)], "needs layers"),
        ({0: [1.0, float("nan")]}, [seat(0)], "layer 0 is negative or not finite"),
        ({0: [1.0, -1.0]}, [seat(0)], "layer 0 is negative or not finite"),
    ],
)
def test_what_cannot_be_is_refused(load: dict[int, list[float]], seats: list[Seat], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replan(table(1, seats), load)
