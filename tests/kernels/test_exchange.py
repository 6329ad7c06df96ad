"""An exchange between fake peers in one process: rows out, experts that scale them, answers back, on both paths."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from testkit.fabric import joined
from testkit.fabric.joined import EXPERTS, HIDDEN, SCALE_E, SLOTS, Rows, rows_of, words
from torch import Tensor

from moe_kernels.exchange.layout import ABORTED, ANSWERS, BASE, FAILED, INBOX, LAST, PEER, Layout
from moe_kernels.exchange.op import send_answers, send_rows, sum_answers, take_rows

GROUPS = 2
GROUP_OF_E = torch.tensor([0, 1, 1, 0, 0, 1, 0, 1], dtype=torch.int32)

pytestmark = pytest.mark.usefixtures("path")


@dataclass
class Seat:
    """The experts of one group."""

    layout: Layout
    group: int
    inbox: Tensor = field(init=False)
    answers: Tensor = field(init=False)
    counts_E: Tensor = field(init=False)
    taken_RK: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.inbox = torch.zeros(self.layout.inbox_bytes, dtype=torch.uint8)
        self.answers = torch.zeros(self.layout.answers_bytes, dtype=torch.uint8)
        self.counts_E = torch.zeros(EXPERTS, dtype=torch.int64)
        self.taken_RK = torch.full((self.layout.rows, SLOTS), 77, dtype=torch.int32)

    def serve(self, *, bucket: int, exchange: int = 0, micro_batch: int = 0, base: int = 0, last: int = 99) -> Tensor:
        """One exchange; the control block after it."""
        control = words({BASE: base, LAST: last, PEER: self.answers.data_ptr()})
        at = {"layout": self.layout, "bucket": bucket, "exchange": exchange, "micro_batch": micro_batch}
        taken_RK = self.taken_RK[:bucket]
        x_RD, weights_RK = take_rows(self.inbox, taken_RK, self.counts_E, control, **at)
        scale_RK = SCALE_E[taken_RK.long()]
        assert ((taken_RK < 0) | (GROUP_OF_E[taken_RK.clamp(min=0).long()] == self.group)).all()
        y_RKD = scale_RK.unsqueeze(2) * x_RD.float().nan_to_num(7).unsqueeze(1)
        if not self.layout.unsummed:
            y_RKD = (weights_RK.unsqueeze(2) * y_RKD).sum(1)
        send_answers(y_RKD.to(self.layout.dtype), taken_RK, self.counts_E, control, **at)
        return control


@dataclass
class Attention:
    layout: Layout
    seats: list[Seat]
    base: int = 0
    shared_gpu: bool = False
    control: Tensor = field(init=False)
    counts_E: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.counts_E = torch.zeros(EXPERTS, dtype=torch.int64)
        self.begin()

    def begin(self) -> None:
        addresses = {INBOX + seat.group: seat.inbox.data_ptr() for seat in self.seats}
        addresses |= {ANSWERS + seat.group: seat.answers.data_ptr() for seat in self.seats}
        self.control = words({BASE: self.base, **addresses})

    def send(self, call: Rows, bucket: int, exchange: int = 0, micro_batch: int = 0) -> None:
        at = {"layout": self.layout, "groups": GROUPS, "bucket": bucket}
        send_rows(*call, GROUP_OF_E, self.counts_E, self.control, exchange=exchange, micro_batch=micro_batch, **at)

    def sum(self, call: Rows, bucket: int, exchange: int = 0, micro_batch: int = 0) -> Tensor:
        at = {"layout": self.layout, "groups": GROUPS, "bucket": bucket, "shared_gpu": self.shared_gpu}
        return sum_answers(*call[1:], GROUP_OF_E, self.control, exchange=exchange, micro_batch=micro_batch, **at)


def world(
    unsummed: bool = False, rows: int = 40, dtype: torch.dtype = torch.float32, shared_gpu: bool = False
) -> tuple[Attention, list[Seat]]:
    layout = Layout(rows=rows, hidden=HIDDEN, slots=SLOTS, dtype=dtype, unsummed=unsummed)
    seats = [Seat(layout, group) for group in range(GROUPS)]
    return Attention(layout, seats, shared_gpu=shared_gpu), seats


def expected(call: Rows) -> Tensor:
    return joined.expected(call).to(call[0].dtype)


@pytest.mark.parametrize("unsummed", [False, True])
@pytest.mark.parametrize(
    ("dtype", "shared_gpu"), [(torch.float32, False), (torch.float32, True), (torch.float16, False)]
)
def test_rows_come_back_scaled(unsummed: bool, dtype: torch.dtype, shared_gpu: bool) -> None:
    attention, seats = world(unsummed, dtype=dtype, shared_gpu=shared_gpu)
    for exchange, (rows, micro_batch) in enumerate([(1, 0), (13, 1), (40, 0)]):
        (x_TD, ids_TK, weights_TK), bucket = rows_of(rows, exchange), min(2 * rows, 40)
        call = x_TD.to(dtype), ids_TK, weights_TK
        attention.send(call, bucket, exchange, micro_batch)
        for seat in seats:
            assert seat.serve(bucket=bucket, exchange=exchange, micro_batch=micro_batch)[FAILED] == 0
        assert torch.equal(attention.sum(call, bucket, exchange, micro_batch), expected(call))
    assert attention.control[FAILED] == 0
    assert torch.equal(attention.counts_E, sum(seat.counts_E for seat in seats))
    assert int(attention.counts_E.sum()) == sum(int((rows_of(n, s)[1] >= 0).sum()) for s, n in enumerate((1, 13, 40)))


def test_more_rows_than_blocks() -> None:
    attention, seats = world(rows=600)
    call = rows_of(517)
    attention.send(call, 600)
    for seat in seats:
        seat.serve(bucket=600)
    assert torch.equal(attention.sum(call, 600), expected(call))


@pytest.mark.parametrize("rows", [42, 43, 600])
def test_every_pair_is_counted_once(rows: int) -> None:
    """The most that are counted when they are taken, the least when they are answered, and blocks of several rows."""
    attention, seats = world(rows=rows)
    call = rows_of(rows - 2)
    for exchange in range(2):
        attention.send(call, rows, exchange)
        for seat in seats:
            seat.serve(bucket=rows, exchange=exchange)
    ids_S = call[1][call[1] >= 0]
    for seat in seats:
        here_S = ids_S[GROUP_OF_E[ids_S] == seat.group]
        assert torch.equal(seat.counts_E, 2 * torch.bincount(here_S, minlength=EXPERTS))


@pytest.mark.parametrize("shared_gpu", [False, True])
def test_a_missing_answer_fails_the_step_and_returns_zeros(shared_gpu: bool) -> None:
    attention, seats = world(shared_gpu=shared_gpu)
    call = rows_of(8)
    attention.send(call, 8)
    seats[0].serve(bucket=8)
    assert not attention.sum(call, 8).any()
    assert attention.control[FAILED] == 1 << 1


def test_a_failed_step_sends_nothing_more() -> None:
    attention, seats = world()
    attention.control[FAILED] = ABORTED
    attention.send(rows_of(8), 8)
    assert not any(seat.inbox.any() for seat in seats)
    assert not attention.counts_E.any()


def test_a_seat_without_rows_computes_none_and_answers_nothing() -> None:
    _, seats = world()
    control = seats[0].serve(bucket=8)
    assert control[FAILED] == 1
    assert (seats[0].taken_RK[:8] == -1).all()
    assert not seats[0].answers.any()
    assert not seats[0].counts_E.any()


def test_a_step_that_was_begun_again_supersedes_the_old_one() -> None:
    """The seat gives the old step up although its rows' flags are high enough, and answers the new one."""
    attention, seats = world()
    attention.base = 10
    attention.begin()
    call = rows_of(8)
    attention.send(call, 8)
    for seat in seats:
        assert seat.serve(bucket=8, base=0, last=10)[FAILED] == 1
        assert (seat.taken_RK[:8] == -1).all()
        assert seat.serve(bucket=8, base=10, last=20)[FAILED] == 0
    assert torch.equal(attention.sum(call, 8), expected(call))


@pytest.mark.parametrize("shared_gpu", [False, True])
def test_old_answers_are_not_taken_for_new_ones(shared_gpu: bool) -> None:
    attention, seats = world(shared_gpu=shared_gpu)
    call = rows_of(8)
    attention.send(call, 8)
    for seat in seats:
        seat.serve(bucket=8)
    attention.base = 10
    attention.begin()
    attention.send(call, 8)
    assert not attention.sum(call, 8).any()
    assert attention.control[FAILED] & 0b11


@pytest.mark.parametrize("shared_gpu", [False, True])
def test_groups_without_a_seat_here_are_left_out(shared_gpu: bool) -> None:
    attention, seats = world(shared_gpu=shared_gpu)
    attention.seats = seats[:1]
    attention.begin()
    x_TD, ids_TK, weights_TK = rows_of(8)
    attention.send((x_TD, ids_TK, weights_TK), 8)
    seats[0].serve(bucket=8)
    here_TK = torch.where((ids_TK >= 0) & (GROUP_OF_E[ids_TK] == 0), ids_TK, -1)
    assert torch.equal(attention.sum((x_TD, ids_TK, weights_TK), 8), expected((x_TD, here_TK, weights_TK)))
    assert attention.control[FAILED] == 0
    assert not seats[1].inbox.any()


@pytest.mark.parametrize("unsummed", [False, True])
def test_an_absent_slot_may_hold_anything(unsummed: bool) -> None:
    """Neither its weight nor what lies in the buffers where it would be is read."""
    attention, seats = world(unsummed)
    for seat in seats:
        seat.answers.fill_(0xFF)
        seat.answers[: seat.layout.y_at] = 0
    x_TD, ids_TK, weights_TK = rows_of(8)
    weights_TK = torch.where(ids_TK < 0, torch.nan, weights_TK)
    attention.send((x_TD, ids_TK, weights_TK), 8)
    for seat in seats:
        seat.serve(bucket=8)
    clean = expected((x_TD, ids_TK, weights_TK.nan_to_num()))
    assert torch.equal(attention.sum((x_TD, ids_TK, weights_TK), 8), clean)


def test_rows_not_asked_of_a_seat_do_not_travel() -> None:
    attention, seats = world()
    x_TD, _, weights_TK = rows_of(2)
    attention.send((x_TD, torch.tensor([[0, 3, 4], [1, 2, 5]]), weights_TK), 8)
    here = seats[1].inbox[seats[1].layout.x_at :][: 2 * HIDDEN * 4].view(torch.float32).view(2, HIDDEN)
    assert not here[0].any()
    assert torch.equal(here[1], x_TD[1])
