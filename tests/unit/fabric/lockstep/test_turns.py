"""Ranks in lock-step: who steps when, what a failed pass costs, and the wake-up signal that ends the quiet. Ranks
are threads.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from testkit.waiting import LIMIT_S, until
from torch import Tensor
from torch.distributed import TCPStore

from services.errors import LockstepBroken
from services.fabric.lockstep.turns import LockstepTurns, StoreWakeUp, notify_all, wait_for_peers
from services.runtime import in_daemon

LAYERS = (1, 3)


@pytest.fixture
def store() -> TCPStore:
    return new_store()


def new_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Table:
    """Where ranks meet, to agree and to exchange the rows of a layer: a rank that is out of step is caught."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._barrier = threading.Barrier(ranks, timeout=10)
        self._brought: dict[int, Any] = {}
        self._lock = threading.Lock()

    def meet(self, rank: int, value: Any) -> list[Any]:
        try:
            with self._lock:
                self._brought[rank] = value
            self._barrier.wait()
            found = [self._brought[other] for other in range(self.ranks)]
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            raise LockstepBroken("A rank is gone.") from error
        return found

    def leave(self) -> None:
        self._barrier.abort()

    def agree(self, rank: int) -> Callable[[Sequence[int]], list[int]]:
        return lambda values: [sum(parts) for parts in zip(*self.meet(rank, values), strict=True)]


class MeetingLink:
    """Rows come back as they went; every rank has to dispatch the same layer, and combine it."""

    def __init__(self, table: Table, rank: int) -> None:
        self._table, self._rank = table, rank
        self.rows: list[int] = []

    def dispatch(self, layer: int, x_TD: Tensor, _ids: Tensor, _weights: Tensor) -> Tensor:
        assert set(self._table.meet(self._rank, layer)) == {layer}
        self.rows.append(len(x_TD))
        return x_TD

    def combine(self, handle: Tensor) -> Tensor:
        self._table.meet(self._rank, "combine")
        return handle

    def expert_rows(self) -> dict[int, list[int]]:
        return {}


def rows(count: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ones(count, 4), torch.zeros(count, 1, dtype=torch.int64), torch.ones(count, 1)


def steps_of(table: Table, rank: int) -> tuple[LockstepTurns[Tensor], MeetingLink]:
    link = MeetingLink(table, rank)
    agree = table.agree(rank)
    return LockstepTurns(link, agree, ranks=table.ranks, layers=LAYERS, no_rows=lambda: rows(0)), link


def together(*works: Callable[[], Any]) -> list[Any]:
    """Returns what each returned, or the LockstepBroken that it raised; raises what else one did."""

    def run(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except LockstepBroken as error:
            return error

    pool = ThreadPoolExecutor(len(works))
    try:
        return list(pool.map(run, works, timeout=20))
    finally:
        pool.shutdown(wait=False)


def one_pass(steps: LockstepTurns[Tensor], count: int, fail_at: int | None = None) -> None:
    for layer in LAYERS:
        if layer == fail_at:
            raise ValueError("between two layers")
        steps.combine(steps.dispatch(layer, *rows(count)))


def test_a_rank_without_work_takes_part_without_rows() -> None:
    table = Table(2)
    (busy, busy_link), (idle, idle_link) = steps_of(table, 0), steps_of(table, 1)

    def watch() -> None:
        assert idle.begin(work=False)
        idle.finish()

    together(lambda: one_pass(busy, 5), watch)
    assert (busy_link.rows, idle_link.rows) == ([5, 5], [0, 0])
    assert (busy.turns, idle.turns) == (1, 1)


@pytest.mark.parametrize("fail_at", LAYERS)
def test_a_pass_that_fails_is_finished_and_tried_again_in_a_turn_of_its_own(fail_at: int) -> None:
    table = Table(2)
    (failing, failing_link), (other, other_link) = steps_of(table, 0), steps_of(table, 1)

    def fail_then_again() -> None:
        with pytest.raises(ValueError, match="between"):
            one_pass(failing, 3, fail_at)
        one_pass(failing, 2)

    def steady() -> None:
        if fail_at != LAYERS[0]:  # a pass that failed before its first dispatch was no turn
            one_pass(other, 7)
        one_pass(other, 8)

    together(fail_then_again, steady)
    assert failing_link.rows == ([2, 2] if fail_at == LAYERS[0] else [3, 0, 2, 2])
    assert failing.turns == other.turns
    assert len(other_link.rows) == len(failing_link.rows)


def test_a_pass_that_fails_while_rows_are_away() -> None:
    table = Table(2)
    (failing, link), (other, _) = steps_of(table, 0), steps_of(table, 1)

    def abandon() -> None:
        failing.dispatch(LAYERS[0], *rows(3))
        failing.finish()

    together(abandon, lambda: one_pass(other, 1))
    assert link.rows == [3, 0]


def test_a_broken_lock_step_stays_broken() -> None:
    table = Table(2)
    steps, _ = steps_of(table, 0)
    table.leave()
    for _ in range(2):
        with pytest.raises(LockstepBroken):
            steps.dispatch(LAYERS[0], *rows(1))


def test_those_that_drained_stay_until_all_have(store: TCPStore) -> None:
    table = Table(3)
    ranks = [steps_of(table, rank)[0] for rank in range(3)]
    wake_ups = [wake_up_at(store, lambda: None) for _ in ranks]

    def drains_longer() -> None:
        assert not ranks[2].begin(work=False), "it waits for something, and the others for it"
        wake_ups[2].notify(ranks[2].idle_turns)
        for _ in range(3):
            one_pass(ranks[2], 4)
        wait_for_peers(ranks[2], wake_ups[2], 10)

    began = time.monotonic()
    together(
        lambda: wait_for_peers(ranks[0], wake_ups[0], 10),
        lambda: wait_for_peers(ranks[1], wake_ups[1], 10),
        drains_longer,
    )
    assert [steps.turns for steps in ranks] == [3, 3, 3]
    assert all(steps.all_drained for steps in ranks)
    assert time.monotonic() - began < 9


def test_all_hear_of_one_that_leaves_with_the_next_step() -> None:
    table = Table(2)
    (leaver, _), (other, _) = steps_of(table, 0), steps_of(table, 1)
    together(lambda: one_pass(leaver, 1), lambda: one_pass(other, 1))
    assert (leaver.unannounced, other.some_leave) == (False, False)
    leaver.leaving = True
    assert leaver.unannounced, "and nobody knows it yet"
    together(lambda: one_pass(leaver, 1), lambda: one_pass(other, 1))
    assert (leaver.unannounced, other.some_leave, other.leaving) == (False, True, False)
    assert not other.all_drained, "it has rows still"


def store_client(store: TCPStore) -> TCPStore:
    return TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)


def wake_up_at(store: TCPStore, on_notify: Callable[[], None], *, keeper: bool = False) -> StoreWakeUp:
    return StoreWakeUp(store_client(store), store_client(store), keeper=keeper, on_notify=on_notify)


def wake_ups_of(count: int, store: TCPStore) -> tuple[list[StoreWakeUp], list[threading.Event]]:
    events = [threading.Event() for _ in range(count)]
    return [wake_up_at(store, event.set, keeper=rank == 0) for rank, event in enumerate(events)], events


def test_one_signal_wakes_all_also_those_that_listen_later(store: TCPStore) -> None:
    wake_ups, events = wake_ups_of(3, store)
    for period in range(4):
        wake_ups[0].listen(period)
        wake_ups[1].listen(period)
        assert not wake_ups[0].notified(period)
        wake_ups[1].notify(period)
        wake_ups[2].listen(period)
        for wake_up, event in zip(wake_ups, events, strict=True):
            assert event.wait(10)
            assert wake_up.notified(period)
            event.clear()


def test_one_that_comes_again_wakes_all(store: TCPStore) -> None:
    wake_ups, events = wake_ups_of(2, store)
    for wake_up in wake_ups:
        wake_up.listen(5)
    notify_all(store_client(store))
    assert all(event.wait(10) for event in events)


def test_a_store_that_is_gone_wakes_all() -> None:
    store = new_store()
    wake_ups, events = wake_ups_of(2, store)
    for wake_up in wake_ups:
        wake_up.listen(0)
    time.sleep(0.2)
    del store
    assert all(event.wait(10) for event in events)


@pytest.mark.parametrize("state", ["idle", "waiting", "notified", "without a store"])
async def test_a_wake_up_that_is_closed_leaves_no_thread(state: str) -> None:
    store = new_store()
    before, notified = set(threading.enumerate()), threading.Event()
    wake_up = wake_up_at(store, lambda: (notified.set(), time.sleep(0.2)), keeper=True)
    for period in {"idle": (), "notified": (0,)}.get(state, (0, 1)):
        wake_up.listen(period)
    if state != "idle":
        wake_up.notify(0)
        assert notified.wait(10)
    if state == "without a store":
        del store
        until(lambda: silent(wake_up), "notifying fails")  # what is sent first gets lost
    (thread,) = set(threading.enumerate()) - before
    async with asyncio.timeout(LIMIT_S):
        await in_daemon("close", wake_up.close)
    assert not thread.is_alive()


def silent(wake_up: StoreWakeUp) -> bool:
    try:
        wake_up.notify(0)
    except LockstepBroken:
        return True
    return False
