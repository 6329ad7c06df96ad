"""The next routing table: membership at once, load when it pays, as few experts loaded as will do."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.errors import ConfigError, NotReady
from services.placement.replan import Hysteresis, Plan, replan
from services.routing import RoutingTable, Seat, even_groups

LAYERS, EXPERTS = 2, 8


def seat(number: int, group: int = 0, *, worker: str = "", capacity: float = 1.0) -> Seat:
    worker = worker or f"w{number}"
    return Seat(number=number, worker=worker, group=group, host="h", port=number, capacity=capacity)


def table(groups: int, seats: Sequence[Seat]) -> RoutingTable:
    split = even_groups(list(range(LAYERS)), EXPERTS, groups)
    return RoutingTable(epoch=4, fingerprint="f", num_experts=EXPERTS, groups=split, seats=tuple(seats))


def alike(loads: list[float]) -> dict[int, list[float]]:
    return dict.fromkeys(range(LAYERS), loads)


def even() -> dict[int, list[float]]:
    return alike([1.0] * EXPERTS)


def plan(current: RoutingTable, load: dict[int, list[float]], seats: Sequence[Seat], **options: int) -> Plan:
    return replan(current, load, seats, elapsed_s=1000, **options)


LOAD = st.lists(st.lists(st.integers(0, 60), min_size=EXPERTS, max_size=EXPERTS), min_size=LAYERS, max_size=LAYERS).map(
    lambda rows: dict(enumerate(rows))
)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[RoutingTable, list[Seat]]:
    """A table, and the seats now alive: some gone, some restarted, some new."""
    groups = draw(st.integers(1, 4))
    count = draw(st.integers(groups, 7))
    seats = [seat(n, n % groups, capacity=draw(st.sampled_from([1.0, 1.0, 2.0]))) for n in range(count)]
    alive = [each for each in seats if draw(st.integers(0, 4))]
    restarted = [
        seat(each.number, each.group, worker="new") if draw(st.integers(0, 4)) == 0 else each for each in alive
    ]
    joined = [seat(20 + n, 0) for n in range(draw(st.integers(0 if alive else 1, 2)))]
    return table(groups, seats), restarted + joined


@settings(deadline=None)
@given(worlds(), LOAD)
def test_a_plan_keeps_every_promise(world: tuple[RoutingTable, list[Seat]], load: dict[int, list[float]]) -> None:
    current, seats = world
    made = plan(current, load, seats)
    assert {layer: len(row) for layer, row in made.table.group_of.items()} == dict.fromkeys(range(LAYERS), EXPERTS)
    assert [(s.number, s.worker) for s in made.table.seats] == sorted((s.number, s.worker) for s in seats)
    assert all(made.table.seats_of.values()), "every group has a seat"
    assert made.after <= made.before * (1 + 1e-9)
    assert made.table.epoch == current.epoch + (made.table != current)
    assert made == plan(current, load, seats[::-1])
    again = plan(made.table, load, made.table.seats)
    assert again.moves == ()
    assert again.table is made.table


@settings(deadline=None)
@given(worlds(), LOAD)
def test_moves_name_what_seats_do_not_hold(
    world: tuple[RoutingTable, list[Seat]], load: dict[int, list[float]]
) -> None:
    current, seats = world
    made = plan(current, load, seats)
    held = {(s.number, s.worker): set(experts(current, s.group)) for s in current.seats}
    moves = {move.seat: move for move in made.moves}
    for after in made.table.seats:
        had = held.get((after.number, after.worker), set())
        wanted = set(experts(made.table, after.group))
        move = moves.get(after.number)
        loads = {(layer, expert) for layer, ids in move.experts.items() for expert in ids} if move else set()
        assert loads == wanted - had


def experts(of: RoutingTable, group: int) -> list[tuple[int, int]]:
    (found,) = [each for each in of.groups if each.number == group]
    return [(layer, expert) for layer, ids in found.experts.items() for expert in ids]


@settings(deadline=None)
@given(LOAD, st.integers(2, 4), st.integers(0, 4))
def test_memory_bounds_hold(load: dict[int, list[float]], limit: int, spare: int) -> None:
    groups = -(-EXPERTS // limit)
    seats = [seat(n, n % groups) for n in range(groups + spare)]
    made = plan(table(groups, seats), load, seats, limit=limit)
    assert all(1 <= len(ids) <= limit for group in made.table.groups for ids in group.experts.values())


def test_no_change_within_the_waiting_time_or_for_a_small_gain() -> None:
    seats = [seat(0, 0), seat(1, 1)]
    skewed = alike([9.0, 9, 9, 9, 1, 1, 1, 1])
    current = table(2, seats)
    patient = Hysteresis(gain=0.1, wait_s=60)
    assert replan(current, skewed, seats, elapsed_s=59, hysteresis=patient).table is current
    assert replan(current, skewed, seats, elapsed_s=60, hysteresis=patient).after == pytest.approx(1)
    slightly = alike([10.5, 10, 10, 10, 10, 10, 10, 10])
    assert replan(current, slightly, seats, elapsed_s=60, hysteresis=patient).table is current


def test_a_spare_seat_follows_the_load_and_loads_that_group_alone() -> None:
    seats = [seat(0, 0), seat(1, 0), seat(2, 1)]
    load = alike([1.0, 1, 1, 1, 2, 2, 2, 2])
    made = replan(table(2, seats), load, seats, elapsed_s=99, limit=4)
    (move,) = made.moves
    assert (move.source, move.target, move.count) == (0, 1, 8)
    assert (made.before, made.after) == (2, 1)


def test_a_group_without_load_keeps_its_only_seat() -> None:
    seats = [seat(0, 0), seat(1, 1)]
    made = replan(table(2, seats), alike([0.0, 0, 0, 0, 9, 0, 0, 0]), seats, elapsed_s=99)
    assert made.table.epoch == 4


def test_a_joined_seat_goes_to_the_busiest_group_even_while_waiting() -> None:
    seats = [seat(0, 0), seat(1, 1)]
    load = alike([1.0, 1, 1, 1, 3, 3, 3, 3])
    made = replan(table(2, seats), load, [*seats, seat(9)], elapsed_s=0)
    (move,) = made.moves
    assert (move.seat, move.source, move.target) == (9, None, 1)
    assert move.experts == dict.fromkeys(range(LAYERS), (4, 5, 6, 7))


def test_a_restarted_seat_keeps_its_group_and_loads_all_of_it() -> None:
    seats = [seat(0, 0), seat(1, 1)]
    made = replan(table(2, seats), even(), [seats[0], seat(1, worker="again")], elapsed_s=0)
    (move,) = made.moves
    assert (move.seat, move.source, move.target, move.count) == (1, None, 1, 8)
    assert made.before == math.inf


def test_a_lost_group_is_served_by_a_spare_seat_of_another() -> None:
    seats = [seat(0, 0), seat(1, 0), seat(2, 1)]
    made = replan(table(2, seats), even(), seats[:2], elapsed_s=0)
    assert [group for group, of in made.table.seats_of.items() if len(of) == 1] == [0, 1]
    assert [move.target for move in made.moves] == [1]


def test_groups_merge_when_seats_are_too_few_and_split_when_asked() -> None:
    seats = [seat(n, n) for n in range(4)]
    current = table(4, seats)
    merged = replan(current, even(), [seats[1], seats[3]], elapsed_s=0)
    assert [group.number for group in merged.table.groups] == [1, 3]
    assert [len(ids) for group in merged.table.groups for ids in group.experts.values()] == [4] * 2 * LAYERS
    assert sum(move.count for move in merged.moves) == 4 * LAYERS
    back = replan(merged.table, even(), seats, elapsed_s=0, groups=4)
    assert [group.number for group in back.table.groups] == [0, 1, 2, 3]
    assert back.after == pytest.approx(1)


def test_too_little_memory_for_all_experts_is_not_ready() -> None:
    seats = [seat(n, n) for n in range(4)]
    with pytest.raises(NotReady, match="1 expert workers with memory for 2 experts of each layer cannot hold 8"):
        replan(table(4, seats), even(), seats[:1], elapsed_s=0, limit=2)


@pytest.mark.parametrize(
    ("load", "seats", "said"),
    [
        ({0: [1.0] * EXPERTS}, [seat(0)], "other layers or experts than the routing table of epoch 4"),
        (alike([1.0]), [seat(0)], "other layers or experts"),
        (even(), [seat(0), seat(0, worker="b")], "Two seats have one number"),
        (even(), [seat(0, capacity=0)], "not above 0"),
    ],
)
def test_what_cannot_be_is_refused(load: dict[int, list[float]], seats: list[Seat], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replan(table(1, [seat(0)]), load, seats, elapsed_s=0)


def test_no_seat_at_all_is_not_ready() -> None:
    with pytest.raises(NotReady, match="0 expert workers"):
        replan(table(1, [seat(0)]), even(), [], elapsed_s=0)
