"""What the leader asks of expert seats: groups for those without, a table of those that are ready."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from services.messages import ExpertInfo, SeatReport, SeatRows
from services.queue.seats import SeatState
from services.routing import RoutingTable, ShardGroup, even_groups
from services.scheduler.experts import ExpertPlacement, PlacementEvents, are_whole, intentions
from services.scheduler.load import LoadMeter, imbalance
from services.scheduler.room import Shortage

GROUPS = even_groups([1, 3], 8, 2)


def seat(number: int, holds: int | None = None, *, assigned: bool = True, **changes: Any) -> SeatState:
    """Ready with group ``holds``."""
    info = ExpertInfo(
        id=f"w{number}", fingerprint="f", host="h", port=number, memory_bytes=1, pid=1, version="v", num_experts=8,
        layers=(1, 3), group=changes.pop("wish", None), capacity=changes.pop("capacity", 1.0),
    )  # fmt: skip
    digest = GROUPS[holds].digest if holds is not None else None
    report = SeatReport(status="ready" if digest else "waiting", group=holds, digest=digest or "")
    values: dict[str, Any] = {"status": report.status, "dismissed": False, "assigned": digest if assigned else None}
    return SeatState(number=number, info=info, report=report, **(values | changes))


def roomy(state: SeatState, limit: int) -> SeatState:
    return replace(state, info=msgspec.structs.replace(state.info, max_experts=limit))


def published(*seats: SeatState) -> RoutingTable:
    table = intentions(seats, None, GROUPS, following=5).table
    assert table is not None
    return table


def assigned(
    *seats: SeatState,
    table: RoutingTable | None = None,
    groups: tuple[ShardGroup, ...] = GROUPS,
    load: dict[int, list[float]] | None = None,
) -> list[tuple[int, int]]:
    """Numbers of seats and of the groups that they get."""
    wanted = intentions(seats, table, groups, following=6, load=load)
    return [(found.number, group.number) for found, group in wanted.assign]


def test_the_first_seats_get_the_groups_in_turn() -> None:
    assert assigned(seat(1), seat(2), seat(3)) == [(1, 0), (2, 1), (3, 0)]
    assert assigned(seat(1, wish=2), seat(2, wish=3)) == [], "there are two groups"
    for seats in ([seat(1), seat(2), seat(3)], [seat(1, 0), seat(2)]):
        assert intentions(seats, None, GROUPS, following=5).table is None, "one that lacks experts serves nobody"
    table = published(seat(1, 0), seat(2, 1))
    assert (table.epoch, table.groups, [found.number for found in table.seats]) == (5, GROUPS, [1, 2])


def test_assigned_groups_are_whole_if_they_hold_every_expert_once() -> None:
    info = seat(1).info
    assert are_whole(dict(enumerate(GROUPS)), info)
    assert not are_whole({0: GROUPS[0]}, info)
    assert not are_whole({0: GROUPS[0], 1: even_groups([1, 3], 8, 3)[1]}, info)
    assert not are_whole({}, info)
    assert not are_whole(dict(enumerate(even_groups([1], 8, 2))), info)


def test_a_seat_gets_no_group_that_it_has_no_room_for(caplog: pytest.LogCaptureFixture) -> None:
    uneven = (msgspec.structs.replace(GROUPS[0], experts={1: (0, 1, 2, 3, 4, 5)}), GROUPS[1])
    small = [roomy(seat(number), 4) for number in (1, 2)]
    assert assigned(*small, groups=uneven) == [(1, 1), (2, 1)]
    assert assigned(roomy(seat(1, wish=0), 4), groups=uneven) == []
    shortage = Shortage()
    shortage.note(small, uneven)
    shortage.note(small, uneven)
    assert [record.getMessage() for record in caplog.records] == [
        "no expert worker has room for shard group 0 (6 experts of a layer): raise --expert-capacity or --expert-groups"
    ]


def test_a_seat_that_there_is_no_group_for_holds_up_nobody(caplog: pytest.LogCaptureFixture) -> None:
    serving, lost = [seat(1, 0), seat(2, 0)], roomy(seat(3), 1)
    assert assigned(*serving) == [(2, 1)]
    assert assigned(*serving, lost) == [(2, 1)]
    assert assigned(*serving, seat(3, 1), seat(4, wish=7)) == [], "groups are 0 and 1"
    shortage = Shortage()
    for _ in range(2):
        shortage.note([*serving, lost, seat(4, wish=7)], GROUPS)
    said = [record.getMessage().partition(", so ")[0] for record in caplog.records]
    assert said == [
        "w3 (seat 3) cannot hold any of the 2 shard groups",
        "w4 (seat 4) cannot hold shard group 7, which it asks for",
    ]


def test_of_bare_groups_the_first_one_that_fits_is_served() -> None:
    large = msgspec.structs.replace(GROUPS[0], number=1, experts={1: (0, 1, 2, 3, 4, 5)})
    layout = (GROUPS[0], large, msgspec.structs.replace(GROUPS[1], number=2))
    assert assigned(roomy(seat(1, 0), 4), roomy(seat(2, 0), 4), groups=layout) == [(2, 2)]


def test_a_table_lists_the_seats_that_are_ready_with_their_group_and_is_written_once() -> None:
    table = published(seat(1, 0), seat(2, 1), seat(3, 1, status="loading"))
    assert {number: [s.number for s in seats] for number, seats in table.seats_of.items()} == {0: [1], 1: [2]}
    assert intentions([seat(1, 0), seat(2, 1)], table, GROUPS, following=6).table is None


def test_a_seat_that_leaves_is_out_of_the_next_table() -> None:
    table = published(seat(1, 0), seat(2, 1), seat(3, 1))
    for gone in (seat(3, 1, status="leaving"), seat(3, 1, dismissed=True)):
        new = intentions([seat(1, 0), seat(2, 1), gone], table, GROUPS, following=6).table
        assert new is not None
        assert [s.number for s in new.seats] == [1, 2]
        assert new.epoch == 6


@pytest.mark.parametrize(
    ("left", "wanted"),
    [
        pytest.param([seat(1, 0), seat(2, 0)], [(2, 1)], id="one of a group with several moves"),
        pytest.param([seat(1, 0)], [], id="the only one of a group stays"),
        pytest.param([seat(1, 0, wish=0), seat(2, 0, wish=0)], [], id="who asked for a group stays"),
        pytest.param([seat(1, 0, wish=0), seat(2, 0)], [(2, 1)], id="and keeps no other from moving"),
        pytest.param([seat(1, 0), seat(2, 0), seat(4, wish=2)], [(2, 1)], id="nor who asked for a group that is not"),
    ],
)
def test_a_group_that_lost_its_last_seat(left: list[SeatState], wanted: list[tuple[int, int]]) -> None:
    before = published(seat(1, 0), seat(2, 0), seat(3, 1))
    assert assigned(*left, table=before) == wanted
    if wanted:
        table = intentions(left, before, GROUPS, following=6).table
        assert table is not None
        assert [s.number for s in table.seats] == [1], "who moves is out of the table by then"


def test_a_seat_goes_where_there_is_the_least_capacity_or_where_it_asks_to() -> None:
    held = [seat(1, 0, wish=0, capacity=2.0), seat(2, 1, wish=1)]
    before = published(*held)
    assert assigned(*held, seat(3), table=before) == [(3, 1)]
    assert assigned(*held, seat(3, wish=0), table=before) == [(3, 0)]
    wanted = intentions([*held, seat(3, wish=2)], before, GROUPS, following=6)
    assert (wanted.assign, wanted.table) == ((), None), "no part of a group, whoever else needs help"
    assert assigned(*held, seat(3, wish=2), seat(4), table=before) == [(4, 1)], "others are placed meanwhile"


def test_an_assignment_that_redis_forgot_is_made_again_as_the_seat_reports_it() -> None:
    before = published(seat(1, 0), seat(2, 1), seat(3, 1))
    forgotten = [seat(1, 0), seat(2, 1), seat(3, 1, assigned=False)]
    assert assigned(*forgotten, table=before) == [(3, 1)]
    assert intentions(forgotten, before, GROUPS, following=6).table is None, "it goes on serving"


HOT = {layer: [9.0] * 4 + [1.0] * 4 for layer in (1, 3)}
"""Group 0 takes nine tenths of the rows."""
NEARLY_EVEN = {layer: [1.05] * 4 + [0.95] * 4 for layer in (1, 3)}


@pytest.mark.parametrize(
    ("seats", "load", "wanted"),
    [
        pytest.param([seat(1, 0), seat(2, 1), seat(3, 1), seat(4, 1)], HOT, [(2, 0)], id="one at a time"),
        pytest.param([seat(1, 0), seat(2, 0), seat(3, 0), seat(4, 1)], HOT, [], id="once it is there"),
        pytest.param([seat(1, 0), seat(2, 0), seat(3, 1), seat(4, 1)], NEARLY_EVEN, [], id="not for a small gain"),
        pytest.param([seat(1, 0), seat(2, 1), seat(3, 1, status="loading")], HOT, [], id="not the last that serves"),
        pytest.param([seat(1, 0), seat(2, 1), seat(3)], HOT, [(3, 0)], id="a new one"),
    ],
)
def test_replicas_follow_the_load(
    seats: list[SeatState], load: dict[int, list[float]], wanted: list[tuple[int, int]]
) -> None:
    assert assigned(*seats, table=published(*seats), load=load) == wanted


def test_the_meter_counts_what_came_since_the_last_reading() -> None:
    table = published(seat(1, 0), seat(2, 1))
    meter = LoadMeter()

    def read(first: int, second: int) -> None:
        counts = [dict.fromkeys((1, 3), (rows,) * 4) for rows in (first, second)]
        held = zip(GROUPS, counts, strict=True)
        meter.read({group.number + 1: SeatRows(digest=group.digest, rows=rows) for group, rows in held}, table)

    read(1000, 5)
    assert meter.load is None, "what was counted before says nothing about now"
    for _ in range(2):
        read(1010, 95)
        assert meter.load == {layer: [10.0] * 4 + [90.0] * 4 for layer in (1, 3)}, "silence does not erase it"


class Quiet:
    """A registry and a reader in one. Seats of the other model are here; the table is the old one's."""

    def __init__(self, table: RoutingTable, seats: list[SeatState]) -> None:
        self._table, self._seats = table, seats
        self.published: list[RoutingTable] = []
        self.died: list[str] = []
        self.assigned: list[tuple[str, int]] = []

    async def read_table(self, after: int) -> RoutingTable | None:
        return self._table if self._table.epoch > after else None

    async def seats(self) -> list[SeatState]:
        return self._seats

    async def reap(self, epoch: int) -> Any:  # noqa: ARG002
        died, self.died = self.died, []
        return SimpleNamespace(seats=died, held=False)

    async def table_epochs(self) -> Any:
        epoch = self._table.epoch
        return SimpleNamespace(oldest=epoch, published=epoch, following=epoch + 1)

    async def publish_table(self, epoch: int, table: RoutingTable) -> None:  # noqa: ARG002
        self._table = table
        self.published.append(table)

    @property
    def listed(self) -> list[int]:
        return [seat.number for seat in self._table.seats]

    async def groups(self) -> list[Any]:
        return []

    async def rows(self) -> dict[int, SeatRows]:
        return {}

    async def assign_groups(self, _: int, pairs: list[tuple[str, ShardGroup]]) -> None:
        self.assigned += [(name, group.number) for name, group in pairs]


async def test_load_and_plans_of_another_model_are_forgotten() -> None:
    other = seat(9)
    other = replace(other, info=msgspec.structs.replace(other.info, fingerprint="g"))
    redis: Any = Quiet(published(seat(1, 0), seat(2, 1)), [other])
    placement = ExpertPlacement(redis, redis, groups=2)
    placement._meter.load = {1: [1.0] * 8}
    placement._repartitioner.target = GROUPS
    await placement.turn(1)
    assert placement._meter.load is None
    assert placement._repartitioner.target is None
    assert redis.published == []


async def test_a_turn_that_finds_nothing_new_weighs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seats = [seat(1, 0), seat(2, 1)]
    redis: Any = Quiet(published(*seats), seats)
    placement = ExpertPlacement(redis, redis, groups=2, clock=lambda: 1.0)
    weighed: list[int] = []
    weigh = placement._intentions

    def counted(*arguments: Any) -> Any:
        weighed.append(len(arguments[0]))
        return weigh(*arguments)

    monkeypatch.setattr(placement, "_intentions", counted)
    for _ in range(3):
        await placement.turn(1)
    assert weighed == [2]
    redis._seats = [*seats, seat(3)]
    assert await placement.turn(1), "the seat is assigned its group"
    assert await placement.turn(1), "it may not have read that: it is assigned again until it shows"
    redis._seats = seats
    for _ in range(3):
        await placement.turn(1)
    assert weighed == [2, 3, 3, 2]
    assert redis.published == []
    placement._repartitioner.target = even_groups([1, 3], 8, 1)
    await placement.turn(1)
    assert weighed == [2, 3, 3, 2, 2]


async def test_logs_name_the_processes_of_seats(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    named = [
        replace(state, info=msgspec.structs.replace(state.info, process=f"experts-{state.number}"))
        for state in (seat(1, 0), seat(3, 1), seat(4))
    ]
    redis: Any = Quiet(published(seat(1, 0), seat(2, 1)), named)
    await ExpertPlacement(redis, redis, groups=2, clock=lambda: 1.0).turn(1)
    assert [record.getMessage() for record in caplog.records] == [
        "published routing table 6: 2 seats in 2 shard groups; added: experts-3 (seat 3); removed: w2 (seat 2)",
        "assigned experts-4 (seat 4) to shard group 0",
    ]


async def test_the_load_is_followed_although_a_seat_has_no_place() -> None:
    seats = [seat(1, 0), seat(2, 1)]
    redis: Any = Quiet(published(*seats), seats)
    for others, stable in (([seat(3, wish=2)], True), ([seat(3)], False)):
        placement = ExpertPlacement(redis, redis, groups=2, clock=lambda: 1e6)
        placement._table, placement._changed_at, placement._meter.load = published(*seats), 0.0, HOT
        assert (await placement._measured([*seats, *others]) is not None) is stable


@pytest.mark.parametrize(
    ("load", "moves"), [(None, [("w4", 1)]), ({1: [1.0] * 8, 3: [1.0] * 8}, [("w4", 1)]), (HOT, [])]
)
async def test_what_a_dead_seat_left_uneven_is_evened_at_once(load: Any, moves: list[tuple[str, int]]) -> None:
    """The seat that came in its place got group 0 while the dead one counted in group 1; the hot experts are there."""
    before = [seat(1, 0), seat(2, 0), seat(3, 1), seat(5, 1)]
    redis: Any = Quiet(published(*before), [*before, seat(4, 0)])
    placement = ExpertPlacement(redis, redis, groups=2, clock=lambda: 1.0)
    placement._meter.load = load
    await placement.turn(1)
    assert redis.assigned == []
    redis._seats, redis.died = [*before[:3], seat(4, 0, status="loading")], ["w5"]
    await placement.turn(1)
    assert redis.assigned == [], "it may get another group when it is ready"
    redis._seats = [*before[:3], seat(4, 0)]
    await placement.turn(1)
    assert redis.assigned == moves
    redis._seats, redis.assigned = [*before[:3], seat(4, 1 if moves else 0)], []
    for _ in range(3):
        await placement.turn(1)
    assert not redis.assigned
    assert not placement._bereaved


async def test_another_number_of_groups_than_was_asked_for_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    redis: Any = Quiet(published(seat(1, 0), seat(2, 1)), [seat(1, 0), seat(2, 1)])
    for asked in (None, 2):
        await ExpertPlacement(redis, redis, groups=2, asked=asked).turn(1)
    assert not caplog.records
    placement = ExpertPlacement(redis, redis, groups=4, asked=4)
    await placement.turn(1)
    await placement.turn(1)
    [said] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith("keeping the 2 shard groups in use although --expert-groups asks for 4")


async def test_what_something_else_is_about_to_end_is_out_of_the_next_table_until_that_thinks_better_of_it() -> None:
    seats, leaving = [seat(1, 0), seat(2, 1), seat(3, 0)], {3}
    redis: Any = Quiet(published(*seats), seats)
    placement = ExpertPlacement(
        redis, redis, groups=2, staying=lambda found: [replace(s, dismissed=s.number in leaving) for s in found]
    )
    assert await placement.turn(1)
    assert redis.listed == [1, 2]
    assert not await placement.turn(1), "once"
    leaving.clear()
    assert await placement.turn(1)
    assert redis.listed == [1, 2, 3]


class Changes(PlacementEvents):
    def __init__(self) -> None:
        self.seen: list[tuple[int, str]] = []

    def changed(self, shard: int, change: str) -> None:
        self.seen.append((shard, change))


async def test_seats_that_join_leave_or_die_count_for_their_group() -> None:
    first = [seat(1, 0), seat(2, 1), seat(3, 1)]
    redis: Any = Quiet(published(*first), first)
    changes = Changes()
    placement = ExpertPlacement(redis, redis, groups=2, events=changes, clock=lambda: 1.0)
    await placement.turn(1)
    assert changes.seen == [], "the table that a leader finds is no change"
    redis._seats = [seat(1, 0), seat(2, 1), seat(4, 0)]
    await placement.turn(1)
    assert changes.seen == [(1, "leave"), (0, "join")]
    redis._seats, redis.died = [seat(2, 1), seat(4, 0)], [1]
    await placement.turn(1)
    assert changes.seen[2:] == [(0, "death")]


@pytest.mark.parametrize(
    ("numbers", "load", "ratio"),
    [
        ([(1, 0), (2, 1)], {layer: [1.0] * 8 for layer in (1, 3)}, 1.0),
        ([(1, 0), (2, 1)], HOT, 1.8),
        ([(1, 0), (3, 0), (2, 1)], HOT, 18 / 11),
        ([(1, 0), (2, 1)], {layer: [0.0] * 8 for layer in (1, 3)}, None),
        ([(1, 0), (2, 1)], None, None),
    ],
    ids=["even", "one group is hot", "and has two seats", "no rows", "unknown"],
)
def test_the_imbalance_is_the_highest_load_per_seat_over_the_mean(numbers: Any, load: Any, ratio: float | None) -> None:
    found = imbalance(load, published(*(seat(number, group) for number, group in numbers)))
    assert found == (ratio if ratio is None else pytest.approx(ratio))
