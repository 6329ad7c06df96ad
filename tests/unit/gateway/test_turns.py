"""Requests that come at once begin in turns of the loop, tenants in rotation."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import pairwise

import pytest
from testkit.processes.background import ended

from services.gateway.middleware import Turns


class Begun:
    """Who began in which turn of the loop."""

    def __init__(self, at_once: int) -> None:
        self.waiting: list[float] = []
        self.order: list[str] = []
        self.turns = Turns(self.waiting.append, at_once=at_once)

    async def one(self, tenant: str) -> None:
        await self.turns.take(tenant)
        self.order.append(tenant)

    def start(self, tenants: Iterable[str]) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self.one(tenant)) for tenant in tenants]


async def test_a_few_begin_in_a_turn_of_the_loop_and_the_next_ones_in_the_next() -> None:
    begun = Begun(at_once=3)
    tasks, counts = begun.start("a" * 10), [0]
    while len(begun.order) < 10:
        await asyncio.sleep(0)
        counts.append(len(begun.order))
    assert max(later - earlier for earlier, later in pairwise(counts)) == 3
    assert max(begun.waiting) == 7
    assert begun.waiting[-1] == 0
    await asyncio.gather(*tasks)


async def test_a_tenant_waits_for_one_request_of_each_other_tenant() -> None:
    begun = Begun(at_once=1)
    tasks = begun.start(["a"] * 50 + ["b", "c", "b"])
    await asyncio.gather(*tasks)
    assert begun.order[:7] == ["a", "a", "b", "c", "a", "b", "a"]
    assert begun.order.count("a") == 50


async def test_who_comes_when_nobody_waits_begins_at_once() -> None:
    begun = Begun(at_once=2)
    for _ in range(5):
        await begun.one("a")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert begun.waiting == []


@pytest.mark.parametrize("left", [0, 3, 9])
async def test_those_that_leave_cost_nobody_a_turn(left: int) -> None:
    begun = Begun(at_once=1)
    tasks = begun.start("a" * 10)
    await asyncio.sleep(0)
    staying = len(tasks) - left
    await ended(tasks[staying:])
    await asyncio.gather(*tasks[:staying])
    await begun.one("b")
    assert begun.order.count("b") == 1
    assert begun.waiting[-1] == 0
