"""Copies of series under vLLM's names have the values of the moment, vLLM's labels, and exist once."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from redis.asyncio import Redis
from testkit.docs.metrics import vllm_names

from services.attention.service import AttentionService
from services.config import Settings
from services.metrics import (
    OPENMETRICS,
    TEXT,
    GatewayMetrics,
    SchedulerMetrics,
    VllmNames,
    WorkerMetrics,
    of_gateway,
    of_scheduler,
    of_worker,
)

LABELS = {"model_name": "pocket", "engine": "0"}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"vllm:{name}", LABELS | labels)


def test_a_gateway_s_copies_follow_its_series(registry: CollectorRegistry) -> None:
    metrics = GatewayMetrics(registry)
    registry.register(VllmNames(of_gateway(metrics), lambda: "pocket"))
    metrics.prompt_tokens.inc(7)
    for finish in ("stop", "stop", "length", "cancelled"):
        metrics.requests.labels(finish).inc()
    metrics.ttft.observe(0.25, {"trace_id": "abc"})
    metrics.e2e.observe(2.0)
    assert value(registry, "prompt_tokens_total") == 7
    assert value(registry, "request_success_total", finished_reason="stop") == 2
    assert value(registry, "request_success_total", finished_reason="abort") == 1
    assert value(registry, "time_to_first_token_seconds_count") == 1
    assert value(registry, "time_to_first_token_seconds_bucket", le="0.25") == 1
    assert value(registry, "time_to_first_token_seconds_bucket", le="0.1") == 0
    assert value(registry, "e2e_request_latency_seconds_sum") == 2
    metrics.prompt_tokens.inc(1)
    assert value(registry, "prompt_tokens_total") == 8
    families = {family.name: family for family in text_string_to_metric_families(OPENMETRICS.encode(registry).decode())}
    exemplars = [one.exemplar for one in families["vllm:time_to_first_token_seconds"].samples if one.exemplar]
    assert [one.labels for one in exemplars] == [{"trace_id": "abc"}]
    assert 'vllm:prompt_tokens_total{engine="0",model_name="pocket"} 8.0' in TEXT.encode(registry).decode()


def test_queue_and_worker_show_what_waits_and_the_kv_cache(registry: CollectorRegistry) -> None:
    metrics = WorkerMetrics(registry)
    registry.register(VllmNames(of_worker(metrics), lambda: "pocket"))
    metrics.running.set(3)
    metrics.waiting.set(2)
    metrics.kv_usage.set(0.5)
    metrics.prefix_hits.inc(4)
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_hits_total")
    assert [value(registry, name) for name in names] == [3, 2, 0.5, 4]
    queue = CollectorRegistry()
    scheduler, model = SchedulerMetrics(queue), list[str]()
    queue.register(VllmNames(of_scheduler(scheduler), lambda: model[0] if model else None))
    scheduler.queued_requests.set(9)
    assert "vllm:" not in TEXT.encode(queue).decode(), "no worker has said which model it is"
    model.append("pocket")
    assert value(queue, "num_requests_waiting") == 9


def test_only_what_waits_is_shown_by_two_roles() -> None:
    names = [copy.name for copies in vllm_names().values() for copy in copies]
    assert {name for name in names if names.count(name) > 1} == {"num_requests_waiting"}


@pytest.mark.parametrize("wanted", [False, True])
async def test_the_setting_asks_for_them(registry: CollectorRegistry, wanted: bool) -> None:
    settings: Any = Settings(model="m", served_model_name="pocket", metrics_vllm_names=wanted)  # type: ignore[arg-type]
    AttentionService(settings, Redis(), registry)
    assert ("vllm:" in TEXT.encode(registry).decode()) is wanted
