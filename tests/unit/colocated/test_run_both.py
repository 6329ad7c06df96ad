"""An attention worker with a seat of its own: who ends first, and what ends both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from testkit.waiting import LIMIT_S

from services.colocated.role import load_kernels_early, run_both


class Role:
    """Runs until ``stop`` is set, or ``until`` returns; notes what happened."""

    def __init__(self, name: str, notes: list[str], until: Callable[[], Any] | None = None) -> None:
        self._name, self._notes, self._until = name, notes, until

    def missing(self) -> list[str]:
        return []

    async def run(self, metrics_url: str, stop: asyncio.Event) -> None:
        self._notes.append(f"{self._name} at {metrics_url}")
        try:
            await (self._until() if self._until else stop.wait())
        except BaseException:
            self._notes.append(f"{self._name} broken off")
            raise
        self._notes.append(f"{self._name} ended")


async def run(attention: Role, experts: Role, stop: asyncio.Event) -> None:
    async with asyncio.timeout(LIMIT_S):
        await run_both(attention, experts, "page", stop)


async def test_the_seat_leaves_when_attention_has_drained() -> None:
    notes: list[str] = []
    stop = asyncio.Event()

    async def drains() -> None:
        await stop.wait()
        await asyncio.sleep(0.05)
        assert "experts ended" not in notes

    running = asyncio.create_task(run(Role("attention", notes, drains), Role("experts", notes), stop))
    await asyncio.sleep(0.05)
    stop.set()
    await running
    assert notes == ["experts at page", "attention at page", "attention ended", "experts ended"]


async def test_a_seat_that_the_scheduler_wants_gone_leaves_attention_here() -> None:
    notes: list[str] = []
    stop = asyncio.Event()
    seat = Role("experts", notes, lambda: asyncio.sleep(0))
    running = asyncio.create_task(run(Role("attention", notes), seat, stop))
    await asyncio.sleep(0.05)
    assert notes[-1] == "experts ended"
    assert not running.done()
    stop.set()
    await running
    assert notes[-1] == "attention ended"


@pytest.mark.parametrize("broken", ["attention", "experts"])
async def test_an_error_of_one_ends_both(broken: str) -> None:
    notes: list[str] = []

    async def fails() -> None:
        await asyncio.sleep(0.02)
        raise RuntimeError("out of memory")

    roles = {name: Role(name, notes, fails if name == broken else None) for name in ("attention", "experts")}
    with pytest.raises(RuntimeError, match="out of memory"):
        await run(roles["attention"], roles["experts"], asyncio.Event())
    assert "attention broken off" in notes
    assert ("experts ended" if broken == "attention" else "experts broken off") in notes, "a seat in order leaves so"


async def test_an_error_while_draining_does_not_leave_the_seat_behind() -> None:
    notes: list[str] = []
    stop = asyncio.Event()

    async def fails() -> None:
        await stop.wait()
        raise RuntimeError("not deregistered")

    stop.set()
    with pytest.raises(RuntimeError, match="not deregistered"):
        await run(Role("attention", notes, fails), Role("experts", notes), stop)
    assert notes[-1] == "experts ended"


async def test_the_error_of_a_seat_that_fails_as_it_leaves_is_raised() -> None:
    stop = asyncio.Event()
    stop.set()

    class Fails(Role):
        async def run(self, metrics_url: str, stop: asyncio.Event) -> None:
            await super().run(metrics_url, stop)
            raise RuntimeError("weights gone")

    with pytest.raises(RuntimeError, match="weights gone"):
        await run(Role("attention", []), Fails("experts", []), stop)


@pytest.mark.parametrize("said", [{}, {"CUDA_MODULE_LOADING": "LAZY"}])
def test_kernels_are_loaded_with_the_context_unless_the_operator_says_otherwise(said: dict[str, str]) -> None:
    environment = dict(said)
    load_kernels_early(environment)
    assert environment == {"CUDA_MODULE_LOADING": "EAGER"} | said
