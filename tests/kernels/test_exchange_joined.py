"""Joined calls of several guests of one seat, fake ones in one process, on both paths."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from moe_kernels.exchange import send_rows, sum_answers
from moe_kernels.exchange_joined import Joined, send_joined, take_joined
from moe_kernels.exchange_layout import (
    ABORTED,
    ANSWERS,
    BASE,
    DEADLINE,
    FAILED,
    INBOX,
    JOB,
    MEMBER,
    MEMBER_ANSWERS,
    MEMBER_BASE,
    MEMBER_GONE,
    MEMBER_INBOX,
    MEMBER_LAST,
    MEMBER_OUT,
    MEMBER_ROWS,
    MEMBERS,
    PATIENCE,
    WORDS,
    Layout,
)

EXPERTS, HIDDEN, SLOTS = 8, 48, 3
GROUP_OF_E = torch.zeros(EXPERTS, dtype=torch.int32)
SCALE_E = torch.tensor([1, 2, 3, 4, -5, 6, 7, -8, 0])
SOON_NS = 20_000_000
Rows = tuple[Tensor, Tensor, Tensor]

pytestmark = pytest.mark.usefixtures("path")


def words(values: dict[int, int]) -> Tensor:
    control = torch.zeros(WORDS, dtype=torch.int64)
    for number, value in {DEADLINE: SOON_NS, **values}.items():
        control[number] = value
    return control


def rows_of(rows: int, seed: int = 0) -> Rows:
    """Small whole numbers, distinct experts, some slots empty, weights that are powers of two."""
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randint(-4, 5, (rows, HIDDEN), generator=generator).float()
    ids_TK = torch.rand(rows, EXPERTS, generator=generator).topk(SLOTS, dim=1).indices
    ids_TK[torch.rand(rows, SLOTS, generator=generator) < 0.2] = -1
    return x_TD, ids_TK, torch.tensor([0.5, 0.25, 2]).expand(rows, SLOTS)


def expected(rows: Rows) -> Tensor:
    x_TD, ids_TK, weights_TK = rows
    return (SCALE_E[ids_TK] * weights_TK).sum(1, keepdim=True) * x_TD


class Guest:
    """An attention worker and the memory that it shares with the seat."""

    def __init__(self, layout: Layout, bucket: int, base: int = 0) -> None:
        self.layout, self.bucket, self.base = layout, bucket, base
        self.inbox = torch.zeros(layout.inbox_bytes, dtype=torch.uint8)
        self.answers = torch.zeros(layout.answers_bytes, dtype=torch.uint8)
        self.sent_E = torch.zeros(EXPERTS, dtype=torch.int64)
        self.control = words({BASE: base, INBOX: self.inbox.data_ptr(), ANSWERS: self.answers.data_ptr()})

    def send(self, rows: Rows, exchange: int = 0) -> None:
        send_rows(*rows, GROUP_OF_E, self.sent_E, self.control, exchange=exchange, micro_batch=0, groups=1,
                  bucket=self.bucket, layout=self.layout)  # fmt: skip

    def sum(self, rows: Rows, exchange: int = 0) -> Tensor:
        return sum_answers(*rows[1:], GROUP_OF_E, self.control, exchange=exchange, micro_batch=0, groups=1,
                           bucket=self.bucket, layout=self.layout)  # fmt: skip


class Seat:
    """Calls for ``guests``, of whom None is no member."""

    def __init__(self, guests: Sequence[Guest | None], layout: Layout, *, members: int, bucket: int) -> None:
        self.layout, self.members, self.bucket = layout, members, bucket
        facts = {}
        for number, guest in enumerate(guests):
            if guest is not None:
                facts |= {
                    self.at(number, MEMBER_INBOX): guest.inbox.data_ptr(),
                    self.at(number, MEMBER_ANSWERS): guest.answers.data_ptr(),
                    self.at(number, MEMBER_BASE): guest.base,
                    self.at(number, MEMBER_LAST): guest.base + 10,
                    self.at(number, MEMBER_ROWS): guest.bucket,
                }
        self.control = words({PATIENCE: SOON_NS, **facts})
        self.joined = Joined.room(64 * members, layout, torch.device("cpu")).of(members * bucket)
        self.joined.taken_CK.fill_(5)
        self.joined.x_CD.fill_(torch.nan)
        self.counts_E = torch.zeros(EXPERTS, dtype=torch.int64)

    @staticmethod
    def at(member: int, word: int) -> int:
        return MEMBERS + member * MEMBER + word

    def take(self, exchange: int = 0) -> int:
        """Whose rows the call has."""
        take_joined(self.joined, self.control, layout=self.layout, members=self.members, bucket=self.bucket,
                    exchange=exchange)  # fmt: skip
        return int(self.control[JOB])

    def answer(self, exchange: int = 0) -> None:
        joined = self.joined
        scale_CK = SCALE_E[joined.taken_CK.long()]
        y_CKD = scale_CK.unsqueeze(2) * joined.x_CD.nan_to_num(7).unsqueeze(1)
        if not self.layout.unsummed:
            y_CKD = (joined.weights_CK.unsqueeze(2) * y_CKD).sum(1)
        send_joined(y_CKD, joined, self.counts_E, self.control, layout=self.layout, members=self.members,
                    bucket=self.bucket, exchange=exchange)  # fmt: skip

    def out(self) -> list[int]:
        return [int(self.control[self.at(number, MEMBER_OUT)]) for number in range(self.members)]


def layout_of(rows: int = 40, *, unsummed: bool = False) -> Layout:
    return Layout(rows=rows, hidden=HIDDEN, slots=SLOTS, dtype=torch.float32, unsummed=unsummed)


def pair(*, unsummed: bool = False) -> tuple[Guest, Guest, Seat]:
    layout = layout_of(unsummed=unsummed)
    first, other = Guest(layout, 8), Guest(layout, 8, base=70)
    return first, other, Seat([first, other], layout, members=2, bucket=8)


@pytest.mark.parametrize("unsummed", [False, True])
@pytest.mark.parametrize("rows", [1, 13, 16])
def test_one_call_answers_all_members(unsummed: bool, rows: int) -> None:
    layout = layout_of(unsummed=unsummed)
    guests = [Guest(layout, 16, base) for base in (0, 1000, 7)]
    seat = Seat([guests[0], None, *guests[1:]], layout, members=4, bucket=16)
    for exchange in range(3):
        sent = [rows_of(rows, 3 * exchange + seed) for seed in range(3)]
        for guest, part in zip(guests, sent, strict=True):
            guest.send(part, exchange)
        assert seat.take(exchange) == 0b1101
        seat.answer(exchange)
        for guest, part in zip(guests, sent, strict=True):
            assert torch.equal(guest.sum(part, exchange), expected(part))
            assert guest.control[FAILED] == 0
    assert seat.control[FAILED] == 0
    assert seat.out() == [0, 0, 0, 0]
    assert torch.equal(seat.counts_E, sum(guest.sent_E for guest in guests))


def test_members_have_buckets_of_different_sizes_and_blocks_of_several_rows() -> None:
    layout = layout_of(300)
    guests = Guest(layout, 300), Guest(layout, 256), Guest(layout, 8), Guest(layout, 290)
    seat = Seat(guests, layout, members=4, bucket=300)
    seat.joined = Joined.room(1200, layout, torch.device("cpu"))
    sent = [rows_of(guest.bucket - 3, guest.bucket) for guest in guests]
    for guest, part in zip(guests, sent, strict=True):
        guest.send(part)
    assert seat.take() == 0b1111
    seat.answer()
    for guest, part in zip(guests, sent, strict=True):
        assert torch.equal(guest.sum(part), expected(part))


@pytest.mark.parametrize("why", ["no rows", "later rows", "gone", "out"])
def test_who_does_not_come_is_left_out_for_the_rest_of_the_step(why: str) -> None:
    first, other, seat = pair()
    parts = rows_of(8), rows_of(8, 1)
    first.send(parts[0])
    if why != "no rows":
        other.send(parts[1], 20 if why == "later rows" else 0)
    if why in ("gone", "out"):
        seat.control[seat.at(1, MEMBER_GONE if why == "gone" else MEMBER_OUT)] = 1
    assert seat.take() == 0b01
    assert (seat.joined.taken_CK[8:] == -1).all()
    seat.answer()
    assert torch.equal(first.sum(parts[0]), expected(parts[0]))
    assert not other.answers.any()
    assert seat.out() == [0, 1]
    for guest, part in zip((first, other), parts, strict=True):
        guest.send(part, 1)
    assert seat.take(1) == 0b01
    assert seat.control[FAILED] == 0


@pytest.mark.parametrize("why", ["no rows", "aborted"])
def test_a_call_without_rows_answers_nobody(why: str) -> None:
    first, other, seat = pair()
    if why == "aborted":
        for guest in (first, other):
            guest.send(rows_of(8))
        seat.control[FAILED] = ABORTED
    assert seat.take() == 0
    assert seat.out() == [1, 1]
    assert (seat.joined.taken_CK == -1).all()
    seat.answer()
    assert not first.answers.any()
    assert not other.answers.any()
    assert not seat.counts_E.any()


def test_nothing_is_answered_once_the_step_is_aborted() -> None:
    first, other, seat = pair()
    for guest in (first, other):
        guest.send(rows_of(8))
    assert seat.take() == 0b11
    seat.control[FAILED] = ABORTED
    seat.answer()
    assert not first.answers.any()


def test_an_absent_slot_may_hold_anything() -> None:
    first, other, seat = pair(unsummed=True)
    parts = []
    for seed, guest in enumerate((first, other)):
        guest.answers.fill_(0xFF)
        guest.answers[: guest.layout.y_at] = 0
        x_TD, ids_TK, weights_TK = rows_of(8, seed)
        parts.append((x_TD, ids_TK, torch.where(ids_TK < 0, torch.nan, weights_TK)))
        guest.send(parts[-1])
    assert seat.take() == 0b11
    seat.answer()
    for guest, (x_TD, ids_TK, weights_TK) in zip((first, other), parts, strict=True):
        found = guest.sum((x_TD, ids_TK, weights_TK))
        assert torch.equal(found, expected((x_TD, ids_TK, weights_TK.nan_to_num())))
