"""Whom a rank blames when the lock-step breaks (what was in its step, not what waits), and how it hears of leaving."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.attention.lockstep_engine import LockstepEngine
from services.errors import LockstepBroken
from services.fabric.lockstep.turns import LockstepTurns


def engine_that(step: Any, *, has_work: bool = True) -> LockstepEngine:
    steps = SimpleNamespace(turns=0, idle_turns=0, finish=lambda: None, begin=broken, unannounced=False)
    wake_up = SimpleNamespace(listen=lambda _: None, notify=lambda _: None, notified=lambda _: not has_work)
    engine: Any = SimpleNamespace(has_work=has_work, step=step, in_step=lambda: {"running": 2})
    lockstep: Any = SimpleNamespace(steps=steps, wake_up=wake_up)
    return LockstepEngine(engine, lockstep)


def broken(**_: bool) -> Any:
    raise LockstepBroken("A rank is gone.")


def test_what_was_computed_when_the_lock_step_broke_is_blamed() -> None:
    engine = engine_that(broken)
    with pytest.raises(LockstepBroken):
        engine.step()
    assert engine.blamed == {"running": 2}


def test_nothing_is_blamed_for_a_lock_step_that_broke_while_this_rank_had_no_work() -> None:
    engine = engine_that(broken, has_work=False)
    with pytest.raises(LockstepBroken):
        engine.step()
    assert engine.blamed == {}


def test_one_that_leaves_wakes_the_others_and_each_is_told_once() -> None:
    """Nobody has work: the leaver rings, all agree, and nothing follows."""
    agreed: list[list[int]] = []
    notified: list[int] = []

    def agree(values: Sequence[int]) -> list[int]:
        agreed.append(list(values))
        return [0, 1, 0]

    def engine() -> LockstepEngine:
        steps: LockstepTurns[Any] = LockstepTurns(
            cast("Any", None), agree, ranks=2, layers=[0], no_rows=cast("Any", None)
        )
        wake_up = SimpleNamespace(listen=lambda _: None, notify=notified.append, notified=lambda _: False)
        idle: Any = SimpleNamespace(has_work=False)
        lockstep: Any = SimpleNamespace(steps=steps, wake_up=wake_up)
        return LockstepEngine(idle, lockstep)

    leaver, other = engine(), engine()
    told: list[str] = []
    leaver.on_leave, other.on_leave = (lambda: told.append("leaver")), (lambda: told.append("other"))
    assert not leaver.has_work
    leaver.leave()
    assert leaver.has_work
    for each in (leaver, other, other):
        each.step()
    assert (agreed[0], agreed[1], told, notified) == ([0, 1, 0], [0, 0, 0], ["other"], [0])
    assert not leaver.has_work
