"""Another cut of the groups under load: half of the seats go ahead, one table changes, the others follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from services.errors import ConfigError
from services.messages import ExpertInfo, SeatReport
from services.placement import Hysteresis, Plan
from services.queue.seats import SeatState
from services.routing import RoutingTable, ShardGroup, even_groups
from services.scheduler.repartition import TIMEOUT_WAITS, Groups, Repartitioner, Step, next_step
from services.scheduler.room import rooms_of

OLD = even_groups([0], 8, 3)
HOLD = {"wait_s": 10.0, "gain": 0.1}


def cut(*groups: tuple[int, ...]) -> Groups:
    return tuple(ShardGroup(number=number, experts={0: ids}) for number, ids in enumerate(groups))


NEW = cut((0, 2), (1, 3, 4), (5, 6, 7))
"""Groups 0 and 1 exchange experts, group 2 stays as it is."""


def seat(number: int, group: ShardGroup, status: Any = "ready") -> SeatState:
    facts: dict[str, Any] = {"fingerprint": "f", "host": "h", "port": 1, "memory_bytes": 1, "pid": 1, "version": "v"}
    info = ExpertInfo(id=f"w{number}", num_experts=8, layers=(0,), **facts)
    digest = group.digest
    report = SeatReport(status=status, group=group.number, digest=digest if status == "ready" else "")
    return SeatState(number=number, info=info, status=status, report=report, dismissed=False, assigned=digest)


def seats(*replicas: int) -> list[SeatState]:
    """Seats by the number of them in each group of the old cut."""
    held = [group for group, count in zip(OLD, replicas, strict=True) for _ in range(count)]
    return [seat(number, group) for number, group in enumerate(held)]


def test_old_is_what_the_new_cut_changes() -> None:
    assert cut((0, 1), (2, 3, 4), (5, 6, 7)) == OLD


def roomy(limit: int) -> Callable[[SeatState], SeatState]:
    return lambda state: replace(state, info=msgspec.structs.replace(state.info, max_experts=limit))


def step(here: list[SeatState]) -> Step:
    found = next_step(here, OLD, NEW)
    assert found is not None
    return found


def ahead(here: list[SeatState]) -> list[tuple[int, ShardGroup]]:
    return [(found.number, group) for found, group in step(here).assign]


def test_seats_without_room_for_what_their_group_becomes_keep_the_cut() -> None:
    here = seats(2, 2, 1)
    assert next_step([*here[:2], *map(roomy(3), here[2:])], OLD, NEW) is not None
    assert next_step([*here[:3], roomy(2)(here[3]), here[4]], OLD, NEW) is None, "a follower of group 1, which gets 3"
    assert next_step([*here[:4], roomy(1)(here[4])], OLD, NEW) is not None, "group 2 stays as it is"


def test_half_of_the_seats_of_each_group_that_changes_go_ahead() -> None:
    here = seats(2, 5, 1)
    assert ahead(here) == [(1, NEW[0]), (6, NEW[1]), (5, NEW[1])]
    assert (step(here).layout, step(here).ahead) == (OLD, {1, 5, 6})


def test_the_cut_changes_once_all_that_went_ahead_are_ready() -> None:
    here = seats(2, 2, 1)
    here[1], here[3] = seat(1, NEW[0]), seat(3, NEW[1], "loading")
    assert (step(here).layout, step(here).ahead, step(here).assign) == (OLD, {1, 3}, ())
    here[3] = seat(3, NEW[1])
    assert (step(here).layout, step(here).ahead) == (NEW, frozenset())


def test_one_that_went_ahead_and_died_is_followed_by_another_if_there_is_one() -> None:
    here = seats(3, 2, 1)
    here[4] = seat(4, NEW[1], "loading")
    assert [number for number, _ in ahead(here)] == [2]


def test_a_group_of_one_seat_borrows_from_a_larger_one() -> None:
    assert ahead(seats(4, 1, 1)) == [(3, NEW[0]), (2, NEW[0]), (1, NEW[1])]
    assert ahead(seats(2, 1, 2)) == [(1, NEW[0]), (4, NEW[1])]


@pytest.mark.parametrize("replicas", [(1, 1, 1), (2, 1, 1)])
def test_where_nobody_can_be_spared_the_groups_stay(replicas: tuple[int, ...]) -> None:
    assert next_step(seats(*replicas), OLD, NEW) is None


def test_a_group_that_lost_the_seats_that_stayed_gives_the_change_up() -> None:
    here = seats(2, 2, 1)
    here[1], here[3] = seat(1, NEW[0], "loading"), seat(3, NEW[1], "loading")
    assert next_step(here[1:], OLD, NEW) is None


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


TABLE = RoutingTable(epoch=1, fingerprint="f", num_experts=8, groups=OLD)
CUT = RoutingTable(epoch=2, fingerprint="f", num_experts=8, groups=NEW)
LOAD = {0: [1.0] * 8}


def planning(plan: Plan | None) -> tuple[Repartitioner, list[int], Clock]:
    """One whose plan for TABLE is made (None: cannot be made), and the limits that were asked for."""
    asked: list[int] = []
    clock = Clock()

    def make(*_: object, limit: int, **__: object) -> Plan:
        asked.append(limit)
        if plan is None:
            raise ConfigError("No such groups.")
        return plan

    repartitioner = Repartitioner(Hysteresis(**HOLD), clock=clock, plan=make)
    repartitioner.follow(TABLE, None)
    assert asked == [], "there is no load yet"
    repartitioner.follow(TABLE, LOAD)
    planned(repartitioner)
    return repartitioner, asked, clock


def planned(repartitioner: Repartitioner) -> None:
    """Wait for the thread."""
    assert repartitioner._planned is not None
    repartitioner._planned[1].exception(20)


BETTER = Plan(table=CUT, before=2, after=1)
OTHER = RoutingTable(epoch=2, fingerprint="f", num_experts=8, groups=cut((0, 1, 2), (3, 4), (5, 6, 7)))


def test_a_better_cut_is_the_target_until_it_stands_and_is_asked_for_once_in_a_while() -> None:
    repartitioner, asked, clock = planning(BETTER)
    repartitioner.follow(TABLE, LOAD)
    assert repartitioner.target == NEW
    assert asked == [4], "a group may be a quarter larger than an even one"
    repartitioner.follow(CUT, LOAD)
    assert repartitioner.target is None
    repartitioner.follow(TABLE, LOAD)
    assert len(asked) == 1
    clock.now += 10
    repartitioner.follow(TABLE, LOAD)
    planned(repartitioner)
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("plan", "now"),
    [(None, TABLE), (Plan(table=TABLE, before=1, after=1), TABLE), (BETTER, OTHER)],
    ids=["one that cannot be", "the groups that there are", "one for groups that stand no more"],
)
def test_a_plan_of_no_use_is_dropped(plan: Plan | None, now: RoutingTable) -> None:
    repartitioner, _, _ = planning(plan)
    repartitioner.follow(now, LOAD)
    assert repartitioner.target is None


def test_a_change_that_is_never_ready_is_late_and_the_next_one_waits() -> None:
    repartitioner, _, clock = planning(BETTER)
    repartitioner.follow(TABLE, LOAD)
    clock.now += TIMEOUT_WAITS * HOLD["wait_s"]
    assert not repartitioner.late
    clock.now += 1
    assert repartitioner.late
    repartitioner.give_up()
    assert not repartitioner.late
    clock.now += TIMEOUT_WAITS * HOLD["wait_s"] - 1
    repartitioner.follow(TABLE, LOAD)
    assert repartitioner._planned is None
    clock.now += 1
    repartitioner.follow(TABLE, LOAD)
    assert repartitioner._planned is not None


def test_one_small_seat_keeps_no_others_from_being_repartitioned() -> None:
    """If each group had to fit it, three groups of 2 would not hold 8 experts."""
    small = roomy(2)
    here = [small(seat(0, OLD[0])), *(seat(number, group) for number, group in ((1, OLD[0]), (2, OLD[1])))]
    here += [seat(number, group) for number, group in ((3, OLD[1]), (4, OLD[2]), (5, OLD[2]))]
    rooms = rooms_of([*here, small(seat(6, OLD[0])), roomy(3)(replace(here[4], assigned=None))], OLD)
    assert rooms == {0: 2}
    load = {0: [1.0, 1.0, 30.0, 30.0, 30.0, 1.0, 1.0, 1.0]}
    table = RoutingTable(
        epoch=1, fingerprint="f", num_experts=8, groups=OLD,
        seats=tuple(each.seat(each.report.group or 0) for each in here),
    )  # fmt: skip
    repartitioner = Repartitioner(Hysteresis(**HOLD), clock=Clock())
    repartitioner.follow(table, load, rooms)
    planned(repartitioner)
    repartitioner.follow(table, load, rooms)
    assert repartitioner.target is not None
    heaviest = max(sum(load[0][expert] for expert in group.experts[0]) for group in repartitioner.target)
    assert heaviest < 60, "group 1 had the three hottest"
    assert [group.size for group in repartitioner.target if group.number == 0] == [2]
    assert next_step(here, OLD, repartitioner.target) is not None, "every seat has room for what its group becomes"
