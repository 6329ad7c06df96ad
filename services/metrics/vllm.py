"""Copies of series under the names that vLLM gives them, for dashboards and routers that know vLLM.

They are made when a page is: a copy has what its series has at that moment. Each has the labels ``model_name`` and
``engine``, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.metrics.attention import WorkerMetrics
from services.metrics.gateway import GatewayMetrics
from services.metrics.scheduler import SchedulerMetrics

_ENGINE = "0"
_FINISHES = {"cancelled": "abort"}
"""Values of ``finish`` that vLLM calls otherwise."""


@dataclass(frozen=True, slots=True)
class Copy:
    """``source`` is the series that vLLM calls ``name``; of a counter without ``_total``."""

    name: str
    source: MetricWrapperBase


def of_gateway(metrics: GatewayMetrics) -> tuple[Copy, ...]:
    return (
        Copy("prompt_tokens", metrics.prompt_tokens),
        Copy("generation_tokens", metrics.generation_tokens),
        Copy("request_success", metrics.requests),
        Copy("time_to_first_token_seconds", metrics.ttft),
        Copy("inter_token_latency_seconds", metrics.inter_token),
        Copy("request_time_per_output_token_seconds", metrics.tpot),
        Copy("e2e_request_latency_seconds", metrics.e2e),
        Copy("request_prompt_tokens", metrics.prompt_len),
        Copy("request_generation_tokens", metrics.output_len),
    )


def of_scheduler(metrics: SchedulerMetrics) -> tuple[Copy, ...]:
    return (
        Copy("num_requests_waiting", metrics.queued_requests),
        Copy("request_queue_time_seconds", metrics.queue_time),
    )


def of_worker(metrics: WorkerMetrics) -> tuple[Copy, ...]:
    return (
        Copy("num_requests_running", metrics.running),
        Copy("num_requests_waiting", metrics.waiting),
        Copy("kv_cache_usage_perc", metrics.kv_usage),
        Copy("num_preemptions", metrics.preemptions),
        Copy("prefix_cache_queries", metrics.prefix_queries),
        Copy("prefix_cache_hits", metrics.prefix_hits),
        Copy("iteration_tokens_total", metrics.batch_tokens),
        Copy("request_prefill_time_seconds", metrics.prefill_time),
    )


class VllmNames(Collector):
    """Collects ``copies``. ``model`` returns the name of the served model; without one there are none."""

    def __init__(self, copies: tuple[Copy, ...], model: Callable[[], str | None]) -> None:
        self._copies, self._model = copies, model

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        model = self._model()
        for copy in self._copies if model else ():
            for family in copy.source.collect():
                yield _renamed(family, f"vllm:{copy.name}", {"model_name": model or "", "engine": _ENGINE})


def _renamed(family: Metric, name: str, labels: Mapping[str, str]) -> Metric:
    made = Metric(name, family.documentation, family.type)
    for sample in family.samples:
        suffix = sample.name.removeprefix(family.name)
        made.add_sample(
            name + suffix, {**labels, **_labels(sample.labels)}, sample.value, sample.timestamp, sample.exemplar
        )
    return made


def _labels(labels: Mapping[str, str]) -> dict[str, str]:
    found = dict(labels)
    if "finish" in found:
        finish = found.pop("finish")
        found["finished_reason"] = _FINISHES.get(finish, finish)
    return found
