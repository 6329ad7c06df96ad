"""Totals that members report become work, share and ratios."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.messages import (
    LATENCY_BUCKETS,
    LATENCY_EDGES,
    ExpertInfo,
    GatewayLoad,
    SeatLoad,
    SeatReport,
    WorkerInfo,
    WorkerLoad,
)
from services.queue.loads import Loads
from services.queue.scheduler_side import QueueDepth, WorkerState
from services.queue.seats import SeatState
from services.scheduler.scaling import Load, Replicas, Signals, Target
from services.scheduler.scaling.meter import Meter, Reading, held_back
from services.scheduler.scaling.rates import BEYOND, Places, Rates, Share

LEASE_S = 6.0
HOT, COLD = Target("experts", 0), Target("experts", 1)
ATTENTION, GATEWAY = Target("attention"), Target("gateway")
NONE = (0,) * LATENCY_BUCKETS
PROCESS: dict[str, Any] = {"fingerprint": "f", "host": "h", "pid": 1, "version": "0"}


def seat(name: str, group: int, up_s: float, busy: float, waited: float = 0.0, rows: int = 0) -> SeatState:
    """Busy and waited are shares of its uptime."""
    load = SeatLoad(up_s=up_s, busy_s=busy * up_s, waited_s=waited * up_s)
    report = SeatReport(status="ready", group=group, digest="d", outstanding_rows=rows, load=load)
    info = ExpertInfo(id=name, port=1, memory_bytes=1, **PROCESS)
    return SeatState(number=1, info=info, status="ready", report=report, dismissed=False, assigned="d")


def worker(name: str, requests: int = 0, tokens: int = 0) -> WorkerState:
    info = WorkerInfo(id=name, model="m", kv_tokens=1000, max_num_seqs=8, max_model_len=64, **PROCESS)
    return WorkerState(
        info=info, outstanding_tokens=tokens, outstanding_requests=requests, credit_tokens=1000, credit_requests=9
    )


def gateway(up_s: float, cpu: float = 0.1, came: int = 0, ended: int = 0, **latencies: tuple[int, ...]) -> GatewayLoad:
    counts = {"ttft": NONE, "tpot": NONE} | latencies
    return GatewayLoad(up_s=up_s, cpu_s=cpu * up_s, came=came, ended=ended, **counts)


def reading(at: float, **how: object) -> Reading:
    """Two seats of the hot group, half busy, one idle one of the other, two workers in steps all the time."""
    seats = [seat("a", 0, at, 0.5), seat("b", 0, at, 0.3), seat("c", 1, at, 0.1)]
    stepping = {name: WorkerLoad(up_s=at, busy_s=at, stalled_s={0: 0.4 * at, 1: 0.1 * at}) for name in ("v", "w")}
    usual = Reading(
        at=at,
        seats=seats,
        workers=[worker("v", 2), worker("w", 4)],
        loads=Loads(workers=stepping, gateways={"g": gateway(at)}),
        depth=QueueDepth(requests=0, tokens=0, dead_letters=0),
    )
    return replace(usual, **how)  # type: ignore[arg-type]


def after(*readings: Reading, groups: int = 2, ranks: int = 1) -> Signals:
    meter = Meter(groups=groups, lease_s=LEASE_S, ranks=ranks)
    return [meter.signals(each) for each in readings][-1]


def test_a_group_asks_for_the_time_that_its_seats_compute() -> None:
    loads = after(reading(10), reading(12)).loads
    assert loads[HOT] == Load(work=pytest.approx(0.8), ready=2, useful=2, stall=pytest.approx(0.4))
    assert loads[COLD] == Load(work=pytest.approx(0.1), ready=1, useful=2, stall=pytest.approx(0.1))


def test_calls_that_wait_for_others_are_work_held_back() -> None:
    """The numbers are those of the module's docstring."""
    seats = [seat("a", 0, 10, 1.0, 0.5)], [seat("a", 0, 12, 1.0, 0.5)]
    loads = after(reading(10, seats=seats[0]), reading(12, seats=seats[1])).loads
    assert loads[HOT].work == pytest.approx(1.333, abs=1e-3)
    assert held_back(3.0, 3.0) == 4.0
    assert held_back(3.0, 0.0) == held_back(0.0, 1.0) == 1.0


def test_micro_batches_are_calls_of_their_own() -> None:
    workers = {"v": WorkerLoad(up_s=12, busy_s=12, lanes=2)}
    signals = after(reading(10), reading(12, loads=Loads(workers=workers, gateways={})))
    assert signals.loads[HOT].useful == 2


def test_a_new_seat_or_a_silent_one_makes_its_group_unknown() -> None:
    assert not after(reading(10)).loads[HOT].known
    assert after(reading(10), reading(12)).loads[HOT].known
    joined = reading(12, seats=[*reading(12).seats, seat("new", 0, 1, 0.5)])
    assert not after(reading(10), joined).loads[HOT].known
    stuck = reading(12)
    silent = after(reading(10), stuck, replace(stuck, at=12 + LEASE_S + 1)).loads
    assert not silent[HOT].known
    assert not silent[GATEWAY].known


def test_a_group_without_seats_is_unknown_and_there() -> None:
    loads = after(reading(10, seats=[]), groups=3).loads
    assert [target.shard for target in loads if target.role == "experts"] == [0, 1, 2]
    assert loads[HOT] == Load(work=0.0, ready=0, known=False, useful=2)


def test_seats_that_leave_or_load_do_not_count() -> None:
    first = reading(12).seats[0]
    leaving = [replace(first, dismissed=True), replace(first, status="loading"), reading(12).seats[1]]
    assert after(reading(10), reading(12, seats=leaving)).loads[HOT].ready == 1


def test_replicas_that_nobody_registered_make_a_target_unknown() -> None:
    counts = {HOT: Replicas(wanted=3, ready=3), ATTENTION: Replicas(wanted=2, ready=2)}
    loads = after(reading(10), reading(12, counts=counts)).loads
    assert not loads[HOT].known
    assert loads[ATTENTION].known


def test_a_worker_that_restarts_counts_from_its_second_report() -> None:
    rates = Rates(half_life_s=4.0)
    rates.note("a", 10, {"busy": 5}, at=0)
    rates.note("a", 12, {"busy": 7}, at=1)
    assert rates.of("a", "busy") == 1.0
    rates.note("a", 2, {"busy": 1}, at=2)
    assert not rates.fresh("a", 2, LEASE_S)
    rates.note("a", 4, {"busy": 2}, at=3)
    assert rates.of("a", "busy") == 0.5


def test_ranks_are_counted_by_groups() -> None:
    """Half of a group's places are asked for; a group of which a rank is missing is not there."""
    ranks = [worker(name, 4) for name in "uvwx"]
    counts = {ATTENTION: Replicas(wanted=2, ready=2)}
    two = after(reading(10), reading(100, workers=ranks, counts=counts), ranks=2).loads[ATTENTION]
    assert (two.work, two.ready, two.known) == (pytest.approx(1.0), 2, True)
    lacking = after(reading(10), reading(100, workers=ranks[:3], counts=counts), ranks=2).loads[ATTENTION]
    assert (lacking.ready, lacking.known) == (1, False)
    half = after(reading(10), reading(100, workers=ranks[:1]), ranks=2).loads[ATTENTION]
    assert (half.ready, half.known) == (0, False)


def test_attention_asks_for_places_or_for_tokens_whichever_is_more() -> None:
    assert after(reading(10)).loads[ATTENTION].work == pytest.approx(6 / 8)
    full = reading(10, workers=[worker("v", 2, tokens=1500), worker("w", 4)])
    assert after(full).loads[ATTENTION].work == pytest.approx(1.5)


def test_a_line_asks_for_the_places_that_let_it_go_in_ten_seconds() -> None:
    places = Places(half_life_s=1.0, line_s=10.0)
    assert places.asked(running=0, waiting=40, ended=0, passed_s=0.0) == 40, "nothing is known of how long they stay"
    for _ in range(20):
        asked = places.asked(running=8, waiting=40, ended=8, passed_s=1.0)
    assert asked == pytest.approx(8 + 4), "they stay for a second: ten go through a place"
    for _ in range(20):
        asked = places.asked(running=8, waiting=40, ended=0.1, passed_s=1.0)
    assert asked == pytest.approx(48), "they stay for longer than ten"


def test_activity_is_what_runs_waits_or_came_since() -> None:
    idle = {"workers": [worker("v")]}
    assert after(reading(10)).active
    assert not after(reading(10, **idle)).active
    assert after(reading(10, **idle, depth=QueueDepth(requests=1, tokens=9, dead_letters=0))).active
    loads = [Loads(workers={}, gateways={"g": gateway(at, came=came)}) for at, came in ((10, 3), (11, 3), (12, 4))]
    readings = [reading(10 + second, **idle, loads=each) for second, each in enumerate(loads)]
    assert not after(readings[0]).active
    assert not after(*readings[:2]).active, "what a gateway reported before this leader's term does not count"
    assert after(*readings).active, "it came and went between two looks"


def test_nine_of_ten_latencies_are_within_the_ratio() -> None:
    counts = tuple(9 if edge == 0.9 else 1 if edge == 2.0 else 0 for edge in (*LATENCY_EDGES, 99))
    gateways = [{"g": gateway(10)}, {"g": gateway(11, tpot=counts)}]
    signals = after(*(reading(10 + n, loads=Loads(workers={}, gateways=each)) for n, each in enumerate(gateways)))
    assert (signals.ttft, signals.tpot) == (None, 0.9)


def test_one_answer_lately_is_few() -> None:
    one = tuple(float(number == 0) for number in range(LATENCY_BUCKETS))
    reports = [gateway(10), gateway(11, ttft=one), *(gateway(seconds, ttft=one) for seconds in range(12, 60))]
    meter, few = Meter(groups=2, lease_s=LEASE_S), []
    for number, each in enumerate(reports):
        few.append(meter.signals(reading(10 + number, loads=Loads(workers={}, gateways={"g": each}))).few)
    assert few[:2] == [False, True]
    assert not few[-1]


def test_latencies_fade_and_too_few_say_nothing() -> None:
    share = Share(half_life_s=10.0)
    share.add([0.0] * len(LATENCY_EDGES) + [8.0], 0.0)
    assert share.ratio() == BEYOND
    share.add([0.0] * LATENCY_BUCKETS, 10.0)
    assert share.ratio() is None
