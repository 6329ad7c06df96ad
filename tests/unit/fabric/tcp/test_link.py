"""What a TcpLink does with answers that are late, wrong or never come, and how a server queues what it gets."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import torch
from testkit.fabric.tcp import (
    ONES,
    Compute,
    Serve,
    double,
    doubles,
    linked,
    seat_of,
    send,
    table_at,
    table_of,
    tcp_link,
)
from testkit.waiting import LIMIT_S, until
from torch import Tensor

from services.errors import ExpertUnavailable, FingerprintMismatch
from services.fabric.local import LocalLink
from services.fabric.tcp.connection import SeatLink
from services.fabric.tcp.frames import Kind
from services.fabric.tcp.inbox import Call, Inbox
from services.fabric.tcp.link import TcpLink
from services.fabric.tcp.server import ExpertServer
from services.model.experts import ExpertShard, ExpertWeights
from services.routing import even_groups


class Latch:
    """A compute that counts its calls and waits until it may go on."""

    def __init__(self, compute: Compute = double) -> None:
        self.entered, self.open = threading.Semaphore(0), threading.Event()
        self.calls: list[tuple[int, int]] = []
        self._compute = compute

    def __call__(self, layer: int, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        self.calls.append((layer, len(x_TD)))
        self.entered.release()
        assert self.open.wait(LIMIT_S)
        return self._compute(layer, x_TD, ids_TK, weights_TK)


def dispatch(link: TcpLink, rows: int, layer: int = 0):  # type: ignore[no-untyped-def]
    return link.dispatch(layer, torch.full((rows, 4), float(rows)), torch.zeros(rows, 1).long(), torch.ones(rows, 1))


def random_layer(dtype: torch.dtype) -> dict[int, ExpertWeights]:
    return {
        0: ExpertWeights(
            expert_ids=tuple(range(8)),
            w_gate_up_E2FD=(torch.randn(8, 64, 32) / 6).to(dtype),
            w_down_EDF=(torch.randn(8, 32, 32) / 6).to(dtype),
        )
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("replicas", [[1], [2, 1], [1, 1, 1]])
def test_flat_equals_local_to_the_bit(dtype: torch.dtype, replicas: list[int]) -> None:
    layers = random_layer(dtype)
    x_TD, ids_TK = torch.randn(24, 32).to(dtype), torch.rand(24, 8).topk(3).indices
    ids_TK[0, 1] = -1
    weights_TK = torch.rand(24, 3)
    local = LocalLink(ExpertShard(layers, num_experts=8).by_layer(), num_experts=8)
    expected_TD = local.combine(local.dispatch(0, x_TD, ids_TK, weights_TK))
    with tcp_link(layers, 8, replicas) as link:
        y_TD = link.combine(link.dispatch(0, x_TD, ids_TK, weights_TK))
        assert link.expert_rows() == local.expert_rows()
    assert torch.equal(y_TD.view(torch.uint8), expected_TD.view(torch.uint8))


def test_reduced_adds_in_another_order() -> None:
    layers, ids_TK, weights_TK = random_layer(torch.float32), torch.rand(24, 8).topk(3).indices, torch.rand(24, 3)
    x_TD = torch.randn(24, 32)
    expected_TD = ExpertShard(layers, num_experts=8).forward(0, x_TD, ids_TK, weights_TK)
    with tcp_link(layers, 8, [2, 1, 1], reduced=True) as link:
        y_TD = link.combine(link.dispatch(0, x_TD, ids_TK, weights_TK))
    torch.testing.assert_close(y_TD, expected_TD, atol=1e-5, rtol=1e-5)


def test_a_large_dispatch_goes_in_calls_that_the_worker_takes(served: Serve) -> None:
    server = served(inbox_rows=4)
    x_TD = torch.randn(11, 4)
    with linked(table_at(server)) as link:
        assert torch.equal(send(link, x_TD), 2 * x_TD)
    assert server.counts.calls == 3


def test_rows_go_to_the_replica_with_the_least_outstanding(served: Serve) -> None:
    latches = Latch(), Latch()
    servers = [served(latch) for latch in latches]
    with linked(table_at(*servers)) as link:
        handles = [dispatch(link, rows) for rows in (5, 2, 2, 2)]  # to seat 0, then 1 until that has more
        until(lambda: servers[0].rows_in_flight == 5 and servers[1].rows_in_flight == 6)
        for latch in latches:
            latch.open.set()
        for rows, handle in zip((5, 2, 2, 2), handles, strict=True):
            assert (link.combine(handle) == 2 * rows).all()


def test_calls_one_at_a_time_go_to_all_replicas_by_their_speed_newcomers_too(served: Serve) -> None:
    servers = [served(), served(), served()]
    seats = [seat_of(server, number) for number, server in enumerate(servers)]
    seats[1] = msgspec.structs.replace(seats[1], capacity=2.0)

    def calls() -> list[int]:
        return [server.counts.calls for server in servers]

    with linked(table_of(*seats[:2])) as link:
        for _ in range(30):
            link.combine(dispatch(link, 2))
        assert calls() == [10, 20, 0]
        link.apply(table_of(*seats, epoch=2))
        until(lambda: len(link.usable()) == 3)
        for _ in range(40):
            link.combine(dispatch(link, 2))
    assert calls() == [pytest.approx(20, abs=1), pytest.approx(40, abs=1), pytest.approx(10, abs=1)]


def test_workers_that_meet_at_a_replica_spread_over_all(served: Serve) -> None:
    """Each has one call under way, and knows nothing of the others."""
    lock, computing, largest = threading.Lock(), 0, 0

    def slow(_layer: int, x_TD: Tensor, _ids_TK: Tensor, _weights_TK: Tensor) -> Tensor:
        nonlocal computing, largest
        with lock:
            computing += 1
            largest = max(largest, computing)
        time.sleep(0.02)
        with lock:
            computing -= 1
        return x_TD * 2

    servers = [served(slow, join_rows=1) for _ in range(3)]
    table = table_at(*servers)

    def work(link: TcpLink) -> None:
        for _ in range(30):
            link.combine(dispatch(link, 1))

    with linked(table) as one, linked(table) as two, linked(table) as three, ThreadPoolExecutor(3) as pool:
        for working in [pool.submit(work, link) for link in (one, two, three)]:
            working.result()
    assert [server.counts.calls for server in servers] == [30, 30, 30]
    assert largest == 3


def test_calls_are_joined_by_layer_in_the_order_of_arrival(served: Serve) -> None:
    latch = Latch()
    server = served(latch, experts={0: [0], 1: [0]}, join_rows=8)
    groups = even_groups([0, 1], 1, 1)
    with linked(table_of(seat_of(server, 0), groups=groups, experts=1)) as link:
        handles = [dispatch(link, 1)]
        assert latch.entered.acquire(timeout=LIMIT_S)
        for rows, layer in ((2, 1), (3, 0), (4, 1), (5, 0), (3, 1)):
            handles.append(dispatch(link, rows, layer))
        until(lambda: server.rows_in_flight == 18)
        latch.open.set()
        for rows, handle in zip((1, 2, 3, 4, 5, 3), handles, strict=True):
            assert (link.combine(handle) == 2 * rows).all()
    assert latch.calls == [(0, 1), (1, 2 + 4), (0, 3 + 5), (1, 3)]
    assert (server.counts.calls, server.counts.computations) == (6, 4)
    assert server.counts.layer_rows == {0: 9, 1: 9}
    assert server.counts.expert_rows == {0: {0: 9}, 1: {0: 9}}


def test_a_full_inbox_stops_reading(served: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peers of a worker that holds back still hear that it lives."""
    latch, heard = Latch(), list[Kind]()
    server = served(latch, inbox_rows=10)
    with linked(table_at(server), call_s=60) as link:
        handles = [dispatch(link, 4) for _ in range(6)]
        assert latch.entered.acquire(timeout=LIMIT_S)
        until(lambda: server.rows_in_flight == 8)
        (seat,) = link._seats.links.values()
        take = seat._take
        monkeypatch.setattr(seat, "_take", lambda link, frame: (heard.append(frame.kind), take(link, frame)))
        until(lambda: heard.count(Kind.ALIVE) > 5, "the worker says that it lives")
        most = server.rows_in_flight
        latch.open.set()
        assert all((link.combine(handle) == 8).all() for handle in handles)
        assert server.counts.calls == 6
    assert most == 8


def test_the_line_for_room_is_served_in_order() -> None:
    inbox, done = Inbox(4, 4), []

    def call(rows: int) -> Call:
        x_RD = torch.zeros(rows, 1)
        return Call(layer=0, reduced=False, x_RD=x_RD, ids_RK=x_RD.int(), weights_RK=x_RD, answer=lambda _: None)

    first, large, small = call(3), call(4), call(1)
    inbox.put(first)
    threads = []
    for name, waiting in (("large", large), ("small", small)):
        threads.append(threading.Thread(target=lambda n=name, w=waiting: (inbox.put(w), done.append(n))))
        threads[-1].start()
        until(lambda: len(inbox._line) == len(threads))
    assert inbox.rows_in_flight == 3
    inbox.release(first)
    until(lambda: done == ["large"])
    assert inbox.rows_in_flight == 4
    inbox.release(large)
    for thread in threads:
        thread.join(5)
    assert done == ["large", "small"]


def test_an_error_answers_its_call_alone(served: Serve) -> None:
    latch = Latch(lambda layer, x_TD, ids_TK, w: 1 / 0 if (x_TD == 7).any() else double(layer, x_TD, ids_TK, w))
    server = served(latch)
    with linked(table_at(server), unavailable_s=1.0) as link:
        handles = {1: dispatch(link, 1)}
        assert latch.entered.acquire(timeout=LIMIT_S)
        handles |= {rows: dispatch(link, rows) for rows in (2, 7, 3)}
        until(lambda: server.rows_in_flight == 13)
        latch.open.set()
        assert all((link.combine(handles[rows]) == 2 * rows).all() for rows in (1, 2, 3))
        with pytest.raises(ExpertUnavailable, match=r"group 0 .* layer 0 .*ZeroDivisionError"):
            link.combine(handles[7])
        assert doubles(link)
    assert server.counts.failed >= 1


class Sick:
    """A compute that raises for its first ``failures`` calls."""

    def __init__(self, failures: int) -> None:
        self.calls, self._failures = 0, failures

    def __call__(self, layer: int, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        self.calls += 1
        if self.calls <= self._failures:
            raise MemoryError("for a moment")
        return double(layer, x_TD, ids_TK, weights_TK)


def test_the_only_replica_is_asked_again_when_it_is_well(served: Serve) -> None:
    sick = Sick(3)
    server = served(sick)
    with linked(table_at(server), unavailable_s=LIMIT_S) as link:
        assert doubles(link)
    assert sick.calls == 4


def test_a_replica_that_always_fails_is_asked_a_bounded_number_of_times(served: Serve) -> None:
    sick = Sick(1000)
    server = served(sick)
    with linked(table_at(server), unavailable_s=0.5) as link:
        began = time.monotonic()
        with pytest.raises(ExpertUnavailable, match="for a moment"):
            send(link, ONES)
        assert time.monotonic() - began > 0.4, "it was tried for unavailable_s"
    assert 2 <= sick.calls <= 16


def test_the_only_replica_is_asked_again_over_a_new_connection(served: Serve) -> None:
    server = served()
    cut: list[int] = []
    compute = server._loop._compute

    def cutting(layer: int, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        if len(cut) < 2:
            cut.append(1)
            for peer in list(server._peers):
                peer.shut()
        return compute(layer, x_TD, ids_TK, weights_TK)

    server._loop._compute = cutting
    with linked(table_at(server), unavailable_s=LIMIT_S) as link:
        assert doubles(link)
        assert link.resent_rows() == {"lost": 2 * len(ONES)}
    assert len(cut) == 2


def test_a_seat_whose_thread_meets_an_unexpected_error_connects_again(
    served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [RuntimeError("no memory on the device")]
    rows_of = SeatLink._rows_of

    def failing(self: SeatLink, *args: Any) -> Any:
        if errors:
            raise errors.pop()
        return rows_of(self, *args)

    monkeypatch.setattr(SeatLink, "_rows_of", failing)
    with linked(table_at(served()), unavailable_s=LIMIT_S) as link:
        assert doubles(link)
        assert next(iter(link._seats.links.values())).connections == 2


def test_an_error_is_retried_elsewhere(served: Serve) -> None:
    broken, well = served(lambda *_: 1 / 0), served()
    with linked(table_at(broken, well)) as link:
        assert doubles(link)
        assert link.resent_rows() == {"failed": len(ONES)}
    assert broken.counts.failed == 1


def test_rows_that_arrive_are_not_sent_again_and_all_bytes_are_counted(served: Serve) -> None:
    with linked(table_at(served())) as link:
        send(link, torch.ones(1, 4))
        few = link.exchanged_bytes()
        send(link, torch.ones(101, 4))
        many = link.exchanged_bytes()
        assert link.resent_rows() == {}
        assert link.transport == "tcp"
    row = 4 * 4
    assert many["tcp", "sent"] - 2 * few["tcp", "sent"] < 100 * row + 100 * 4, "the greeting is sent once"
    assert many["tcp", "sent"] - few["tcp", "sent"] >= 101 * (row + 4), "rows with an id each"
    assert many["tcp", "received"] - few["tcp", "received"] >= 101 * row
    assert ("nccl", "sent") not in many


def test_a_server_whose_compute_thread_died_says_so_and_answers_nobody(served: Serve) -> None:
    dying, well = served(), served()

    def die(_calls: object) -> None:
        raise MemoryError("the thread is gone")

    dying._loop._results = die  # type: ignore[assignment,method-assign]
    with linked(table_at(dying, well), call_s=600) as link:
        began = time.monotonic()
        assert doubles(link)
        assert time.monotonic() - began < LIMIT_S, "it does not wait for the call's deadline"
        until(lambda: link.usable() == (1,))
    assert isinstance(dying.failure, MemoryError)
    assert well.failure is None


def test_experts_that_a_seat_does_not_hold_are_an_error(served: Serve) -> None:
    server = served(experts={0: [0, 1]})
    with linked(table_at(server), unavailable_s=1.0) as link:
        with pytest.raises(ExpertUnavailable, match=r"does not hold experts \[5\]"):
            send(link, ONES, expert=5)
        assert torch.equal(send(link, ONES, expert=1), 2 * ONES)


def quarantine_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("quarantined for")]


def test_a_line_about_a_broken_connection_names_the_seat_once(served: Serve, caplog: pytest.LogCaptureFixture) -> None:
    server = served()
    with caplog.at_level(logging.WARNING), linked(table_at(server)):
        server.close()
        until(lambda: caplog.messages)
    assert [said.count("seat 0 ") for said in caplog.messages] == [1] * len(caplog.messages)


def test_nan_of_one_replica_is_its_own(served: Serve, caplog: pytest.LogCaptureFixture) -> None:
    sick, well = served(lambda _l, x_TD, *_: torch.full_like(x_TD, torch.nan)), served()
    with caplog.at_level(logging.WARNING), linked(table_at(sick, well)) as link:
        for _ in range(3):
            assert doubles(link)
        assert link.resent_rows() == {"not_finite": len(ONES)}
    assert sick.counts.calls == 1
    assert len(quarantine_lines(caplog)) == 1
    assert "seat 0" in quarantine_lines(caplog)[0]


def test_nan_of_every_replica_is_the_models(served: Serve, caplog: pytest.LogCaptureFixture) -> None:
    servers = [served(lambda _l, x_TD, *_: torch.full_like(x_TD, torch.nan)) for _ in range(2)]
    with linked(table_at(*servers)) as link:
        assert send(link, ONES).isnan().all()
    assert [server.counts.calls for server in servers] == [1, 1]
    assert not quarantine_lines(caplog)


def test_nan_in_a_row_is_nobodys_fault(served: Serve) -> None:
    servers = [served(), served()]
    with linked(table_at(*servers)) as link:
        assert send(link, torch.full((2, 4), torch.nan)).isnan().all()
    assert sum(server.counts.calls for server in servers) == 1


def test_an_answer_of_another_shape_puts_the_seat_into_quarantine(
    served: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrong, well = served(), served()

    def short(self: ExpertServer, peer: object, facts: object, call: Call, result: Tensor) -> None:
        real(self, peer, facts, call, result[:1] if self is wrong else result)  # type: ignore[arg-type]

    real = ExpertServer._answer
    monkeypatch.setattr(ExpertServer, "_answer", short)
    with linked(table_at(wrong, well), quarantine_s=2.0) as link:
        assert doubles(link)
        assert doubles(link)
        assert (wrong.counts.calls, well.counts.calls) == (1, 2)
        assert link.resent_rows() == {"bad_answer": len(ONES)}
        assert len(quarantine_lines(caplog)) == 1
        until(lambda: send(link, ONES) is not None and wrong.counts.calls == 2)  # in time it may take calls again


def test_a_late_answer_is_dropped(served: Serve) -> None:
    latch = Latch()
    slow, well = served(latch), served()
    with linked(table_at(slow, well), call_s=1.0) as link:
        assert doubles(link)
        assert link.resent_rows() == {"late": len(ONES)}
        assert latch.entered.acquire(timeout=LIMIT_S)
        latch.open.set()
        until(lambda: slow.counts.calls == 1 and slow.rows_in_flight == 0)
        assert doubles(link)
        until(lambda: all(seat.outstanding_rows == 0 for seat in link._seats.links.values()))


def test_the_only_replica_may_be_late(served: Serve) -> None:
    latch = Latch()
    slow = served(latch)
    with linked(table_at(slow), call_s=0.1, unavailable_s=LIMIT_S) as link:
        threading.Timer(0.4, latch.open.set).start()
        assert doubles(link)
    assert slow.counts.calls == 1


def test_rows_wait_for_a_replica_to_come(served: Serve) -> None:
    server = served()
    with linked(table_of(), ready=False, unavailable_s=LIMIT_S) as link:
        assert link.missing() == (0,)
        handle = dispatch(link, 3)
        link.apply(table_at(server, epoch=2))
        assert (link.combine(handle) == 6).all()
        assert not link.missing()


def test_rows_in_flight_outlive_another_cut_of_the_groups(served: Serve) -> None:
    """Group 0 of the new table holds other experts; the part goes where its experts are."""
    latch = Latch()
    lost, low, high = served(latch), served(experts={0: range(4)}), served(experts={0: range(4, 8)})
    with linked(table_at(lost)) as link:
        handle = link.dispatch(0, ONES, torch.full((3, 1), 6), torch.ones(3, 1))
        assert latch.entered.acquire(timeout=LIMIT_S)
        seats = seat_of(low, 1, 0), seat_of(high, 2, 1)
        link.apply(table_of(*seats, groups=even_groups([0], 8, 2), epoch=2))
        assert link.wait_ready(LIMIT_S)
        latch.open.set()
        lost.close()
        assert torch.equal(link.combine(handle), 2 * ONES)


def test_an_answer_that_a_seat_owes_keeps_the_last_table_that_lists_it_in_use(served: Serve) -> None:
    latch = Latch()
    leaving, staying = served(latch), served()
    seats = seat_of(leaving, 0), seat_of(staying, 1)
    with linked(table_of(seats[0])) as link:
        handle = dispatch(link, 3)
        assert latch.entered.acquire(timeout=LIMIT_S)
        link.apply(table_of(*seats, epoch=2))
        assert link.oldest_epoch() == 2
        for epoch in 3, 4:
            link.apply(table_of(seats[1], epoch=epoch))
            assert link.oldest_epoch() == 2
        latch.open.set()
        assert (link.combine(handle) == 6).all()
        assert link.oldest_epoch() == 4


def test_a_seat_that_owes_nothing_may_go_while_others_are_waited_for(served: Serve) -> None:
    """Two seats that leave at once, one table after the other: neither waits until the other one is replaced."""
    groups = even_groups([0], 8, 2)
    leaving, next_one = served(experts={0: range(4, 8)}), served(experts={0: range(4)})
    with linked(table_of(seat_of(leaving, 0, 1), groups=groups), unavailable_s=20) as link:
        handle = link.dispatch(0, ONES, torch.tensor([[1], [6], [7]]), torch.ones(3, 1))
        until(lambda: leaving.counts.calls == 1)
        link.apply(table_of(groups=groups, epoch=2))
        until(lambda: link.oldest_epoch() == 2)
        assert leaving.drain(LIMIT_S)
        link.apply(table_of(seat_of(next_one, 1), groups=groups, epoch=3))
        assert torch.equal(link.combine(handle), 2 * ONES)
    assert (leaving.counts.calls, next_one.counts.calls) == (1, 1)


def test_older_tables_change_nothing_and_other_models_are_refused(served: Serve) -> None:
    server = served()
    with linked(table_at(server, epoch=3)) as link:
        link.apply(table_of(epoch=2))
        assert not link.missing()
        other = table_of(epoch=4)
        with pytest.raises(FingerprintMismatch):
            link.apply(type(other)(epoch=4, fingerprint="another", num_experts=8, groups=other.groups))


@pytest.mark.parametrize(
    ("serving", "lane", "message"),
    [
        ({"seat": 7}, "", "has become seat 7 of worker"),
        ({"secret": b"another"}, "", "does not know this cluster's secret"),
        ({}, "gloo", "There can be no gloo lane to .*: it offers none"),
    ],
    ids=["another worker at the address", "another secret", "no lane"],
)
def test_a_seat_that_cannot_be_used_is_named_in_the_error(
    served: Serve, serving: dict[str, Any], lane: str, message: str
) -> None:
    server = served(**serving)
    with linked(table_at(server), ready=False, lane=lane, unavailable_s=0.3) as link:
        until(lambda: all(seat.problem is not None for seat in link._seats.links.values()))
        with pytest.raises(ExpertUnavailable, match=message):
            send(link, ONES)


def test_close_ends_a_combine_that_waits(served: Serve) -> None:
    latch = Latch()
    server = served(latch)
    with linked(table_at(server), unavailable_s=60, call_s=60) as link:
        handle = dispatch(link, 2)
        assert latch.entered.acquire(timeout=LIMIT_S)
        threading.Timer(0.1, link.close).start()
        with pytest.raises(ExpertUnavailable):
            link.combine(handle)
    latch.open.set()


def test_drain_finishes_what_is_here_and_refuses_the_rest(served: Serve) -> None:
    latch = Latch()
    leaving, staying = served(latch), served()
    with ThreadPoolExecutor(1) as pool, linked(table_at(leaving, staying)) as link:
        handle = dispatch(link, 3)
        assert latch.entered.acquire(timeout=LIMIT_S)
        draining = pool.submit(leaving.drain, LIMIT_S)
        until(lambda: link.usable() == (1,))
        assert doubles(link)
        latch.open.set()
        assert (link.combine(handle) == 6).all()
        assert draining.result(LIMIT_S)
    assert (leaving.counts.calls, staying.counts.calls) == (1, 1)


def test_a_leaving_answer_is_resent(served: Serve) -> None:
    """The announcement has not reached the link yet when it dispatches."""
    leaving, staying = served(), served()
    with linked(table_at(leaving, staying)) as link:
        leaving._leaving = True
        assert doubles(link)
        assert link.resent_rows() == {"leaving": len(ONES)}
    assert (leaving.counts.calls, staying.counts.calls) == (0, 1)


def test_a_call_that_becomes_late_between_two_looks_is_looked_at_again(served: Serve) -> None:
    latch = Latch()
    slow = served(latch)
    with linked(table_at(slow)) as link:
        handle = link.dispatch(0, ONES, torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
        (part,) = handle.parts
        assert part.call is not None
        part.call.deadline = time.monotonic() - 1
        assert link._seats.wake_at(part) == part.call.deadline
        latch.open.set()
        assert torch.equal(link.combine(handle), 2 * ONES)
