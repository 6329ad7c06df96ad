"""Joined calls of several clients of one seat, fake ones in one process, on both paths."""

from __future__ import annotations

import pytest
import torch
from testkit.fabric.joined import HIDDEN, SLOTS, Client, Seat, expected, layout_of, pair, rows_of

from moe_kernels.exchange.layout import ABORTED, FAILED, LATE, MAX_MEMBERS, MEMBER_GONE, MEMBER_OUT

pytestmark = pytest.mark.usefixtures("path")


@pytest.mark.parametrize("unsummed", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 4])
def test_one_call_answers_all_members(unsummed: bool, rows: int) -> None:
    layout = layout_of(unsummed=unsummed)
    clients = [Client(layout, 4, base) for base in (0, 1000, 7)]
    seat = Seat([clients[0], None, *clients[1:]], layout, members=4, bucket=4)
    for exchange in range(3):
        sent = [rows_of(rows, 3 * exchange + seed) for seed in range(3)]
        for client, part in zip(clients, sent, strict=True):
            client.send(part, exchange)
        assert seat.take(exchange) == 0b1101
        seat.answer(exchange)
        for client, part in zip(clients, sent, strict=True):
            assert torch.equal(client.sum(part, exchange), expected(part))
            assert client.control[FAILED] == 0
    assert seat.control[FAILED] == 0
    assert seat.out() == [0, 0, 0, 0]
    assert torch.equal(seat.counts_E, torch.stack([client.sent_E for client in clients]).sum(0))


def test_as_many_members_as_a_control_block_has_words_for() -> None:
    layout = layout_of()
    clients = [Client(layout, 1, base) for base in range(MAX_MEMBERS)]
    seat = Seat(clients, layout, members=MAX_MEMBERS, bucket=1)
    sent = [rows_of(1, seed) for seed in range(MAX_MEMBERS)]
    for client, part in zip(clients, sent, strict=True):
        client.send(part)
    assert seat.take() == (1 << MAX_MEMBERS) - 1
    seat.answer()
    for client, part in zip(clients, sent, strict=True):
        assert torch.equal(client.sum(part), expected(part))


def test_each_member_has_its_place_in_the_call() -> None:
    """Nothing but its own rows comes from its inbox, and of those only what has an id."""
    layout = layout_of()
    clients = [Client(layout, bucket) for bucket in (2, 5, 1)]
    seat = Seat(clients, layout, members=4, bucket=5)
    ids_CK, x_CD = torch.full_like(seat.joined.taken_CK, -1), seat.joined.x_CD.clone()
    for number, client in enumerate(clients):
        x_TD, ids_TK, weights_TK = rows_of(client.bucket, number)
        ids_TK[:1], ids_TK[1:2] = torch.tensor([-1, 0, -1]), -1
        client.inbox[layout.x_at :] = 1
        client.send((x_TD, ids_TK, weights_TK))
        ids_CK[5 * number :][: client.bucket] = ids_TK
        asked_T = (ids_TK >= 0).any(1)
        x_CD[5 * number :][: client.bucket][asked_T] = x_TD[asked_T]
    assert seat.take() == 0b111
    assert torch.equal(seat.joined.taken_CK, ids_CK)
    assert torch.equal(seat.joined.x_CD.nan_to_num(9), x_CD.nan_to_num(9))


def test_a_member_gets_no_more_flags_than_it_has_blocks() -> None:
    layout = layout_of()
    clients = [Client(layout, 2, base=3), Client(layout, 5, base=9)]
    seat = Seat(clients, layout, members=2, bucket=5)
    for client in clients:
        client.send(rows_of(client.bucket))
    assert seat.take() == 0b11
    seat.answer()
    for client in clients:
        flags = client.answers[: layout.y_at].view(torch.int64)
        assert flags[: client.bucket].tolist() == [client.base + 1] * client.bucket
        assert not flags[client.bucket :].any()


def test_blocks_of_several_rows_with_blocks_of_one() -> None:
    """257 rows go in blocks of 2, 256 in twice as many of 1."""
    layout = layout_of(257)
    clients = Client(layout, 257), Client(layout, 256)
    seat = Seat(clients, layout, members=2, bucket=257)
    sent = [rows_of(client.bucket, client.bucket) for client in clients]
    for client, part in zip(clients, sent, strict=True):
        client.send(part)
    assert seat.take() == 0b11
    seat.answer()
    for client, part in zip(clients, sent, strict=True):
        assert torch.equal(client.sum(part), expected(part))


@pytest.mark.parametrize("why", ["no rows", "a block is missing", "later rows", "gone", "out"])
def test_who_does_not_come_is_left_out_for_the_rest_of_the_step(why: str) -> None:
    first, other, seat = pair()
    parts = rows_of(8), rows_of(8, 1)
    first.send(parts[0])
    if why != "no rows":
        other.send(parts[1], 20 if why == "later rows" else 0)
    if why == "a block is missing":
        other.inbox.view(torch.int64)[7] = 0
    if why in ("gone", "out"):
        seat.control[seat.at(1, MEMBER_GONE if why == "gone" else MEMBER_OUT)] = 1
    assert seat.take() == 0b01
    assert (seat.joined.taken_CK[8:] == -1).all()
    seat.answer()
    assert torch.equal(first.sum(parts[0]), expected(parts[0]))
    assert not other.answers.any()
    left = LATE if why in ("no rows", "a block is missing") else 1
    assert seat.out() == [0, left]
    for client, part in zip((first, other), parts, strict=True):
        client.send(part, 1)
    assert seat.take(1) == 0b01
    assert seat.control[FAILED] == 0
    assert seat.out() == [0, left], "as it was set first"


def test_rows_of_the_layer_before_are_no_rows() -> None:
    first, other, seat = pair()
    parts = rows_of(8), rows_of(8, 1)
    for client, part in zip((first, other), parts, strict=True):
        client.send(part)
    assert seat.take() == 0b11
    seat.answer()
    first.send(parts[0], 1)
    assert seat.take(1) == 0b01
    assert torch.equal(other.sum(parts[1]), expected(parts[1]))


@pytest.mark.parametrize("why", ["no rows", "aborted"])
def test_a_call_without_rows_answers_nobody(why: str) -> None:
    first, other, seat = pair()
    if why == "aborted":
        for client in (first, other):
            client.send(rows_of(8))
        seat.control[FAILED] = ABORTED
    assert seat.take() == 0
    assert seat.out() == ([LATE, LATE] if why == "no rows" else [1, 1])
    assert (seat.joined.taken_CK == -1).all()
    seat.answer()
    assert not first.answers.any()
    assert not other.answers.any()
    assert not seat.counts_E.any()


def test_nothing_is_answered_once_the_step_is_aborted() -> None:
    first, other, seat = pair()
    for client in (first, other):
        client.send(rows_of(8))
    assert seat.take() == 0b11
    seat.control[FAILED] = ABORTED
    seat.answer()
    assert not first.answers.any()
    assert not seat.counts_E.any()


def test_an_absent_slot_is_not_written_and_may_hold_anything() -> None:
    first, other, seat = pair(unsummed=True)
    parts = []
    for seed, client in enumerate((first, other)):
        client.answers.fill_(0xFF)
        client.answers[: client.layout.y_at] = 0
        x_TD, ids_TK, weights_TK = rows_of(8, seed)
        parts.append((x_TD, ids_TK, torch.where(ids_TK < 0, torch.nan, weights_TK)))
        client.send(parts[-1])
    assert seat.take() == 0b11
    seat.answer()
    for client, (x_TD, ids_TK, weights_TK) in zip((first, other), parts, strict=True):
        y_TKD = client.answers[client.layout.y_at :].view(torch.float32)[: x_TD.numel() * SLOTS].view(8, SLOTS, HIDDEN)
        assert torch.equal(y_TKD.isnan().all(2), ids_TK < 0)
        found = client.sum((x_TD, ids_TK, weights_TK))
        assert torch.equal(found, expected((x_TD, ids_TK, weights_TK.nan_to_num())))
