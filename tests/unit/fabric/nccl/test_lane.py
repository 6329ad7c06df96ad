"""Lanes that cannot be, mixed with seats that have none, and weights that go over them. Shown over gloo."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from threading import Semaphore
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from testkit.fabric.gloo_groups import GlooGroups
from testkit.fabric.peer_weights import digests_of
from testkit.fabric.tcp import (
    CALM,
    ONES,
    SECRET,
    Serve,
    doubles,
    hello,
    lanes_of,
    linked,
    seat_of,
    send,
    table_at,
    table_of,
)
from testkit.waiting import LIMIT_S, until

from services.errors import CallFailed, ConfigError, ExpertMeshError, ExpertUnavailable, LaneFailed, SeatLost, WireError
from services.experts.weight_sources import WeightSources, given
from services.fabric.nccl import lanes as nccl_lanes
from services.fabric.nccl import opening as nccl_opening
from services.fabric.nccl import weights as nccl_weights
from services.fabric.nccl.lane import Lane
from services.fabric.nccl.lanes import Lanes, lanes_for
from services.fabric.nccl.pair_store import PairStore
from services.fabric.nccl.weights import checksum, fetch
from services.fabric.tcp import connection as tcp_seat
from services.fabric.tcp.connect import Facts
from services.fabric.tcp.connection import SeatLink
from services.fabric.tcp.link import TcpLink
from services.model.expert_format import ALL_DENSE
from services.model.experts import ExpertWeights
from services.routing import ShardGroup, even_groups

IDS = (0, 2, 5)


def lanes_in_use(link: TcpLink) -> dict[int, bool]:
    return {seat.seat.number: seat.lane for seat in link._seats.links.values()}


def test_seats_with_and_without_a_lane_serve_one_link(served: Serve) -> None:
    with_lane, without = served(lane="gloo"), served()
    table = table_at(with_lane, without)
    with linked(table, lanes=lanes_of("gloo", required=False)) as link:
        until(lambda: lanes_in_use(link) == {0: True, 1: False})
        handles = [link.dispatch(0, ONES, torch.zeros(3, 1).long(), torch.ones(3, 1)) for _ in range(20)]
        assert all(torch.equal(link.combine(handle), 2 * ONES) for handle in handles)
    assert with_lane.counts.calls > 0
    assert without.counts.calls > 0


def test_a_seat_that_offers_a_lane_serves_links_without_one(served: Serve) -> None:
    with linked(table_at(served(lane="gloo"))) as link:
        assert doubles(link)
        assert lanes_in_use(link) == {0: False}


def held_proof(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No lane is proven before this is set."""
    go, real = threading.Event(), nccl_opening._prove

    def waiting(lane: Lane, until: float, broken: Callable[[], bool]) -> None:
        assert go.wait(LIMIT_S)
        real(lane, until, broken)

    monkeypatch.setattr(nccl_opening, "_prove", waiting)
    return go


def connections(link: TcpLink) -> dict[int, int]:
    return {seat.seat.number: seat.connections for seat in link._seats.links.values()}


def test_rows_go_in_frames_until_the_lane_is_there_and_none_is_lost(
    served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = held_proof(monkeypatch)
    with linked(table_at(served(lane="gloo")), lanes=lanes_of("gloo", required=False)) as link:
        assert doubles(link)
        assert lanes_in_use(link) == {0: False}
        go.set()
        since = 0
        while since < 50:  # some calls are under way whenever it changes
            since += lanes_in_use(link)[0]
            xs = [torch.randn(rows, 4) for rows in (1, 7, 64)]
            handles = [link.dispatch(0, x, torch.zeros(len(x), 1).long(), torch.ones(len(x), 1)) for x in xs]
            assert all(torch.equal(link.combine(h), 2 * x) for h, x in zip(handles, xs, strict=True))
        assert connections(link) == {0: 1}


def test_small_calls_go_in_frames_where_there_is_a_lane(served: Serve) -> None:
    """What goes by the lane waits for the lane alone: once that is ended, only calls in frames are answered."""
    server = served(lane="gloo")
    lanes = Lanes(GlooGroups(), least_bytes=64 * 4 * 4)
    with linked(table_at(server), lanes=lanes) as link:
        until(lambda: lanes_in_use(link)[0])
        for rows in (1, 63, 64, 3, 200, 5):
            x_TD = torch.randn(rows, 4)
            assert torch.equal(send(link, x_TD), 2 * x_TD)
        for peer in list(server._peers):
            assert peer.lane is not None
            peer.lane.abort()
        assert doubles(link)
        assert connections(link) == {0: 1}
        assert torch.equal(send(link, x_TD := torch.randn(64, 4)), 2 * x_TD), "sent again"
        assert connections(link)[0] > 1


def test_a_replica_whose_lane_is_being_made_is_used_only_where_there_is_no_other(
    served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = served(lane="gloo"), served()
    go = held_proof(monkeypatch)
    with linked(table_at(first, second), lanes=lanes_of("gloo", required=False)) as link:
        for _ in range(5):
            send(link, ONES)
        assert (first.counts.calls, second.counts.calls) == (0, 5)
        go.set()
        until(lambda: lanes_in_use(link)[0])
        send(link, ONES)
        assert (first.counts.calls, second.counts.calls) == (1, 5)


CARRIER = SimpleNamespace(
    opened=lambda *_: None,
    take=lambda *_: False,
    lost=lambda *_: None,
    busy=lambda *_: False,
    carries=lambda _seat, rows: rows <= 64,
)
"""Would take calls of up to 64 rows, but cannot yet."""


def looks(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each seat's thread has looked whether it is time for a lane."""
    seen, real = Counter[int](), SeatLink._maybe_open_lane

    def counted(self: SeatLink, connection: Any) -> None:
        real(self, connection)
        seen[self.seat.number] += 1

    monkeypatch.setattr(SeatLink, "_maybe_open_lane", counted)
    return seen


def test_where_small_calls_go_another_way_a_lane_comes_later_for_a_large_one(
    served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_seat, "LANE_LATER_S", 0.0)
    few, many, looked = torch.ones(64, 4), torch.ones(65, 4), looks(monkeypatch)
    options: dict[str, Any] = {"lanes": lanes_of("gloo", required=False), "extension": CARRIER}
    with linked(table_at(served(lane="gloo")), **options) as link:
        assert torch.equal(send(link, few), 2 * few)
        since = looked[0]
        until(lambda: looked[0] > since + 3, "its thread has looked again")
        assert lanes_in_use(link) == {0: False}, "nobody wants one"
        assert torch.equal(send(link, many), 2 * many)
        until(lambda: lanes_in_use(link)[0])
        assert torch.equal(send(link, many), 2 * many)
    monkeypatch.setattr(tcp_seat, "LANE_LATER_S", 0.5)
    began = time.monotonic()
    with linked(table_of(seat_of(served(lane="gloo"), 1)), **options) as link:
        assert torch.equal(send(link, many), 2 * many)
        until(lambda: lanes_in_use(link)[1])
        assert time.monotonic() - began >= 0.5


def test_such_lanes_are_opened_one_after_the_other_and_not_to_a_seat_that_goes(
    served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_seat, "LANE_LATER_S", 0.0)
    go, looked, opened, under_way = threading.Event(), looks(monkeypatch), list[int](), Semaphore(1)

    def slow(lane: Lane, until: float, broken: Callable[[], bool]) -> None:
        opened.append(under_way.acquire(blocking=False))
        assert go.wait(LIMIT_S)
        under_way.release()
        real(lane, until, broken)

    real = nccl_opening._prove
    monkeypatch.setattr(nccl_opening, "_prove", slow)
    seats = [seat_of(served(lane="gloo"), number, number) for number in range(3)]
    groups, many = even_groups([0], 8, 3), torch.ones(65, 4)
    with linked(table_of(*seats, groups=groups), lanes=lanes_of("gloo", required=False), extension=CARRIER) as link:
        for expert in (0, 3, 7):
            assert torch.equal(send(link, many, expert), 2 * many)
            until(lambda: opened, "the lane to the first seat is being opened")
        since = dict(looked)
        until(lambda: all(looked[seat] > since[seat] + 3 for seat in (1, 2)), "the others' threads have looked again")
        link.apply(table_of(*seats[:2], groups=groups, epoch=2))
        until(lambda: set(link._seats.links) == {0, 1} or 2 not in lanes_in_use(link), "the third is gone")
        go.set()
        until(lambda: all(lanes_in_use(link).values()))
    assert opened == [True, True], "one at a time, and none to the third"


def test_a_required_lane_comes_at_once(served: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_seat, "LANE_LATER_S", 3600.0)
    with linked(table_at(served(lane="gloo")), lane="gloo", extension=CARRIER) as link:
        assert lanes_in_use(link) == {0: True}


@pytest.mark.parametrize(
    ("end", "after", "required"),
    [("_prove", True, False), ("_echo", False, False), ("_prove", False, True)],
    ids=["the attention worker's", "the expert worker's", "a required lane's"],
)
def test_where_an_end_of_a_lane_fails_rows_go_in_frames_or_nowhere(
    served: Serve, monkeypatch: pytest.MonkeyPatch, end: str, after: bool, required: bool
) -> None:
    """``after``: bytes went there and back, and the other end takes the lane for good."""
    real = getattr(nccl_opening, end)

    def failing(*opening: Any) -> None:
        if after:
            real(*opening)
        raise LaneFailed("No memory.")

    monkeypatch.setattr(nccl_opening, end, failing)
    options: dict[str, Any] = {"ready": False, "unavailable_s": 0.3} if required else {}
    with linked(table_at(served(lane="gloo")), lanes=lanes_of("gloo", required=required), **options) as link:
        (seat,) = link._seats.links.values()
        if required:
            until(lambda: seat.problem is not None)
            with pytest.raises(ExpertUnavailable, match="No memory"):
                send(link, ONES)
        else:
            until(lambda: not seat.awaits_lane)
            assert doubles(link)
            assert (seat.lane, seat.connections) == (False, 1)


def test_openings_that_are_stuck_are_counted_and_no_thread_is_given_to_more(
    served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making a group is stuck at the attention worker's end, as it may inside NCCL."""
    released, asked = threading.Event(), threading.Semaphore(0)

    class Stuck(GlooGroups):
        def make(self, *_: Any) -> Any:
            asked.release()
            released.wait(20)
            raise RuntimeError("released")

    monkeypatch.setattr(nccl_lanes, "MAX_STUCK", 1)
    lanes = Lanes(Stuck(), opening_s=0.3)
    try:
        for number in range(2):
            with linked(table_of(seat_of(served(lane="gloo"), number)), lanes=lanes) as link:
                assert doubles(link)
                assert lanes_in_use(link) == {number: False}
        assert lanes.stuck() == 1
        assert asked.acquire(blocking=False)
        assert not asked.acquire(blocking=False), "it was tried once more"
    finally:
        released.set()
    until(lambda: lanes.stuck() == 0)


def test_rows_of_a_call_are_bounded_on_the_lane(served: Serve) -> None:
    server = served(lane="gloo", max_bytes=4096)
    with linked(table_at(server), lane="gloo") as link:
        x_TD = torch.randn(400, 4)  # 24 bytes each
        assert torch.equal(send(link, x_TD), 2 * x_TD)
        assert server.counts.calls == 3
        (seat,) = link._seats.links.values()
        assert seat._connection is not None
        with pytest.raises(WireError, match="announced 1000000000 rows"):
            seat._connection.peer.receive_rows(1_000_000_000, 4, torch.float32)


def test_a_store_ends_its_wait() -> None:
    sent: list[tuple[str, bytes]] = []
    store = PairStore("a/", lambda key, value: sent.append((key, value)), 0.05)
    store.set("x", b"1")
    assert (sent, store.get("x")) == ([("a/x", b"1")], b"1")
    with pytest.raises(SeatLost):
        store.get("y")
    waiting = PairStore("a/", lambda *_: None, 60)
    threading.Timer(0.05, waiting.close).start()
    with pytest.raises(SeatLost):
        waiting.get("y")


def test_a_lane_that_the_machine_cannot_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="nccl needs a GPU"):
        lanes_for("nccl", torch.device("cpu"))
    assert lanes_for("auto", torch.device("cpu")) is None
    assert lanes_for("tcp", torch.device("cpu")) is None


# weights


def layers() -> dict[int, ExpertWeights]:
    return {
        layer: ExpertWeights(
            expert_ids=IDS, w_gate_up_E2FD=torch.randn(3, 2 * 6, 4), w_down_EDF=torch.randn(3, 4, 6)
        )
        for layer in (0, 1)
    }  # fmt: skip


class Spec:
    hidden_size, expert_ffn, experts, expert_bias = 4, 6, ALL_DENSE, False


def weight_sources(*seats: Any, group: ShardGroup, held: dict[int, ExpertWeights]) -> WeightSources:
    facts = Facts(hello=hello(), secret=SECRET, timing=CALM, max_bytes=1 << 20, lanes=lanes_of("gloo"))
    table, digests = table_of(*seats, groups=[group], experts=3), digests_of(held, 6)
    return WeightSources(lambda: table, facts, Spec(), torch.float32, lambda: digests)  # type: ignore[arg-type]


GROUP = ShardGroup(number=0, experts={0: IDS, 1: IDS})


class Reported:
    """A loading's progress."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []
        self.parts: list[int] = []

    def begin(self, what: str, total_bytes: int) -> None:
        self.begun.append((what, total_bytes))

    def advance(self, nbytes: int) -> None:
        self.parts.append(nbytes)


def test_weights_come_from_a_seat_that_holds_them_and_are_reported_tensor_by_tensor(served: Serve) -> None:
    held, reported = layers(), Reported()
    server = served(lane="gloo", weights=given(held))
    got = weight_sources(seat_of(server, 0), group=GROUP, held=held).weights(GROUP, progress=reported)
    assert got is not None
    for layer, weights in held.items():
        assert torch.equal(got[layer].w_gate_up_E2FD, weights.w_gate_up_E2FD)
        assert torch.equal(got[layer].w_down_EDF, weights.w_down_EDF)
        assert got[layer].expert_ids == IDS
    assert reported.begun == [("expert weights from experts-0 (seat 0)", sum(reported.parts))]
    assert sorted(reported.parts) == [3 * 4 * 6 * 4] * 2 + [3 * 2 * 6 * 4 * 4] * 2


def test_a_peer_that_went_away_leaves_it_to_the_next_and_then_to_the_disk(served: Serve) -> None:
    held = layers()
    gone, well = (served(lane="gloo", weights=given(held)) for _ in range(2))
    sources = weight_sources(seat_of(gone, 0), seat_of(well, 1), group=GROUP, held=held)
    gone.close()
    assert sources.weights(GROUP) is not None
    well.close()
    assert sources.weights(GROUP) is None


def test_a_peer_of_another_cut_or_without_lane_is_no_source(served: Serve) -> None:
    other = ShardGroup(number=0, experts={0: (0, 1), 1: IDS})
    held = layers()
    server, without = served(lane="gloo", weights=given(held)), served(weights=given(held))
    assert weight_sources(seat_of(server, 0), group=other, held=held).weights(GROUP) is None
    assert weight_sources(seat_of(server, 0), group=other, held=held).weights(other) is None
    assert weight_sources(seat_of(without, 1), group=GROUP, held=held).weights(GROUP) is None


def test_a_damaged_tensor_is_refused(served: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = served(lane="gloo", weights=given(layers()))
    facts = Facts(hello=hello(), secret=SECRET, timing=CALM, max_bytes=1 << 20, lanes=lanes_of("gloo"))
    down = (3, 4, 6), torch.float32
    forms = {0: {"gate_up": ((3, 12, 4), torch.float32), "down": down}}

    def asked(forms: nccl_weights.Forms) -> ExpertMeshError:
        with pytest.raises(ExpertMeshError) as caught:
            fetch(seat_of(server, 0), facts, {0: IDS}, forms)
        return caught.value

    assert isinstance(asked({0: {"gate_up": ((3, 12, 5), torch.float32), "down": down}}), WireError)
    real, here = checksum, threading.get_ident()
    monkeypatch.setattr(nccl_weights, "checksum", lambda tensor: real(tensor) + (threading.get_ident() == here))
    assert "has another checksum" in asked(forms).message
    with pytest.raises(CallFailed, match="are not held here"):
        fetch(seat_of(server, 0), facts, {0: (0, 1, 2)}, forms)


def test_parts_of_another_type_are_refused(served: Serve) -> None:
    server = served(lane="gloo", weights={0: (IDS, {"down.scales": torch.zeros(3, 12, 1).half()})})
    facts = Facts(hello=hello(), secret=SECRET, timing=CALM, max_bytes=1 << 20, lanes=lanes_of("gloo"))
    words = "sent down.scales float16 .3, 12, 1. of layer 0, expected bfloat16 .3, 12, 1."
    with pytest.raises(WireError, match=words):
        fetch(seat_of(server, 0), facts, {0: IDS}, {0: {"down.scales": ((3, 12, 1), torch.bfloat16)}})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_the_checksum_sees_every_word_and_its_place(dtype: torch.dtype) -> None:
    one = torch.randint(0, 100, (3, 5001)).to(dtype)
    assert checksum(one) == checksum(one.clone())
    for index in ((0, 0), (1, 2500), (2, 5000)):
        other = one.clone()
        other[index] += 1
        assert checksum(other) != checksum(one)
    swapped = one.clone()
    swapped[0, 4], swapped[2, 4] = one[2, 4] + 1, one[0, 4]
    assert checksum(swapped) != checksum(one)
    assert checksum(one.roll(1, 0)) != checksum(one)
