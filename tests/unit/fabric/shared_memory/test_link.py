"""The link through shared memory, over memory of the host: what a GPU's kernels do, threads do here.

Not shown here: CUDA's memory and graphs, and the order in which GPUs see rows and flags; see ``perf/fabric/exchange``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from testkit.fabric.shared_memory import shared_memory_link, shared_memory_server
from testkit.fabric.tcp import scaled, seat_of, serve, table_of
from testkit.gpu.recorded_graph import record
from testkit.waiting import until
from torch import Tensor

from services.errors import ConfigError, FabricError
from services.experts.serving import TcpServing
from services.fabric.shared_memory.host_memory import HostMemory
from services.fabric.shared_memory.link import SharedMemoryLink
from services.fabric.shared_memory.open_memory import memory_for
from services.fabric.shared_memory.peers import SharedSeat
from services.fabric.shared_memory.server import WAIT_S, SharedMemoryServer
from services.fabric.tcp.server import ExpertServer
from services.routing import ShardGroup, even_groups

HIDDEN, EXPERTS, SLOTS, ROWS = 4, 8, 2, 8
GROUPS = even_groups([0], EXPERTS, 1)
LONG_S = 30.0


@dataclass
class Seat:
    """``held``: while it is set, the experts do not answer. ``colocated``: attention computes on their device, too.
    ``wait_s``: how long a step that has begun waits for its rows."""

    number: int
    group: ShardGroup = GROUPS[0]
    held: threading.Event = field(default_factory=threading.Event)
    freed: threading.Event = field(default_factory=threading.Event)
    colocated: bool = False
    wait_s: float = WAIT_S
    host: SharedMemoryServer = field(init=False)
    server: ExpertServer = field(init=False)

    def __post_init__(self) -> None:
        options = {"colocated": self.colocated, "wait_s": self.wait_s}
        self.host = shared_memory_server(self._compute, self.group.experts, HIDDEN, torch.float32, EXPERTS, **options)
        self.server = serve(scaled, seat=self.number, memory=self.host, experts=self.group.experts)

    def _compute(self, layer: int, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        if self.held.is_set():
            self.freed.wait(LONG_S)
        return scaled(layer, x_TD, ids_TK, weights_TK)


@contextmanager
def linked(seats: list[Seat], *, groups: tuple[ShardGroup, ...] = GROUPS, **options: Any) -> Iterator[SharedMemoryLink]:
    """Once all seats share memory, or none where the link is of another ``node``."""
    table = table_of(*(seat_of(seat.server, seat.number, seat.group.number) for seat in seats), groups=groups)
    with ExitStack() as stack:
        for seat in seats:
            stack.callback(seat.server.close)
        options = {"rows": ROWS, "slots": SLOTS, "quarantine_s": LONG_S, "unavailable_s": LONG_S} | options
        link = stack.enter_context(shared_memory_link(table, seats=0 if options.get("node") else len(seats), **options))
        for seat in seats:
            stack.callback(seat.freed.set)
        assert link.wait_ready(LONG_S)
        yield link


def step(link: SharedMemoryLink, rows: int, *, known: bool = True) -> tuple[Tensor, Tensor, int]:
    """What came back, what should, and how often the step ran."""
    x_TD = torch.arange(rows * HIDDEN, dtype=torch.float32).view(rows, HIDDEN)
    ids_TK = torch.tensor([[1, 6]]).expand(rows, SLOTS)
    weights_TK = torch.tensor([[0.5, 2.0]]).expand(rows, SLOTS).contiguous()
    for tries in range(1, 5):
        link.begin_step(tries, [rows] if known else ())
        y_TD = link.combine(link.dispatch(0, x_TD, ids_TK, weights_TK))
        if link.finish_step():
            return y_TD, x_TD * (0.5 * 2 + 2.0 * 7), tries
    raise AssertionError("the step never finished")


def test_rows_of_small_steps_go_through_memory_and_are_counted() -> None:
    seat = Seat(0)
    with linked([seat]) as link:
        for rows in (1, 5, 8):
            found, expected, tries = step(link, rows)
            assert torch.equal(found, expected)
            assert (tries, link.shared()) == (1, {0: 0})
        serving = TcpServing(GROUPS[0], seat.server, seat.host, SLOTS)
        assert seat.server.counts.calls == 0
        assert serving.rows() == {0: (0, 14, 0, 0, 0, 0, 14, 0)}
        assert serving.layer_rows() == {0: 14}
        assert link.expert_rows() == {0: [0, 14, 0, 0, 0, 0, 14, 0]}


def test_time_with_rows_through_memory_is_the_seats_and_waits_for_rows_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    computing_s, pause_s = 0.05, 0.3

    def slow(layer: int, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        time.sleep(computing_s)
        return scaled(layer, x_TD, ids_TK, weights_TK)

    monkeypatch.setattr(Seat, "_compute", lambda _, *call: slow(*call))
    seat = Seat(0)
    with linked([seat]) as link:
        serving = TcpServing(GROUPS[0], seat.server, seat.host, SLOTS)
        assert serving.busy_s == 0.0
        x_TD, ids_TK, weights_TK = torch.ones(1, HIDDEN), torch.tensor([[1, 6]]), torch.ones(1, SLOTS)
        for number in (1, 2, 3):
            link.begin_step(number, [1])
            time.sleep(pause_s)  # the seat waits for rows
            link.combine(link.dispatch(0, x_TD, ids_TK, weights_TK))
            assert link.finish_step()
        end = time.monotonic() + 10
        while (counted_s := serving.busy_s) < 3 * computing_s and time.monotonic() < end:
            time.sleep(0.01)  # the last answer is there before its time is counted
        assert 3 * computing_s <= counted_s < pause_s
        assert seat.server.counts.seconds == 0.0
    until(lambda: not seat.host._clients, "the client is gone")
    assert serving.busy_s == counted_s, "what it took stays"


def test_rows_that_memory_has_room_for_need_no_lane() -> None:
    with linked([Seat(0)]) as link:
        (seat,) = link.tcp._seats.links.values()
        assert link.peers.carries(seat, ROWS)
        assert not link.peers.carries(seat, ROWS + 1)
        link.peers._stay_on_tcp(seat, "no memory, say")
        assert not link.peers.carries(seat, 1)
    with linked([Seat(0)], node="elsewhere") as link:
        (seat,) = link.tcp._seats.links.values()
        assert not link.peers.carries(seat, 1)
        link.begin_step(1, [3])
        assert link.graph_key() is None, "nothing is replayed where rows go over tcp"
        assert link.finish_step()


def test_a_graph_serves_steps_of_its_key_whichever_seat_is_left() -> None:
    seats = [Seat(0), Seat(1)]
    with linked(seats) as link:
        x_TD, y_TD = torch.zeros(5, HIDDEN), torch.zeros(5, HIDDEN)
        ids_TK = torch.tensor([[1, 6]]).expand(5, SLOTS)
        with link.capture_context(5) as key:
            graph = record(lambda: y_TD.copy_(link.combine(link.dispatch(0, x_TD, ids_TK, torch.ones(5, SLOTS)))))
        with link.capture_context(ROWS + 1) as beyond:
            assert beyond is None
        assert link.graph_key() is None
        used = set()
        for rows, known in ((5, True), (7, True), (5, False)):
            link.begin_step(1, [rows] if known else ())
            assert link.graph_key() == (key if known else None)
            if rows == 5 and known:
                x_TD.fill_(3)
                graph()
                used |= link.shared().items()
                assert torch.equal(y_TD, x_TD * (2 + 7))
            assert link.finish_step()
        ((_, first),) = used
        seats[first].server.close()
        until(lambda: link.shared_seats() == 1, "the seat is lost")
        link.begin_step(2, [5])
        x_TD.fill_(2)
        graph()
        assert link.finish_step()
        assert (link.graph_key(), link.shared()) == (key, {0: 1 - first})
        assert torch.equal(y_TD, x_TD * (2 + 7))


def test_memory_is_shared_with_all_groups_or_not_with_all() -> None:
    groups = even_groups([0], EXPERTS, 2)
    seats = [Seat(0, groups[0]), Seat(1, groups[0]), Seat(2, groups[1])]
    with linked(seats, groups=groups) as link:
        assert link.wait_shared(LONG_S)
        seats[2].server.close()
        until(lambda: link.shared_seats() == 2, "the seat of the other group is lost")
        assert not link.wait_shared(0.1), "two seats, but of one group"


@pytest.mark.parametrize("own", [0, 1])
def test_of_replicas_the_one_of_this_process_is_taken(own: int) -> None:
    with linked([Seat(0), Seat(1)]) as link:
        for shared in link.peers.usable():
            assert shared.inbox is not None
            shared.inbox.own = shared.link.seat.number == own
        found, expected, _ = step(link, 3, known=True)
        assert torch.equal(found, expected)
        assert link.shared() == {0: own}


@pytest.mark.parametrize(("rows", "known", "node"), [(9, True, ""), (3, False, ""), (3, True, "elsewhere")])
def test_other_steps_and_other_machines_go_over_tcp(rows: int, known: bool, node: str) -> None:
    seat = Seat(0)
    with linked([seat], node=node) as link:
        assert not node or not link.peers.wait_for(bool, 0.5), "seats of other machines get no offer"
        found, expected, _ = step(link, rows, known=known)
        assert torch.equal(found, expected)
        assert link.shared() == {}
        serving = TcpServing(GROUPS[0], seat.server, seat.host, SLOTS)
        assert serving.rows() == {0: (0, rows, 0, 0, 0, 0, rows, 0)}
        assert serving.layer_rows() == {0: rows}


def test_a_seat_learns_how_long_is_waited_and_whether_all_goes_through_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[tuple[float, bool]] = []
    monkeypatch.setattr(SharedSeat, "start", lambda _, begun: started.append((begun.deadline_s, begun.whole)))
    groups = even_groups([0], EXPERTS, 2)
    with linked([Seat(0, groups[0]), Seat(1, groups[1])], groups=groups, deadline_s=3.0) as link:
        link.begin_step(1, [3])
        assert link.finish_step()
        assert started == [(3.0, True)] * 2
        other = next(shared for shared in link.peers.usable() if shared.link.seat.number == 1)
        link._slow_until[other] = time.monotonic() + LONG_S
        link.begin_step(2, [3])
        assert link.finish_step()
        assert started[2:] == [(3.0, False)]


def test_a_seat_that_is_late_gets_the_step_again_over_tcp() -> None:
    seat = Seat(0)
    seat.held.set()
    with linked([seat], deadline_s=0.2) as link:
        found, expected, tries = step(link, 3)
        assert torch.equal(found, expected)
        assert (tries, link.shared()) == (2, {})
        assert seat.server.counts.calls == 1


@pytest.mark.parametrize("colocated", [False, True])
def test_a_colocated_seat_may_be_late(colocated: bool) -> None:
    seat = Seat(0, colocated=colocated)
    with linked([seat], deadline_s=0.1, colocated_s=LONG_S) as link:
        step(link, 1)
        seat.held.set()
        threading.Timer(0.4, lambda: (seat.held.clear(), seat.freed.set())).start()
        _, _, tries = step(link, 1)
        assert (tries == 1) is colocated


def test_a_seat_that_is_lost_ends_the_step_long_before_its_deadline() -> None:
    seats = [Seat(0), Seat(1)]
    seats[0].held.set()
    with linked(seats) as link:
        threading.Timer(0.2, seats[0].server.close).start()
        began = time.monotonic()
        link.begin_step(1, [3])
        assert link.shared() == {0: 0}
        x_TD, ids_TK = torch.ones(3, HIDDEN), torch.zeros(3, SLOTS, dtype=torch.int64)
        link.combine(link.dispatch(0, x_TD, ids_TK, torch.ones(3, SLOTS)))
        assert not link.finish_step()
        assert time.monotonic() < began + LONG_S / 2
        seats[0].freed.set()
        found, expected, tries = step(link, 3)
        assert torch.equal(found, expected)
        assert (tries, link.shared()) == (1, {0: 1})


def test_a_seat_in_the_step_under_way_stays_in_use_until_that_is_finished() -> None:
    """The tables that follow do not list it; its connection stays, too, or the step would have to run again."""
    seat = Seat(0)
    with linked([seat]) as link:
        x_TD, ids_TK, weights_TK = torch.ones(2, HIDDEN), torch.tensor([[1, 6]] * 2), torch.ones(2, SLOTS)
        link.begin_step(1, [2])
        for epoch in 2, 3:
            link.apply(table_of(epoch=epoch, groups=GROUPS))
            assert link.oldest_epoch() == 1
        y_TD = link.combine(link.dispatch(0, x_TD, ids_TK, weights_TK))
        assert link.finish_step()
        assert torch.equal(y_TD, (2.0 + 7.0) * x_TD)
        assert link.oldest_epoch() == 3


@contextmanager
def linked_two_groups() -> Iterator[tuple[SharedMemoryLink, list[Seat], Callable[..., Any]]]:
    """Two seats of group 0, of which the first does not answer and dies soon, and one of group 1. With them what runs a
    step: whether it is valid, and what its first micro-batch gave."""
    groups = even_groups([0], EXPERTS, 2)
    seats = [Seat(number, groups[group], wait_s=LONG_S) for number, group in ((0, 0), (1, 0), (2, 1))]
    seats[0].held.set()
    x_TD, ids_TK, weights_TK = torch.ones(3, HIDDEN), torch.tensor([[1, 6]]).expand(3, SLOTS), torch.ones(3, SLOTS)

    def run(number: int, micro_batches: int) -> tuple[bool, Tensor]:
        link.begin_step(number, [3] * micro_batches)
        y_TD = link.combine(link.dispatch(0, x_TD, ids_TK, weights_TK))
        return link.finish_step(), y_TD

    with linked(seats, groups=groups) as link:
        threading.Timer(0.2, seats[0].server.close).start()
        yield link, seats, run


def test_a_seat_that_waits_for_rows_of_a_step_given_up_takes_the_next_one_at_once() -> None:
    """Group 1 gets no rows of the second micro-batch, since group 0's seat dies in the first. The step that follows has
    one micro-batch: nothing of it comes where group 1's seat waits."""
    with linked_two_groups() as (link, seats, run):
        began = time.monotonic()
        assert not run(1, micro_batches=2)[0]
        seats[0].freed.set()
        valid, y_TD = run(2, micro_batches=1)
        assert valid
        assert link.shared() == {0: 1, 1: 2}
        assert torch.equal(y_TD, torch.full((3, HIDDEN), 9.0))
        assert time.monotonic() < began + LONG_S / 2


def test_a_seat_waits_no_longer_for_a_step_given_up_though_no_other_comes() -> None:
    """A seat that let a deadline pass gets rows over tcp from then on, and its GPU is to be free for them."""
    with linked_two_groups() as (_, seats, run):
        assert not run(1, micro_batches=2)[0]
        until(seats[2].host.idle, "the seat that lives has ended the step")


@pytest.mark.parametrize(
    ("choice", "device", "gpus", "colocated", "shares"),
    [
        ("off", "cpu", 0, False, False),
        ("auto", "cpu", 0, False, False),
        ("host", "cpu", 0, False, True),
        ("auto", "cuda", 2, False, True),
        ("auto", "cuda", 1, False, False),
        ("auto", "cuda", 1, True, True),  # with the seat of its own process
        ("off", "cuda", 2, True, False),
    ],
)
def test_memory_is_shared_as_chosen_and_by_auto_between_gpus(
    choice: str, device: str, gpus: int, colocated: bool, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice alone: the driver's memory is made up."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr("services.fabric.shared_memory.cuda_memory.CudaMemory", lambda device, **_options: device)
    memory = memory_for(choice, torch.device(device), colocated=colocated)
    assert (memory is not None) == shares
    if device == "cpu" and memory is not None:
        assert isinstance(memory, HostMemory)
        memory.close()


def test_where_the_driver_or_the_device_cannot_share_nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_device: torch.device, **_options: object) -> None:
        raise FabricError("The driver is too old.")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("services.fabric.shared_memory.cuda_memory.CudaMemory", fail)
    assert memory_for("auto", torch.device("cuda")) is None
    with pytest.raises(ConfigError, match="--device cpu"):
        memory_for("host", torch.device("cuda"))


def test_a_link_that_closes_lets_go_of_all_memory() -> None:
    before = memory_files()
    with linked([Seat(0), Seat(1)]) as link:
        step(link, 3)
        assert memory_files() > before
    until(lambda: memory_files() == before, "nobody holds memory")


def memory_files() -> int:
    """Anonymous files that this process has open."""
    found = (os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink())
    return sum("memfd:expertmesh" in name for name in found)
