"""Series follow the engine and the experts exactly, within bounded labels."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.attention.metrics import ExpertObserver, SharingObserver, StepObserver, TotalsObserver
from services.attention.step.stats import Durations, EngineStats
from services.errors import ProtocolMismatch, SeatLost, WireError
from services.experts.observer import LOAD_SHOWN_S, ExpertsObserver
from services.experts.serving import TcpServing
from services.fabric.faults import Faults
from services.fabric.link import ExchangeTime
from services.fabric.tcp.compute import Counts
from services.metrics import PEER, TOP_EXPERTS, ExpertMetrics, WorkerMetrics
from services.routing import ShardGroup

IDLE = EngineStats(
    **dict.fromkeys([field.name for field in fields(EngineStats)], 0)
    | {"kv_blocks": 10, "kv_empty": 10, "step_failures": {}, "drafting_failures": {}}
)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def test_levels_totals_and_steps(registry: CollectorRegistry) -> None:
    readings = [IDLE]
    observer = StepObserver(WorkerMetrics(registry), lambda: readings[-1])
    for step in (1, 2):
        readings.append(
            replace(
                IDLE,
                running=3,
                kv_used=4,
                kv_cached=5,
                kv_empty=1,
                steps=step,
                prefill_tokens=7 * step,
                decode_tokens=step,
                step_tokens=8,
                step_seconds=0.25,
                step_overlapped=step == 2,
                overlapped_steps=step - 1,
                steps_ahead=step - 1,
                exchange_wait_seconds=0.1 * step,
                graph_steps=step - 1,
                graphs=13,
                graph_failures=1,
            )
        )
        observer.after_step()

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"expertmesh_{name}", labels)

    assert value("requests_running") == 3
    assert value("kv_cache_usage_ratio") == 0.4
    assert [value("kv_blocks", state=state) for state in ("used", "cached", "free")] == [4, 5, 1]
    assert value("engine_steps_total") == 2
    assert value("prefill_tokens_total") == 14
    assert value("decode_tokens_total") == 2
    assert value("engine_step_seconds_sum") == 0.5
    assert value("engine_step_tokens_sum") == 16
    assert value("overlapped_steps_total") == 1
    assert value("steps_ahead_total") == 1
    assert (value("graph_steps_total"), value("step_graphs")) == (1, 13)
    assert value("step_graph_failures_total") == 1
    assert value("exchange_wait_seconds_total") == pytest.approx(0.2)
    readings.append(replace(readings[-1], running=0, kv_used=0))  # a cancel between steps
    observer.after_step()
    assert value("requests_running") == 0
    assert value("kv_cache_usage_ratio") == 0
    assert value("engine_step_seconds_count") == 2


def test_durations_and_failures_of_steps(registry: CollectorRegistry) -> None:
    readings, taken = [IDLE], [Durations()]
    trace = {"trace_id": "0af7651916cd43dd8448eb211c80319c"}
    observer = StepObserver(WorkerMetrics(registry), lambda: readings[-1], lambda: taken.pop(), lambda: trace)
    for step in (1, 2):
        readings.append(
            replace(IDLE, steps=step, step_seconds=0.25, step_failures={"error": step, "experts": 0, "not_finite": 1})
        )
        local, remote = ExchangeTime("local", 0.002, 0.001), ExchangeTime("tcp", 0.004, 0.05)
        taken.append(Durations(batch_waits=[0.5, 1.5], prefills=[0.25], exchanges=[local, remote]))
        observer.after_step()

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"expertmesh_{name}", labels)

    assert value("engine_busy_seconds_total") == 0.5
    assert (value("request_batch_wait_seconds_count"), value("request_batch_wait_seconds_sum")) == (4, 4.0)
    assert (value("request_prefill_seconds_count"), value("request_prefill_seconds_sum")) == (2, 0.5)
    assert value("exchange_seconds_count", transport="local", part="combine") == 2
    assert value("exchange_seconds_sum", transport="tcp", part="dispatch") == pytest.approx(0.008)
    assert value("exchange_seconds_sum", transport="tcp", part="combine") == pytest.approx(0.1)
    assert value("step_failures_total", reason="error") == 2
    assert value("step_failures_total", reason="not_finite") == 1
    [step_time] = [family for family in registry.collect() if family.name == "expertmesh_engine_step_seconds"]
    assert [sample.exemplar.labels for sample in step_time.samples if sample.exemplar] == [trace]


def test_totals_may_have_several_labels(registry: CollectorRegistry) -> None:
    totals = {("tcp", "sent"): 10, ("nccl", "received"): 7}
    observer = TotalsObserver(WorkerMetrics(registry).exchange_bytes, lambda: totals)
    observer.refresh()
    totals["tcp", "sent"] = 15
    observer.refresh()
    value = registry.get_sample_value
    assert value("expertmesh_exchange_bytes_total", {"transport": "tcp", "direction": "sent"}) == 15
    assert value("expertmesh_exchange_bytes_total", {"transport": "nccl", "direction": "received"}) == 7


def test_expert_series_are_bounded_and_name_the_busiest(registry: CollectorRegistry) -> None:
    rows = {3: [0] * 64}
    observer = ExpertObserver(
        WorkerMetrics(registry), lambda: {layer: list(row) for layer, row in rows.items()}, by_layer=True
    )
    observer.refresh()
    rows[3][7], rows[3][9] = 30, 10
    observer.refresh()
    observer.refresh()
    value = registry.get_sample_value
    assert value("expertmesh_expert_tokens_total", {"layer": "3", "shard": "0"}) == 40
    assert value("expertmesh_expert_top_id", {"layer": "3", "rank": "1"}) == 7
    assert value("expertmesh_expert_top_id", {"layer": "3", "rank": "2"}) == 9
    assert value("expertmesh_expert_top_share_ratio", {"layer": "3", "rank": "1"}) == pytest.approx(0.75)
    shares = [s for m in registry.collect() for s in m.samples if s.name == "expertmesh_expert_top_share_ratio"]
    assert len(shares) == TOP_EXPERTS


def test_without_series_of_layers_the_rows_are_added_up_and_shares_are_means(registry: CollectorRegistry) -> None:
    rows = {3: [0] * 8, 5: [0] * 8, 7: [0] * 8}
    observer = ExpertObserver(WorkerMetrics(registry), lambda: {layer: list(row) for layer, row in rows.items()})
    observer.refresh()
    rows[3][7], rows[3][2], rows[5][1] = 30, 10, 8
    observer.refresh()
    value = registry.get_sample_value
    assert value("expertmesh_expert_tokens_total", {"layer": "all", "shard": "0"}) == 48
    assert value("expertmesh_expert_top_share_ratio", {"layer": "all", "rank": "1"}) == pytest.approx((0.75 + 1) / 2)
    assert value("expertmesh_expert_top_share_ratio", {"layer": "all", "rank": "2"}) == pytest.approx((0.25 + 0) / 2)
    names = [sample.name for metric in registry.collect() for sample in metric.samples]
    assert names.count("expertmesh_expert_tokens_total") == 1
    assert "expertmesh_expert_top_id" not in names


@dataclass
class Sharing:
    shared_steps: int = 0
    repeated_steps: int = 0

    def shared_seats(self) -> int:
        return 3


def test_steps_through_shared_memory_are_counted_once(registry: CollectorRegistry) -> None:
    link = Sharing(shared_steps=5)
    observer = SharingObserver(WorkerMetrics(registry), link)  # five are counted already
    link.shared_steps = 10
    observer.refresh()
    observer.refresh()
    link.shared_steps, link.repeated_steps = 12, 1
    observer.refresh()
    names = ("shared_seats", "shared_steps_total", "repeated_steps_total")
    assert [registry.get_sample_value(f"expertmesh_{name}") for name in names] == [3, 7, 1]


class Idle:
    """An expert worker that does nothing yet."""

    seat, status, serving = 0, "waiting", None


class Serves(Idle):
    """One whose group is loaded, and whose server counts."""

    status = "ready"

    def __init__(self) -> None:
        self.counts = Counts()
        server: Any = SimpleNamespace(counts=self.counts, rows_in_flight=0, waited_s=0.0)
        self.serving = TcpServing(group=ShardGroup(number=1, experts={}), server=server, loaded=(PEER, 3.0))


def test_an_expert_worker_has_series_of_what_was_counted(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker: Any = Serves()
    observer = ExpertsObserver(ExpertMetrics(registry), worker, Faults())
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)

    def shown() -> set[str]:
        observer.refresh()
        return {sample.name.removeprefix("expertmesh_experts_") for one in registry.collect() for sample in one.samples}

    rare = {"failed_calls_total", "joined_steps_total"}
    worker.counts.calls = 2
    assert "weight_load_seconds" in shown()
    assert not shown() & rare
    worker.counts.failed = 1
    assert shown() & rare == {"failed_calls_total"}
    now_s += LOAD_SHOWN_S + 1
    assert "weight_load_seconds" not in shown()
    assert registry.get_sample_value("expertmesh_experts_failed_calls_total") == 1


def test_refused_peers_are_counted_by_reason_on_either_side(registry: CollectorRegistry) -> None:
    at_attention, at_experts = Faults(), Faults()
    watched = [
        TotalsObserver(WorkerMetrics(registry).refused_peers, at_attention.totals),
        ExpertsObserver(ExpertMetrics(registry), Idle(), at_experts),  # type: ignore[arg-type]
    ]

    def counted(role: str, reason: str) -> float | None:
        for observer in watched:
            observer.refresh()
        return registry.get_sample_value(f"expertmesh_{role}refused_peers_total", {"reason": reason})

    at_attention.ended_by(ProtocolMismatch("It speaks version 9."))
    at_experts.ended_by(SeatLost("It closed the connection."))
    assert counted("", "protocol_mismatch") == 1
    for _ in range(2):
        at_experts.ended_by(WireError("It sent what it liked."))
        at_experts.ended_by(KeyError("whatever it liked"))
    assert (counted("experts_", "wire_error"), counted("experts_", "error")) == (2, 2)
    assert (counted("experts_", "wire_error"), counted("", "protocol_mismatch")) == (2, 1), "once each"
    assert counted("experts_", "seat_lost") is None, "connections end so every day"


@pytest.mark.parametrize(("from_now", "counted"), [(False, 5), (True, 3)])
def test_totals_by_label_count_from_the_start_or_from_now(
    registry: CollectorRegistry, from_now: bool, counted: float
) -> None:
    totals = {0: 2.0}
    observer = TotalsObserver(WorkerMetrics(registry).shard_stall, lambda: totals, from_now=from_now)
    totals[0], totals[1] = 5.0, 1.0
    for _ in range(2):
        observer.refresh()
    seconds = [registry.get_sample_value("expertmesh_shard_stall_seconds_total", {"shard": str(n)}) for n in (0, 1)]
    assert seconds == [counted, 1]
