"""How many series the metrics page of each role has, and how long it is, for a model of some layers and experts."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.exposition import generate_latest

from services.attention.metrics import ExpertObserver
from services.metrics import ALL_LAYERS, ExpertMetrics, GatewayMetrics, WorkerMetrics


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
    served = GatewayMetrics(gateway)
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
    seat = ExpertMetrics(experts)
    seat.status.labels("ready").set(1)
    for layer in range(layers) if by_layer else [ALL_LAYERS]:
        seat.rows.labels(layer, "0").inc()
    pages = {"gateway": gateway, "attention": attention, "experts": experts}
    found = {role: Series.of(generate_latest(registry).decode()) for role, registry in pages.items()}
    return found | {"scheduler": Series.of(scheduler_page)}
