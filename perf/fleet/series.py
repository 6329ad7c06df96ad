"""How many series the metrics page of each role has, and how long it is, for a model of some layers and experts.

python -m perf.fleet.series     counts those of the fleet of docs/scale.md, without running it
"""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.exposition import generate_latest

from services.attention.metrics import ExpertObserver
from services.gateway.objectives import Objectives
from services.metrics import ALL_LAYERS, ExpertMetrics, GatewayMetrics, SchedulerMetrics, WorkerMetrics
from services.runtime import release, show_build


@dataclass(frozen=True, slots=True)
class Series:
    count: int
    size: int
    """Bytes of a scrape."""

    @classmethod
    def of(cls, page: str) -> Series:
        lines = [line for line in page.splitlines() if line and not line.startswith("#")]
        return cls(len(lines), len(page))


def series_of(scheduler_page: str, *, layers: int, num_experts: int, by_layer: bool) -> dict[str, Series]:
    """Series by role, of one process of it that has seen traffic; the scheduler's page is given."""
    disable_created_metrics()  # as run_role does
    gateway, attention, experts = CollectorRegistry(), CollectorRegistry(), CollectorRegistry()
    show_build(gateway, "gateway")
    show_build(attention, "attention")
    served = GatewayMetrics(gateway)
    Objectives(served)
    for route in ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health"):
        for status in ("200", "400", "429", "503"):
            served.http_requests.labels(route, status).inc()
    for finish in ("stop", "length", "cancelled", "error"):
        served.requests.labels(finish).inc()
    metrics = WorkerMetrics(attention)
    rows = {layer: [1 + expert for expert in range(num_experts)] for layer in range(layers)}
    ExpertObserver(metrics, lambda: rows, by_layer=by_layer).refresh()
    for state in ("used", "cached", "free"):
        metrics.kv_blocks.labels(state).set(1)
    for reason in ("experts", "error", "not_finite"):
        metrics.step_failures.labels(reason)
    metrics.weight_load.labels("checkpoint").set(1)
    for part in ("dispatch", "combine"):
        metrics.exchange_time.labels("nccl", part)
    for transport in ("tcp", "nccl"):
        for direction in ("sent", "received"):
            metrics.exchange_bytes.labels(transport, direction)
    seat = ExpertMetrics(experts)
    seat.status.labels("ready", release()).set(1)
    for layer in range(layers) if by_layer else [ALL_LAYERS]:
        seat.rows.labels(layer, "0").inc()
    pages = {"gateway": gateway, "attention": attention, "experts": experts}
    found = {role: Series.of(generate_latest(registry).decode()) for role, registry in pages.items()}
    return found | {"scheduler": Series.of(scheduler_page)}


FLEET = {"gateway": 8, "scheduler": 2, "attention": 64, "experts": 2000}
"""Processes of docs/scale.md, where there are 64 shard groups."""
SHARDS, LAYERS, NUM_EXPERTS = 64, 48, 128


def leader_page() -> str:
    """The page of a leading scheduler of the fleet, whose seats have come, left and died, with many tenants waiting."""
    registry = CollectorRegistry()
    show_build(registry, "scheduler")
    metrics = SchedulerMetrics(registry)
    for shard in range(SHARDS):
        metrics.seats.labels(shard).set(1)
        for change in ("join", "leave", "death"):
            metrics.seat_changes.labels(shard, change)
    for worker in range(FLEET["attention"]):
        metrics.outstanding_tokens.labels(worker).set(1)
    for tenant in range(11):
        metrics.waiting_requests.labels(tenant, 5).set(1)
        metrics.waiting_tokens.labels(tenant, 5).set(1)
    return generate_latest(registry).decode()


def main() -> None:
    disable_created_metrics()
    for by_layer in (False, True):
        found = series_of(leader_page(), layers=LAYERS, num_experts=NUM_EXPERTS, by_layer=by_layer)
        total = sum(found[role].count * count for role, count in FLEET.items())
        each = ", ".join(f"{role} {found[role].count}" for role in FLEET)
        print(f"{'with' if by_layer else 'without'} --layer-series: {total} series ({each})")


if __name__ == "__main__":
    main()
