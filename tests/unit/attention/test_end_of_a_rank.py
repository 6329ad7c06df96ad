"""How a rank in lock-step ends: its threads end with it, and a group that does not end keeps nobody."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from testkit.waiting import until

from services.attention import lockstep_service
from services.attention.lockstep_service import LockstepService
from services.config import Settings
from services.runtime import left_behind

Serve = Callable[[], Awaitable[None]]


async def ends() -> None:
    pass


async def crashes() -> None:
    raise ZeroDivisionError


def rank(monkeypatch: pytest.MonkeyPatch, close: Callable[[], object], serve: Serve) -> Awaitable[None]:
    """A rank's whole life, with ``serve`` in place of serving."""
    built: Any = SimpleNamespace(engine=SimpleNamespace(rank=SimpleNamespace(close=close)), remote=None)
    monkeypatch.setattr(LockstepService, "_build", lambda _: built)
    monkeypatch.setattr(LockstepService, "_serve", lambda *_: serve())
    redis: Any = None
    return LockstepService(Settings(model="m"), redis, CollectorRegistry()).run("page", asyncio.Event())


@pytest.mark.parametrize("serve", [ends, crashes])
async def test_the_lock_step_ends_with_its_rank(monkeypatch: pytest.MonkeyPatch, serve: Serve) -> None:
    closed = threading.Event()
    life = rank(monkeypatch, closed.set, serve)
    if serve is crashes:
        with pytest.raises(ZeroDivisionError):
            await life
    else:
        await life
    assert closed.is_set()


async def test_a_lock_step_that_does_not_end_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lockstep_service, "END_S", 0.1)
    go = threading.Event()
    await rank(monkeypatch, lambda: go.wait(20), ends)
    assert left_behind()
    assert "lock-step threads did not end" in caplog.text
    go.set()
    until(lambda: not left_behind(), "they end")
