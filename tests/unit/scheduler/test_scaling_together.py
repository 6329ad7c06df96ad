"""Replicas that hold attention and seats: whichever needs more of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.config import Settings
from services.scheduler.scaling import Bounds, Load, ScalingOptions, Signals, Target
from services.scheduler.scaling.policy import State, decide
from services.scheduler.scaling.together import together

ATTENTION, GATEWAY = Target("attention"), Target("gateway")
OPTIONS = ScalingOptions(bounds={role: Bounds(minimum=1, maximum=9) for role in ("experts", "attention", "gateway")})


def signals(attention: float, *groups: float, known: bool = True) -> Signals:
    loads = {Target("experts", number): Load(work=work, ready=2) for number, work in enumerate(groups)}
    loads[Target("experts", 0)] = Load(work=groups[0], ready=2, known=known)
    loads |= {ATTENTION: Load(work=attention, ready=1), GATEWAY: Load(work=0.1, ready=1)}
    return Signals(at=10.0, loads=loads, active=True)


@pytest.mark.parametrize(
    ("attention", "work", "ranks", "wanted"),
    [
        (2.4, (0.1, 0.1), 2, 3),  # 2.4 / 0.8
        (0.1, (2.1, 0.1), 2, 3),  # 2.1 / 0.7
        (0.1, (0.1, 2.1), 2, 3),
        (0.1, (2.1, 2.1), 6, 1),  # three seats of each group in a replica
        (0.1, (2.1, 0.1), 3, 2),  # two seats of the first group
        (0.1, (0.1, 2.1), 3, 3),  # one of the second
        (0.1, (1.4, 0.1), 1, 4),  # a group is in every other replica
    ],
)
def test_whichever_needs_more_says_how_many(
    attention: float, work: tuple[float, float], ranks: int, wanted: int
) -> None:
    options = replace(OPTIONS, ranks=ranks, groups=len(work))
    joined = together(signals(attention, *work), options.seats_of)
    assert set(joined.loads) == {ATTENTION, GATEWAY}
    state = decide(joined, State.starting(0.0, {}), options)
    assert state.targets == {ATTENTION: wanted, GATEWAY: 1}


def test_what_is_not_known_of_a_group_is_not_known_of_the_replica() -> None:
    assert together(signals(1.0, 0.5, 0.5), lambda _: 1.0).loads[ATTENTION].known
    assert not together(signals(1.0, 0.5, 0.5, known=False), lambda _: 1.0).loads[ATTENTION].known


def test_seats_of_a_group_in_a_replica() -> None:
    settings = Settings(redis_url="redis://h", layout="colocated", workers=5, expert_groups=3)
    assert [ScalingOptions.of(settings).seats_of(group) for group in range(3)] == [2, 2, 1]
    lock_step = settings.model_copy(update={"layout": "lockstep"})
    assert ScalingOptions.of(lock_step).groups is None
