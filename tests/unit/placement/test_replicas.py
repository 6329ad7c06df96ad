"""Replicas of shard groups: which seats serve which group."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.errors import ConfigError, NotReady
from services.placement.load import peak_load
from services.placement.replicas import assign_seats, capacities, next_move


def value(loads: list[list[float]], seats: list[float], group_S: list[int]) -> float:
    return peak_load(loads, capacities(group_S, seats, len(loads[0])))


def best(loads: list[list[float]], seats: list[float]) -> float:
    every = itertools.product(range(len(loads[0])), repeat=len(seats))
    return min(value(loads, seats, list(group_S)) for group_S in every)


LOADS = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(lambda row: [row])


@given(LOADS, st.integers(0, 3))
def test_alike_seats_are_assigned_as_well_as_can_be(loads: list[list[float]], more: int) -> None:
    seats = [1.0] * (len(loads[0]) + more)
    assert value(loads, seats, assign_seats(loads, seats)) == pytest.approx(best(loads, seats))


@given(LOADS, st.lists(st.integers(1, 4), min_size=3, max_size=6))
def test_unlike_seats_come_close_to_it(loads: list[list[float]], seats: list[float]) -> None:
    group_S = assign_seats(loads, seats)
    assert set(group_S) == set(range(len(loads[0])))
    assert value(loads, seats, group_S) <= 1.35 * best(loads, seats)


@pytest.mark.parametrize(
    ("loads", "seats", "now", "then"),
    [
        pytest.param([9, 3, 5], [1, 1, 1, 1], [0, 1, 2, None], [0, 1, 2, 0], id="the next to the most loaded group"),
        pytest.param([4, 3, 5], [1, 1, 1, 1], [0, 1, 2, None], [0, 1, 2, 2], id="which is the last one"),
        pytest.param([2, 9], [1, 3], None, [0, 1], id="the strongest for the heaviest group"),
        pytest.param([9, 2], [1, 3], None, [1, 0], id="which is the first one"),
        pytest.param([8, 4, 6], [1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 2, 1], id="the idlest of several for a bare group"),
    ],
)
def test_seats_are_assigned(
    loads: list[float], seats: list[float], now: list[int | None] | None, then: list[int]
) -> None:
    assert assign_seats([loads], seats, now) == then


def test_too_few_seats_or_one_without_capacity_are_refused() -> None:
    with pytest.raises(NotReady, match=r"2 expert workers are too few for 3 shard groups\. Start more"):
        assign_seats([[1, 1, 1]], [1, 1])
    with pytest.raises(ConfigError, match="not above 0"):
        assign_seats([[1]], [0])


@given(st.integers(1, 4), st.integers(2, 4), st.data())
def test_the_next_move_is_the_best_of_all_seats_and_groups(layers: int, groups: int, data: st.DataObject) -> None:
    loads = [[data.draw(st.integers(0, 12)) for _ in range(groups)] for _ in range(layers)]
    more = data.draw(st.lists(st.integers(0, groups - 1), max_size=5))
    group_S = [*range(groups), *more]
    seats = [float(data.draw(st.sampled_from([1, 1, 2, 3]))) for _ in group_S]
    every = [
        [*group_S[:seat], group, *group_S[seat + 1 :]]
        for seat, own in enumerate(group_S)
        if group_S.count(own) > 1
        for group in range(groups)
        if group != own
    ]
    found, here = next_move(loads, seats, group_S), value(loads, seats, group_S)
    least = min(((value(loads, seats, moved), moved) for moved in every), default=(here, []))
    assert found == (least[1] if least[0] < here * (1 - 1e-9) else None)


def test_thousands_of_seats_get_their_groups_in_seconds() -> None:
    loads = [[1.0 + (group * 7) % 5 for group in range(32)] for _ in range(8)]
    seats = [1.0] * 2000
    group_S = assign_seats(loads, seats, [None] * 2000)
    assert value(loads, seats, group_S) <= 1.05 * sum(map(sum, loads)) / 2000
    uneven = [[load * (2 if group == 9 else 1) for group, load in enumerate(loads_G)] for loads_G in loads]
    moved = next_move(uneven, seats, group_S)
    assert moved is not None
    assert value(uneven, seats, moved) < value(uneven, seats, group_S)
