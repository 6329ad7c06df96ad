"""Whom a rank blames when the mesh breaks: what was in its step, not what waits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from services.attention.colocated import LockStepEngine
from services.errors import MeshBroken


def engine_that(step: Any, *, has_work: bool = True) -> LockStepEngine:
    steps = SimpleNamespace(turns=0, idle_turns=0, finish=lambda: None, begin=broken)
    bell = SimpleNamespace(listen=lambda _: None, ring=lambda _: None, heard=lambda _: not has_work)
    engine: Any = SimpleNamespace(has_work=has_work, step=step, in_step=lambda: {"running": 2})
    mesh: Any = SimpleNamespace(steps=steps, bell=bell)
    return LockStepEngine(engine, mesh)


def broken(**_: bool) -> Any:
    raise MeshBroken("A rank is gone.")


def test_what_was_computed_when_the_mesh_broke_is_blamed() -> None:
    engine = engine_that(broken)
    with pytest.raises(MeshBroken):
        engine.step()
    assert engine.blamed == {"running": 2}


def test_nothing_is_blamed_for_a_mesh_that_broke_while_this_rank_had_no_work() -> None:
    engine = engine_that(broken, has_work=False)
    with pytest.raises(MeshBroken):
        engine.step()
    assert engine.blamed == {}
