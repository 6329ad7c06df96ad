"""Joint steps of clients over memory of the host: attention workers, and one seat whose calls take the rows of all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
import torch
from testkit.fabric.tcp import CALM, SECRET, hello, seat_of, serve, table_of
from testkit.waiting import until
from torch import Tensor

from moe_kernels.exchange.layout import Layout
from services.fabric.shared_memory.host_memory import HostMemory
from services.fabric.shared_memory.joint.policy import Hold, JoinPolicy
from services.fabric.shared_memory.joint.queue import _LayoutGroup
from services.fabric.shared_memory.joint.steps import Client, JointStep, JointStepBody, PendingStep
from services.fabric.shared_memory.link import SharedMemoryLink, SharedMemoryOptions
from services.fabric.shared_memory.messages import Step
from services.fabric.shared_memory.server import Limits, SharedMemoryServer
from services.fabric.shared_memory.steps import Steps
from services.fabric.tcp.connect import Facts
from services.fabric.tcp.link import TcpLink
from services.fabric.tcp.server import ExpertServer
from services.routing import even_groups

CPU = torch.device("cpu")
HIDDEN, EXPERTS, SLOTS, ROWS, LAYERS = 4, 8, 2, 16, 3
GROUPS = even_groups(list(range(LAYERS)), EXPERTS, 1)
LAYOUT = Layout(rows=ROWS, hidden=HIDDEN, slots=SLOTS, dtype=torch.float32)
LONG_S = 30.0


def scaled(layer: int, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Expert e of a layer multiplies by e + 1 + layer."""
    return x_TD * (weights_TK * (ids_TK + 1 + layer) * (ids_TK >= 0)).sum(1, keepdim=True)


class Seat:
    """``calls``: numbers of rows that had experts, by call. While ``held`` is set, calls of layer 1 do not end;
    ``holding``: one of them has begun, so it has its rows."""

    def __init__(self, join_rows: int = 128) -> None:
        self.calls: list[int] = []
        self.join_rows = join_rows
        self.held, self.holding, self.freed = threading.Event(), threading.Event(), threading.Event()
        self.broken = threading.Event()
        self.host = SharedMemoryServer(
            self._compute, memory=HostMemory(), device=CPU, layers=list(range(LAYERS)), num_experts=EXPERTS,
            hidden=HIDDEN, dtype=torch.float32, limits=Limits(join_rows=join_rows),
        )  # fmt: skip
        self.server: ExpertServer = serve(scaled, memory=self.host, experts=GROUPS[0].experts)

    def groups(self) -> list[_LayoutGroup]:
        return list(self.host._join_queue._groups.values())

    def waiting(self) -> int:
        return sum(len(one.held) for one in self.groups())

    def _compute(self, layer: int, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        if self.broken.is_set():
            raise RuntimeError("an expert broke")
        if layer == 1 and self.held.is_set():
            self.holding.set()
            self.freed.wait(LONG_S)
        self.calls.append(int((ids_TK >= 0).any(1).sum()))
        return scaled(layer, x_TD, ids_TK, weights_TK)


@contextmanager
def clients(seat: Seat, count: int, *, deadline_s: float = LONG_S) -> Iterator[list[SharedMemoryLink]]:
    place = msgspec.structs.replace(seat_of(seat.server, 0, 0), node="here")
    table = table_of(place, groups=GROUPS)
    with ExitStack() as stack:
        stack.callback(seat.server.close)
        found = []
        for _ in range(count):
            link = SharedMemoryLink(
                lambda extension: TcpLink(
                    table, Facts(hello=hello(), secret=SECRET, timing=CALM), extension=extension, reduced=True
                ),
                table,
                memory=HostMemory(),
                device=CPU,
                layers=list(range(LAYERS)),
                layout=LAYOUT,
                node="here",
                options=SharedMemoryOptions(deadline_s=deadline_s, quarantine_s=0.0),
            )
            stack.callback(link.close)
            assert link.peers.wait_for(bool, LONG_S)
            found.append(link)
        stack.callback(seat.freed.set)
        if seat.join_rows and count > 1:
            until(lambda: not any(one.missing() for one in seat.groups()), "joint steps are made")
        yield found


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Callable[[set[int]], None]:
    """Steps are held for those of the places given, as long as it takes."""

    def hold_for(places: set[int]) -> None:
        monkeypatch.setattr(JoinPolicy, "began", lambda *_, **__: None)
        monkeypatch.setattr(
            JoinPolicy,
            "come",
            lambda _self, place, *_: Hold(tuple(places - {place}), LONG_S) if place in places else None,
        )

    return hold_for


def call(rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randint(-4, 5, (rows, HIDDEN), generator=generator).float()
    ids_TK = torch.rand(rows, EXPERTS, generator=generator).topk(SLOTS, dim=1).indices
    return x_TD, ids_TK, torch.tensor([[0.5, 2.0]]).expand(rows, SLOTS).contiguous()


def step(link: SharedMemoryLink, rows: int, seed: int, *, begun: threading.Event | None = None, tries: int = 1) -> bool:
    """Whether every layer's answer is right, at the last try."""
    for _ in range(tries):
        link.begin_step(seed, [rows])
        if begun is not None:
            begun.set()
        good = True
        for layer in range(LAYERS):
            rows_of_layer = call(rows, seed + layer)
            found = link.combine(link.dispatch(layer, *rows_of_layer))
            good = good and torch.equal(found, scaled(layer, *rows_of_layer))
        if link.finish_step():
            return good
    return False


def at_once(links: list[SharedMemoryLink], rows: list[int], *, tries: int = 1) -> list[bool]:
    with ThreadPoolExecutor(len(links)) as pool:
        parts = [
            pool.submit(step, link, count, 10 * number, tries=tries)
            for number, (link, count) in enumerate(zip(links, rows, strict=True))
        ]
        return [part.result(LONG_S) for part in parts]


@pytest.mark.parametrize("rows", [[3, 5], [16, 2], [8, 8, 8]])
def test_steps_that_begin_together_take_one_call_for_each_layer(
    rows: list[int], together: Callable[[set[int]], None]
) -> None:
    seat = Seat()
    with clients(seat, len(rows)) as links:
        together(set(range(len(rows))))
        for _ in range(2):
            seat.calls.clear()
            assert all(at_once(links, rows))
            assert seat.calls == [sum(rows)] * LAYERS
        assert seat.host.joined_steps() == 2 * len(rows)
        assert [link.repeated_steps for link in links] == [0] * len(rows)
        assert sum(sum(counts) for counts in seat.host.rows().values()) == 2 * sum(rows) * SLOTS * LAYERS
        assert seat.host.occupied()[0] > 0
        assert seat.host.idle()


def test_nobody_is_waited_for_where_nothing_is_joined() -> None:
    seat = Seat(join_rows=0)
    with clients(seat, 2) as links:
        for number in range(40):
            assert step(links[number % 2], 3, number)
        assert seat.host.joined_steps() == 0


def test_steps_with_more_rows_than_a_call_takes_run_alone(together: Callable[[set[int]], None]) -> None:
    seat = Seat(join_rows=16)
    with clients(seat, 2) as links:
        together({0, 1})
        assert all(at_once(links, [8, 8]))
        assert seat.host.joined_steps() == 2
        assert all(at_once(links, [8, 9]))
        assert seat.host.joined_steps() == 2


def test_who_is_awaited_and_stops_is_waited_for_no_longer(together: Callable[[set[int]], None]) -> None:
    seat = Seat()
    with clients(seat, 2) as links, ThreadPoolExecutor(1) as pool:
        together({0, 1})
        waiting = pool.submit(step, links[0], 3, 1)
        until(lambda: seat.waiting() == 1, "the step is held for the other one's")
        links[1].close()
        assert waiting.result(LONG_S)
        assert seat.host.joined_steps() == 0


def test_who_does_not_come_in_time_is_waited_for_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JoinPolicy, "come", lambda _self, place, *_: Hold((1 - place,), 0.05))
    monkeypatch.setattr(JoinPolicy, "began", lambda *_, **__: None)
    seat = Seat()
    with clients(seat, 2) as links:
        for number in range(3):
            began = time.monotonic()
            assert step(links[0], 3, number)
            assert time.monotonic() - began >= 0.05
        assert seat.host.joined_steps() == 0


def test_a_member_that_is_lost_in_a_call_leaves_the_others_their_answers(
    together: Callable[[set[int]], None],
) -> None:
    """Its memory is let go of when the call has ended, not before."""
    seat = Seat()
    with clients(seat, 2) as links, ThreadPoolExecutor(2) as pool:
        together({0, 1})
        seat.held.set()
        parts = [pool.submit(step, link, 3, 1) for link in links]
        assert seat.holding.wait(LONG_S)
        assert seat.calls == [6], "the first layer is computed"
        peer, lost = next((peer, client) for peer, client in seat.host._clients.items() if client.place == 1)
        ending = threading.Thread(target=seat.host.lost, args=(peer,))
        ending.start()
        until(lambda: lost.gone, "the seat knows")
        time.sleep(0.05)
        assert ending.is_alive(), "a call still uses its memory"
        assert not seat.host.idle()
        seat.held.clear()
        seat.freed.set()
        assert parts[0].result(LONG_S)
        assert seat.calls[-1] == 3, "the last layer's rows are the other one's alone"
        until(lambda: len(seat.host._clients) == 1, "it is gone")
        ending.join(LONG_S)
        links[1]._control.abort()
        assert not parts[1].result(LONG_S)


def test_memory_that_a_call_never_gave_up_stays(together: Callable[[set[int]], None]) -> None:
    seat = Seat()
    seat.host._join_queue._wait_s = seat.host._wait_s = 0.1
    with clients(seat, 2) as links, ThreadPoolExecutor(2) as pool:
        together({0, 1})
        seat.held.set()
        parts = [pool.submit(step, link, 3, 1) for link in links]
        assert seat.holding.wait(LONG_S)
        assert seat.calls == [6], "the first layer is computed"
        peer = next(peer for peer, client in seat.host._clients.items() if client.place == 1)
        seat.host.lost(peer)
        assert len(seat.host._clients) == 1
        assert len(seat.host._never_closed) == 1, "its memory is kept"
        seat.freed.set()  # the call writes to the memory of who is gone
        assert parts[0].result(LONG_S)
        links[1]._control.abort()
        parts[1].result(LONG_S)


def test_a_member_that_begins_again_is_left_out_of_the_old_step(together: Callable[[set[int]], None]) -> None:
    """Another seat failed it, say: the new step's rows are not taken for the old one's."""
    seat = Seat()
    with clients(seat, 2) as links, ThreadPoolExecutor(1) as pool:
        together({0, 1})
        steady = pool.submit(step, links[0], 3, 1)
        until(lambda: seat.waiting() == 1, "it waits")
        links[1].begin_step(1, [4])
        first = call(4, 20)
        assert torch.equal(links[1].combine(links[1].dispatch(0, *first)), scaled(0, *first))
        together(set())
        links[1]._control.abort()
        assert not links[1].finish_step()
        assert step(links[1], 4, 30)
        assert steady.result(LONG_S)
        assert seat.calls[0] == 7


def test_a_member_that_is_late_is_left_out_and_comes_again(
    together: Callable[[set[int]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[int] = []

    def note(_policy: JoinPolicy, place: int, _now: float) -> float:
        failed.append(place)
        together(set())
        return 1.0

    monkeypatch.setattr(JoinPolicy, "failed", note)
    seat = Seat()
    with clients(seat, 2, deadline_s=5.0) as links, ThreadPoolExecutor(1) as pool:
        together({0, 1})
        steady = pool.submit(step, links[0], 3, 1)
        until(lambda: seat.waiting() == 1, "it waits")
        links[1].begin_step(1, [4])
        assert steady.result(LONG_S), "with the call of the other one alone, sooner than its own deadline"
        first = call(4, 20)
        assert not links[1].combine(links[1].dispatch(0, *first)).any()
        assert not links[1].finish_step()
        assert step(links[1], 4, 30), "alone"
        assert failed == [1]


def test_a_member_that_stops_is_waited_for_no_longer(together: Callable[[set[int]], None]) -> None:
    seat = Seat()
    with clients(seat, 2) as links, ThreadPoolExecutor(1) as pool:
        together({0, 1})
        steady = pool.submit(step, links[0], 3, 1)
        until(lambda: seat.waiting() == 1, "it waits")
        links[1].begin_step(1, [4])
        until(lambda: seat.waiting() == 0, "both have begun")
        links[1]._control.abort()
        assert not links[1].finish_step()
        assert steady.result(LONG_S / 5), "sooner than its grace period ends"
        assert seat.calls == [3] * LAYERS


def test_a_step_that_is_held_and_begun_again_begins_once(together: Callable[[set[int]], None]) -> None:
    """Its first rows are for the later step."""
    seat = Seat()
    with clients(seat, 2) as links, ThreadPoolExecutor(1) as pool:
        together({0, 1})
        links[0].begin_step(1, [3])
        until(lambda: seat.waiting() == 1, "it waits")
        links[0]._control.abort()
        assert not links[0].finish_step()
        until(lambda: seat.waiting() == 0, "it stopped")
        again = pool.submit(step, links[0], 3, 1)
        until(lambda: seat.waiting() == 1, "it waits again")
        assert step(links[1], 5, 10)
        assert again.result(LONG_S)
        assert seat.calls == [8] * LAYERS


def test_steps_in_two_micro_batches_run_alone(together: Callable[[set[int]], None]) -> None:
    seat = Seat()
    with clients(seat, 2) as links:
        together({0, 1})
        link = links[0]
        link.begin_step(1, [2, 3])
        for layer in range(LAYERS):
            parts = call(2, layer), call(3, 10 + layer)
            handles = [link.dispatch(layer, *part) for part in parts]
            for part, handle in zip(parts, handles, strict=True):
                assert torch.equal(link.combine(handle), scaled(layer, *part))
        assert link.finish_step()


def test_a_joint_step_takes_one_step_at_a_time(together: Callable[[set[int]], None]) -> None:
    seat = Seat()
    with clients(seat, 2) as links, ThreadPoolExecutor(2) as pool:
        together({0, 1})
        seat.held.set()
        parts = [pool.submit(step, link, 3, 1) for link in links]
        assert seat.holding.wait(LONG_S)
        assert seat.calls == [6], "the first layer is computed"
        (group,) = seat.groups()
        step_of = Step(epoch=0, step=0, base=0, bucket=8, micro_batches=1)
        assert not any(
            joint_step.fits([PendingStep(client, step_of) for client in group.clients])
            for joint_step in group.joint_steps
        )
        seat.held.clear()
        seat.freed.set()
        assert all(part.result(LONG_S) for part in parts)


def test_nobody_joins_whose_own_steps_have_not_ended() -> None:
    """Those would still answer an older exchange into the memory that the joint step's answers go to."""
    body = JointStepBody(scaled, [0], torch.zeros(1, EXPERTS, dtype=torch.int64), LAYOUT, members=2, rows=32)
    joint_step, step_of = JointStep(body, wait_s=LONG_S), Step(epoch=0, step=0, base=0, bucket=8, micro_batches=1)
    ended, busy = (
        PendingStep(cast(Client, SimpleNamespace(idle=lambda idle=idle: idle)), step_of) for idle in (True, False)
    )
    assert joint_step.fits([ended, ended])
    assert not joint_step.fits([ended, busy])
    joint_step.close()


def test_who_leaves_does_not_wait_for_the_step_after_its_own() -> None:
    body = JointStepBody(scaled, [0], torch.zeros(1, EXPERTS, dtype=torch.int64), LAYOUT, members=2, rows=32)
    joint_step = JointStep(body, wait_s=LONG_S)
    first, second = (
        PendingStep(
            cast(Client, SimpleNamespace(inbox=0, answers_at=0)),
            Step(epoch=0, step=0, base=0, bucket=8, micro_batches=1),
        )
        for _ in range(2)
    )
    joint_step.close()
    joint_step._steps = cast(Steps, SimpleNamespace(idle=lambda: False, start=lambda *_: None))
    joint_step.start([first], 1.0)
    assert joint_step.part(first.client, lambda: joint_step.start([second], 1.0))


def test_a_call_that_fails_is_made_again(together: Callable[[set[int]], None]) -> None:
    seat = Seat()
    with clients(seat, 2, deadline_s=0.2) as links:
        together({0, 1})
        seat.broken.set()
        assert at_once(links, [3, 5]) == [False, False]
        seat.broken.clear()
        assert all(at_once(links, [3, 5], tries=3))
