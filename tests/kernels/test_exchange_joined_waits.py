"""How long a joined call waits, and what it does meanwhile, by a clock that goes on only when it is looked at."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import triton.language as tl
from testkit.fabric.joined import Client, Seat, pair, rows_of

from moe_kernels.exchange.joined import kernel as exchange_joined_triton
from moe_kernels.exchange.joined import launch as exchange_joined_launch
from moe_kernels.exchange.joined import reference as exchange_joined_torch
from moe_kernels.exchange.layout import ABORTED, DEADLINE, FAILED, GRACE, LATE, MEMBER_GONE

MS = 1_000_000
TICK_NS, GRACE_NS, DEADLINE_NS = MS, 6 * MS, 20 * MS

pytestmark = pytest.mark.usefixtures("path")


class Clock:
    """``then``: what happens at a time."""

    def __init__(self) -> None:
        self.now = 1_000 * MS
        self.began = self.now
        self.then: dict[int, Callable[[], object]] = {}

    @property
    def past(self) -> int:
        return self.now - self.began

    def look(self) -> int:
        self.now += TICK_NS
        self.then.pop(self.past, lambda: None)()
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    references = SimpleNamespace(monotonic_ns=clock.look, sleep=time.sleep)
    monkeypatch.setattr(exchange_joined_torch, "time", references)
    monkeypatch.setattr(exchange_joined_launch, "TIMED", True)
    monkeypatch.setattr(exchange_joined_triton, "globaltimer", lambda: tl.full((), clock.look(), tl.int64))
    return clock


def timed_pair() -> tuple[Client, Client, Seat]:
    first, other, seat = pair()
    seat.control[GRACE], seat.control[DEADLINE] = GRACE_NS, DEADLINE_NS
    return first, other, seat


def test_nobody_is_waited_for_longer_than_the_deadline(clock: Clock) -> None:
    *_, seat = timed_pair()
    assert seat.take() == 0
    assert DEADLINE_NS <= clock.past <= DEADLINE_NS + 4 * TICK_NS
    assert seat.out() == [LATE, LATE]


@pytest.mark.parametrize("first_ms", [10, 18])
def test_grace_begins_with_the_rows_of_the_first(first_ms: int, clock: Clock) -> None:
    """Also where it goes on for longer than the deadline."""
    first, other, seat = timed_pair()
    clock.then[first_ms * MS] = lambda: first.send(rows_of(8))
    clock.then[(first_ms + 4) * MS] = lambda: other.send(rows_of(8))
    assert seat.take() == 0b11
    assert seat.out() == [0, 0]


def test_who_comes_late_is_left_out_when_grace_ends(clock: Clock) -> None:
    first, other, seat = timed_pair()
    first.send(rows_of(8))
    clock.then[12 * MS] = lambda: other.send(rows_of(8))
    assert seat.take() == 0b01
    assert GRACE_NS <= clock.past < 12 * MS
    assert seat.out() == [0, LATE]


def test_the_next_layer_has_a_wait_of_its_own(clock: Clock) -> None:
    first, other, seat = timed_pair()
    for client in (first, other):
        client.send(rows_of(8))
    assert seat.take() == 0b11
    clock.now += 10 * DEADLINE_NS
    clock.began = clock.now
    clock.then[10 * MS] = lambda: first.send(rows_of(8), 1)
    clock.then[12 * MS] = lambda: other.send(rows_of(8), 1)
    assert seat.take(1) == 0b11


def test_that_a_member_is_out_is_shown_while_others_are_awaited(clock: Clock) -> None:
    """Its host closes its memory then."""
    first, _, seat = timed_pair()
    out: list[list[int]] = []
    clock.then[4 * MS] = lambda: seat.control.__setitem__(seat.at(1, MEMBER_GONE), 1)
    clock.then[8 * MS] = lambda: out.append(seat.out())
    clock.then[10 * MS] = lambda: first.send(rows_of(8))
    assert seat.take() == 0b01
    assert out == [[0, 1]]


def test_a_step_that_is_given_up_waits_no_longer(clock: Clock) -> None:
    first, _, seat = timed_pair()
    first.send(rows_of(8))
    clock.then[3 * MS] = lambda: seat.control.__setitem__(FAILED, ABORTED)
    assert seat.take() == 0
    assert clock.past < GRACE_NS
    assert seat.out() == [1, 1]
