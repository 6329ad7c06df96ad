"""Heavy work in threads: few pieces at a time, tenants in rotation, nothing left behind by clients that leave."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.errors import Overloaded, WorkLimited
from services.gateway.offload import Offload
from services.metrics import GatewayMetrics


class Workshop:
    """An :class:`Offload` whose pieces wait for ``go`` and note their order."""

    def __init__(self, **options: int) -> None:
        self.registry = CollectorRegistry()
        self.offload = Offload(GatewayMetrics(self.registry), **options)
        self.go = threading.Event()
        self.done: list[str] = []
        self.tasks: list[asyncio.Task[str]] = []

    def piece(self, name: str) -> Callable[[], str]:
        def work() -> str:
            assert self.go.wait(20)
            self.done.append(name)
            return name

        return work

    async def ask(self, tenant: str, name: str, **options: Any) -> asyncio.Task[str]:
        task = asyncio.create_task(self.offload.run(tenant, self.piece(name), **options))
        self.tasks.append(task)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return task

    async def finish(self) -> None:
        self.go.set()
        await asyncio.wait_for(asyncio.gather(*self.tasks, return_exceptions=True), 20)

    def waiting(self, lane: str = "holds_lock") -> float:
        value = self.registry.get_sample_value("expertmesh_gateway_offload_waiting", {"lane": lane})
        assert value is not None
        return value


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., Workshop]]:
    shops: list[Workshop] = []

    def begin(**options: int) -> Workshop:
        shops.append(Workshop(**options))
        return shops[-1]

    yield begin
    for shop in shops:
        await shop.finish()
        shop.offload.close()


async def test_results_and_errors_come_back(make):
    shop = make()
    assert await shop.offload.run("a", lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        await shop.offload.run("a", lambda: 1 / 0)
    assert await shop.offload.run("a", threading.current_thread) is not threading.main_thread()


async def test_tenants_take_turns_and_each_keeps_its_order(make):
    shop = make(holding=1)
    for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1"):
        await shop.ask(name[0], name)
    assert shop.waiting() == 6
    await shop.finish()
    assert shop.done == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]
    assert shop.waiting() == 0


async def test_so_many_at_a_time_and_both_kinds_at_once(make):
    shop = make(holding=1, releasing=2)
    for name in ("a1", "a2"):
        await shop.ask("a", name)
    for name in ("t1", "t2", "t3"):
        await shop.ask("a", name, releases_lock=True)
    assert (shop.waiting("holds_lock"), shop.waiting("releases_lock")) == (1, 1)
    await shop.finish()
    assert sorted(shop.done) == ["a1", "a2", "t1", "t2", "t3"]


async def test_long_pieces_wait_for_their_like_alone(make):
    shop = make(releasing=2, long=1)
    for name in ("l1", "l2"):
        await shop.ask("a", name, releases_lock=True, long=True)
    assert (shop.waiting("long"), shop.waiting("releases_lock")) == (1, 0)
    assert await shop.offload.run("b", lambda: "short", releases_lock=True) == "short"
    await shop.finish()
    assert shop.done == ["l1", "l2"]


async def test_a_tenant_with_too_much_waiting_is_refused_and_others_are_not(make):
    shop = make(waiting_of_one=2, waiting_of_all=4)
    for name in ("a0", "a1", "a2", "b1"):
        await shop.ask(name[0], name)
    with pytest.raises(WorkLimited) as refused:
        await shop.offload.run("a", shop.piece("a3"))
    assert refused.value.retry_after_s >= 1
    await shop.ask("b", "b2")
    with pytest.raises(Overloaded):
        await shop.offload.run("c", shop.piece("c1"))
    await shop.ask("a", "owed", owed=True)
    assert shop.waiting() == 5
    await shop.finish()
    assert sorted(shop.done) == ["a0", "a1", "a2", "b1", "b2", "owed"]


async def test_a_client_that_leaves_takes_its_waiting_piece_along(make):
    shop = make(waiting_of_one=2)
    await shop.ask("a", "a0")
    left = await shop.ask("a", "left")
    await shop.ask("b", "b1")
    left.cancel()
    await asyncio.sleep(0)
    assert shop.waiting() == 1
    await shop.finish()
    assert shop.done == ["a0", "b1"]


async def test_a_running_piece_keeps_its_place_when_its_client_leaves(make):
    shop = make(holding=1)
    running = await shop.ask("a", "a0")
    running.cancel()
    await asyncio.sleep(0.02)
    await shop.ask("b", "b1")
    assert shop.waiting() == 1, "the thread works for nobody, but it works"
    await shop.finish()
    assert shop.done == ["a0", "b1"]


@pytest.mark.parametrize("ended", ["before", "after"])
async def test_clients_that_leave_as_their_turn_comes_hand_the_place_on(make, ended):
    """The piece that runs ends before they were cancelled, or after that and before they noticed."""
    shop = make(holding=1)
    await shop.ask("a", "a0")
    gone = [await shop.ask("a", "gone"), await shop.ask("b", "gone")]
    last = await shop.ask("c", "c1")
    if ended == "before":
        shop.offload._holding._give_back()  # as the end of a piece does
    for task in gone:
        task.cancel()
    if ended == "after":
        shop.offload._holding._give_back()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert shop.waiting() == 0
    shop.go.set()
    assert await asyncio.wait_for(last, 20) == "c1"
    assert "gone" not in shop.done
