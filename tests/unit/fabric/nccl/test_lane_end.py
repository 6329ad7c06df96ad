"""A lane that was ended: nobody waits for its groups, however long they take, and nothing is launched on it."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from testkit.fabric.gloo_groups import GlooGroups
from testkit.waiting import until
from torch import Tensor

from services.errors import SeatLost
from services.fabric.nccl.lane import ATTENTION, Lane, Launches
from services.fabric.nccl.pair_store import PairStore
from services.fabric.nccl.process_groups import Broken

LONG_S = 20.0


class Stuck:
    """A transfer whose peer is dead: it ends only when the pair is broken, and then as if it were through."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def finish(self, until: float, broken: Broken) -> None:
        while not broken():
            assert time.monotonic() < until
            time.sleep(0.001)


class Groups(GlooGroups):
    """As on a device: no group can be freed before each of them was aborted, and ``free`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()
        self.aborting = threading.Barrier(2)
        self.together = threading.Semaphore(0)
        self.launched = 0

    def make(self, store: PairStore, rank: int, host: str) -> object:  # noqa: ARG002
        return object()

    def send(self, group: object, rank: int, rows: Tensor) -> Stuck:  # noqa: ARG002
        assert group is not None
        self.launched += 1
        return Stuck(rows)

    receive = send

    def abort(self, group: object) -> None:
        assert group is not None
        self.aborting.wait(LONG_S)
        self.together.release()
        self.free.wait(LONG_S)


@pytest.fixture
def groups() -> Iterator[Groups]:
    made = Groups()
    yield made
    made.free.set()


def lane_of(groups: Groups, launches: Launches | None = None) -> Lane:
    stores = PairStore("forth/", lambda *_: None, 1), PairStore("back/", lambda *_: None, 1)
    return Lane(groups, launches or Launches(), stores, ATTENTION, "127.0.0.1")


def alive() -> bool:
    return False


def deadline_in() -> float:
    return time.monotonic() + LONG_S


def test_an_aborted_lane_refuses_to_send_and_to_receive(groups: Groups) -> None:
    lane = lane_of(groups)
    shipment = lane.pack(torch.ones(2))
    lane.abort()
    lane.abort()
    for use in (
        lambda: lane.post(shipment, alive),
        lambda: lane.post(shipment, alive, first=True),
        lambda: lane.receive(torch.empty(2), deadline_in(), alive),
    ):
        with pytest.raises(SeatLost, match="was closed"):
            use()
    assert groups.launched == 0


def test_a_transfer_that_ends_because_of_the_abort_does_not_count_as_through(groups: Groups) -> None:
    lane, into = lane_of(groups), torch.empty(2)
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(lane.receive, into, deadline_in(), alive)
        lane.post(lane.pack(torch.ones(2)), alive)
        lane.abort()
        with pytest.raises(SeatLost, match="was closed"):
            lane.finish(deadline_in(), alive)
        with pytest.raises(SeatLost, match=r"^The lane was closed\.$"):
            receiving.result(LONG_S)


def test_a_process_that_exits_can_wait_for_lanes_that_end(groups: Groups) -> None:
    launches = Launches()
    assert launches.wait_ended(0)
    lane_of(groups, launches).abort()
    assert not launches.wait_ended(0.05)
    groups.free.set()
    assert launches.wait_ended(LONG_S)


def test_what_waits_for_its_turn_to_launch_is_refused(groups: Groups) -> None:
    launches = Launches()
    lane = lane_of(groups, launches)
    with ThreadPoolExecutor(1) as pool:
        with launches.turn:
            posting = pool.submit(lane.post, lane.pack(torch.ones(2)), alive)
            time.sleep(0.05)
            lane.abort()
        with pytest.raises(SeatLost):
            posting.result(LONG_S)
    assert groups.launched == 0


def test_abort_waits_for_no_group_and_aborts_both_at_once(groups: Groups) -> None:
    """One after the other would publish: the first is not free before the kernels of the second end."""
    lane = lane_of(groups)
    began = time.monotonic()
    lane.abort()
    assert time.monotonic() - began < LONG_S / 2
    assert all(groups.together.acquire(timeout=LONG_S / 2) for _ in range(2))
    ends = [thread for thread in threading.enumerate() if thread.name == "end of a lane"]
    assert ends
    assert all(thread.daemon for thread in ends)


def test_memory_under_way_is_kept_until_the_groups_are_gone(groups: Groups) -> None:
    lane, rows = lane_of(groups), torch.ones(2)
    kept = weakref.ref(rows)
    lane.post(lane.pack(rows), alive)
    lane.abort()
    assert groups.together.acquire(timeout=LONG_S)
    del lane, rows
    gc.collect()
    assert kept() is not None
    groups.free.set()

    def freed() -> bool:
        gc.collect()
        return kept() is None

    until(freed)
