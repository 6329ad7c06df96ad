"""Joint steps of clients over memory of the host: attention workers, and one seat whose calls take the rows of all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from testkit.fabric.shared_memory import shared_memory_link, shared_memory_server
from testkit.fabric.tcp import seat_of, serve, table_of
from testkit.waiting import until
from torch import Tensor

from moe_kernels.exchange.layout import Layout
from services.fabric.shared_memory.joint.policy import Hold, JoinPolicy
from services.fabric.shared_memory.joint.queue import _LayoutGroup
from services.fabric.shared_memory.joint.steps import Client, JointStep, JointStepBody, PendingStep
from services.fabric.shared_memory.link import SharedMemoryLink
from services.fabric.shared_memory.messages import Step
from services.fabric.shared_memory.server import WAIT_S, Limits
from services.fabric.shared_memory.steps import Steps
from services.fabric.tcp.server import ExpertServer
from services.routing import even_groups

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

    def __init__(self, join_rows: int = 128, wait_s: float = WAIT_S) -> None:
        self.calls: list[int] = []
        self.join_rows = join_rows
        self.held, self.holding, self.freed = threading.Event(), threading.Event(), threading.Event()
        self.broken = threading.Event()
        options = {"limits": Limits(join_rows=join_rows), "wait_s": wait_s}
        self.host = shared_memory_server(self._compute, range(LAYERS), HIDDEN, torch.float32, EXPERTS, **options)
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
    table = table_of(seat_of(seat.server, 0), groups=GROUPS)
    options: dict[str, Any] = {"rows": ROWS, "slots": SLOTS, "unsummed": False, "quarantine_s": 0.0}
    with ExitStack() as stack:
        stack.callback(seat.server.close)
        found = [stack.enter_context(shared_memory_link(table, deadline_s=deadline_s, **options)) for _ in range(count)]
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


def step(link: SharedMemoryLink, rows: int, seed: int, *, tries: int = 1) -> bool:
    """Whether every layer's answer is right, at the last try."""
    for _ in range(tries):
        link.begin_step(seed, [rows])
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


@dataclass
class Two:
    """Two clients whose steps are held for each other's."""

    seat: Seat
    links: list[SharedMemoryLink]
    pool: ThreadPoolExecutor

    def held(self) -> Future[bool]:
        """The first one's step."""
        steady = self.pool.submit(step, self.links[0], 3, 1)
        until(lambda: self.seat.waiting() == 1, "it waits for the other one's")
        return steady

    def stuck(self) -> list[Future[bool]]:
        """Both ones' steps, as one whose call of layer 1 does not end."""
        self.seat.held.set()
        parts = [self.pool.submit(step, link, 3, 1) for link in self.links]
        assert self.seat.holding.wait(LONG_S)
        assert self.seat.calls == [6], "the first layer is computed"
        return parts

    def give_up(self, place: int) -> None:
        self.links[place]._control.abort()
        assert not self.links[place].finish_step()

    def client(self, place: int) -> tuple[Any, Any]:
        """The seat's connection to it, and what the seat knows of it."""
        return next((peer, client) for peer, client in self.seat.host._clients.items() if client.place == place)


@pytest.fixture
def two(request: pytest.FixtureRequest, together: Callable[[set[int]], None]) -> Iterator[Two]:
    options = {"wait_s": WAIT_S, "deadline_s": LONG_S} | getattr(request, "param", {})
    seat = Seat(wait_s=options["wait_s"])
    with clients(seat, 2, deadline_s=options["deadline_s"]) as links, ThreadPoolExecutor(2) as pool:
        together({0, 1})
        yield Two(seat, links, pool)


@pytest.mark.parametrize("rows", [[3, 5], [16, 2], [8, 8, 8]])
def test_steps_that_begin_together_take_one_call_for_each_layer(
    rows: list[int], together: Callable[[set[int]], None]
) -> None:
    seat = Seat(wait_s=LONG_S)
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


def test_who_is_awaited_and_goes_is_waited_for_no_longer(together: Callable[[set[int]], None]) -> None:
    seat = Seat()
    with clients(seat, 2) as links, ThreadPoolExecutor(1) as pool:
        together({0, 1})
        waiting = pool.submit(step, links[0], 3, 1)
        until(lambda: seat.waiting() == 1, "the step is held for the other one's")
        links[1].close()
        assert waiting.result(LONG_S)
        assert seat.host.joined_steps() == 0


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


def test_a_member_that_is_lost_in_a_call_leaves_the_others_their_answers(two: Two) -> None:
    """Its memory is let go of when the call has ended, not before."""
    parts, host = two.stuck(), two.seat.host
    peer, lost = two.client(1)
    ending = threading.Thread(target=host.lost, args=(peer,))
    ending.start()
    until(lambda: lost.gone, "the seat knows")
    time.sleep(0.05)
    assert ending.is_alive(), "a call still uses its memory"
    assert not host.idle()
    two.seat.held.clear()
    two.seat.freed.set()
    assert parts[0].result(LONG_S)
    assert two.seat.calls[-1] == 3, "the last layer's rows are the other one's alone"
    until(lambda: len(host._clients) == 1, "it is gone")
    ending.join(LONG_S)
    two.links[1]._control.abort()
    assert not parts[1].result(LONG_S)


@pytest.mark.parametrize("two", [{"wait_s": 0.1}], indirect=True)
def test_memory_that_a_call_never_gave_up_stays(two: Two) -> None:
    parts, host = two.stuck(), two.seat.host
    host.lost(two.client(1)[0])
    assert len(host._clients) == 1
    assert len(host._never_closed) == 1, "its memory is kept"
    two.seat.freed.set()  # the call writes to the memory of who is gone
    assert parts[0].result(LONG_S)
    two.links[1]._control.abort()
    parts[1].result(LONG_S)


def test_a_member_that_begins_again_is_left_out_of_the_old_step(two: Two, together: Callable[[set[int]], None]) -> None:
    """Another seat failed it, say: the new step's rows are not taken for the old one's."""
    steady, other, first = two.held(), two.links[1], call(4, 20)
    other.begin_step(1, [4])
    assert torch.equal(other.combine(other.dispatch(0, *first)), scaled(0, *first))
    together(set())
    two.give_up(1)
    assert step(other, 4, 30)
    assert steady.result(LONG_S)
    assert two.seat.calls[0] == 7


@pytest.mark.parametrize("two", [{"deadline_s": 5.0}], indirect=True)
def test_a_member_that_is_late_is_left_out_and_comes_again(
    two: Two, together: Callable[[set[int]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[int] = []

    def note(_policy: JoinPolicy, place: int, _now: float) -> float:
        failed.append(place)
        together(set())
        return 1.0

    monkeypatch.setattr(JoinPolicy, "failed", note)
    steady, other, first = two.held(), two.links[1], call(4, 20)
    other.begin_step(1, [4])
    assert steady.result(LONG_S), "with the call of the other one alone, sooner than its own deadline"
    assert not other.combine(other.dispatch(0, *first)).any()
    assert not other.finish_step()
    assert step(other, 4, 30), "alone"
    assert failed == [1]


def test_a_member_that_stops_is_waited_for_no_longer(two: Two) -> None:
    steady = two.held()
    two.links[1].begin_step(1, [4])
    until(lambda: two.seat.waiting() == 0, "both have begun")
    two.give_up(1)
    assert steady.result(LONG_S / 5), "sooner than its grace period ends"
    assert two.seat.calls == [3] * LAYERS


def test_a_step_that_is_held_and_begun_again_begins_once(two: Two) -> None:
    """Its first rows are for the later step."""
    two.links[0].begin_step(1, [3])
    until(lambda: two.seat.waiting() == 1, "it waits")
    two.give_up(0)
    until(lambda: two.seat.waiting() == 0, "it stopped")
    again = two.held()
    assert step(two.links[1], 5, 10)
    assert again.result(LONG_S)
    assert two.seat.calls == [8] * LAYERS


def joint_step_of_two() -> JointStep:
    body = JointStepBody(scaled, [0], torch.zeros(1, EXPERTS, dtype=torch.int64), LAYOUT, members=2, rows=32)
    return JointStep(body, wait_s=LONG_S)


def pending(client: object) -> PendingStep:
    return PendingStep(cast(Client, client), Step(epoch=0, step=0, base=0, bucket=8, micro_batches=1))


def test_a_joint_step_takes_one_step_at_a_time(two: Two) -> None:
    parts = two.stuck()
    (group,) = two.seat.groups()
    assert not any(one.fits([pending(client) for client in group.clients]) for one in group.joint_steps)
    two.seat.held.clear()
    two.seat.freed.set()
    assert all(part.result(LONG_S) for part in parts)


def test_nobody_joins_whose_own_steps_have_not_ended() -> None:
    """Those would still answer an older exchange into the memory that the joint step's answers go to."""
    joint_step = joint_step_of_two()
    ended, busy = pending(SimpleNamespace(idle=lambda: True)), pending(SimpleNamespace(idle=lambda: False))
    assert joint_step.fits([ended, ended])
    assert not joint_step.fits([ended, busy])
    joint_step.close()


def test_who_leaves_does_not_wait_for_the_step_after_its_own() -> None:
    joint_step = joint_step_of_two()
    first, second = (pending(SimpleNamespace(inbox=0, answers_at=0)) for _ in range(2))
    joint_step.close()
    joint_step._steps = cast(Steps, SimpleNamespace(idle=lambda: False, start=lambda *_: None))
    joint_step.start([first], 1.0)
    assert joint_step.part(first.client, lambda: joint_step.start([second], 1.0))


@pytest.mark.parametrize("two", [{"deadline_s": 0.2}], indirect=True)
def test_a_call_that_fails_is_made_again(two: Two) -> None:
    two.seat.broken.set()
    assert at_once(two.links, [3, 5]) == [False, False]
    two.seat.broken.clear()
    assert all(at_once(two.links, [3, 5], tries=3))
