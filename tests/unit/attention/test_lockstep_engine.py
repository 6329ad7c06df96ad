"""Which requests a rank suspects when the lock-step breaks (those in its step, not those that wait), and how it learns
that another rank leaves."""

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


def test_requests_that_were_computed_when_the_lock_step_broke_are_suspects() -> None:
    engine = engine_that(broken)
    with pytest.raises(LockstepBroken):
        engine.step()
    assert engine.suspects == {"running": 2}


def test_nothing_is_suspected_where_the_lock_step_broke_while_this_rank_had_no_work() -> None:
    engine = engine_that(broken, has_work=False)
    with pytest.raises(LockstepBroken):
        engine.step()
    assert engine.suspects == {}


def test_a_rank_that_leaves_wakes_the_others_and_each_is_notified_once() -> None:
    """Nobody has work: the leaver signals, all agree, and nothing follows."""
    agreed: list[list[int]] = []
    signals: list[int] = []

    def agree(values: Sequence[int]) -> list[int]:
        agreed.append(list(values))
        return [0, 1, 0]

    def engine() -> LockstepEngine:
        steps: LockstepTurns[Any] = LockstepTurns(
            cast("Any", None), agree, ranks=2, layers=[0], no_rows=cast("Any", None)
        )
        wake_up = SimpleNamespace(listen=lambda _: None, notify=signals.append, notified=lambda _: False)
        idle: Any = SimpleNamespace(has_work=False)
        lockstep: Any = SimpleNamespace(steps=steps, wake_up=wake_up)
        return LockstepEngine(idle, lockstep)

    leaver, other = engine(), engine()
    leaving: list[str] = []
    leaver.on_leave, other.on_leave = (lambda: leaving.append("leaver")), (lambda: leaving.append("other"))
    assert not leaver.has_work
    leaver.leave()
    assert leaver.has_work
    for each in (leaver, other, other):
        each.step()
    assert (agreed[0], agreed[1], leaving, signals) == ([0, 1, 0], [0, 0, 0], ["other"], [0])
    assert not leaver.has_work
