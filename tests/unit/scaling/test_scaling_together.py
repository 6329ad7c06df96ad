"""Replicas that hold attention and seats: whichever needs more of them."""

from __future__ import annotations

import pytest

from services.config import Settings
from services.scheduler.scaling import Bounds, Load, ScalingOptions, Signals, Target
from services.scheduler.scaling.policy import State, decide
from services.scheduler.scaling.together import together

ATTENTION, GATEWAY = Target("attention"), Target("gateway")
OPTIONS = ScalingOptions(bounds={role: Bounds(fewest=1, most=9) for role in ("experts", "attention", "gateway")})


def signals(attention: float, *groups: float, known: bool = True) -> Signals:
    loads = {Target("experts", number): Load(work=work, ready=2) for number, work in enumerate(groups)}
    loads[Target("experts", 0)] = Load(work=groups[0], ready=2, known=known)
    loads |= {ATTENTION: Load(work=attention, ready=1), GATEWAY: Load(work=0.1, ready=1)}
    return Signals(at=10.0, loads=loads, active=True)


@pytest.mark.parametrize(
    ("attention", "groups", "seats", "wanted"),
    [
        (2.4, (0.1, 0.1), 1.0, 3),  # 2.4 / 0.8
        (0.1, (2.1, 0.1), 1.0, 3),  # 2.1 / 0.7
        (0.1, (0.1, 2.1), 1.0, 3),
        (0.1, (2.1, 0.1), 3.0, 1),  # three seats of each group in a replica
        (0.1, (1.4, 0.1), 0.5, 4),  # a group is in every other replica
    ],
)
def test_whichever_needs_more_says_how_many(
    attention: float, groups: tuple[float, ...], seats: float, wanted: int
) -> None:
    joined = together(signals(attention, *groups), seats)
    assert set(joined.loads) == {ATTENTION, GATEWAY}
    state = decide(joined, State.starting(0.0, {}), OPTIONS)
    assert state.targets == {ATTENTION: wanted, GATEWAY: 1}


def test_what_is_not_known_of_a_group_is_not_known_of_the_replica() -> None:
    assert together(signals(1.0, 0.5, 0.5), 1.0).loads[ATTENTION].known
    assert not together(signals(1.0, 0.5, 0.5, known=False), 1.0).loads[ATTENTION].known


def test_seats_of_a_group_in_a_replica() -> None:
    seats = Settings(redis_url="redis://h", colocated_by="seats", ranks=4, expert_groups=2)
    assert ScalingOptions.of(seats).seats == 2
    lock_step = seats.model_copy(update={"colocated_by": "mesh"})
    assert ScalingOptions.of(lock_step).seats is None
