"""Series of an expert worker."""

from __future__ import annotations

from typing import get_args

from prometheus_client import CollectorRegistry

from services.metrics.common import (
    GPU_MEMORY,
    GPU_STATE,
    LAYER,
    ON_GPU,
    PEER_REASON,
    REFUSED_PEERS,
    SHARD,
    WeightSource,
    unreadable,
)
from services.metrics.series import Label, Series

_STATUS = Label("status", values=("waiting", "loading", "ready", "leaving"))
_VERSION = Label("version", "release", most=1)
_SOURCE = Label("source", "where the weights came from", values=get_args(WeightSource))


class ExpertMetrics:
    """Experts in a process of their own. Written by an expert worker.

    A large deployment has thousands of these, and few other processes: what most of them never count has no series, and
    no series says what another one's labels can.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        series = Series(registry, "experts", "experts_")
        self.definitions = series.definitions
        gauge, counter = series.gauge, series.counter
        self.unreadable = unreadable(series)
        self.status = gauge(
            "status", "1 for the worker's current status; the label says which release it runs.", _STATUS, _VERSION
        )
        self.rows_in_flight = gauge(
            "rows_in_flight",
            "Rows (token hidden states) accepted and not yet answered: the worker's queue. Rows through shared memory "
            "are not in it.",
        )
        self.gpu_memory = gauge("gpu_memory_bytes", GPU_MEMORY, GPU_STATE, only=ON_GPU)
        self.weight_load = gauge(
            "weight_load_seconds",
            "How long the last loading of a shard group's weights took, by where they came from.",
            _SOURCE,
            only="for ten minutes after it",
        )
        self.rows = counter(
            "rows_total", "Rows (token hidden states) computed, by layer and shard group.", LAYER, SHARD
        )
        self.calls = counter("calls_total", "Calls from attention workers answered, failures included.")
        self.failed = series.rare("failed_calls_total", "Calls from attention workers that failed.")
        self.computations = counter(
            "computations_total", "Grouped kernel calls; fewer than calls_total where calls are batched together."
        )
        self.joined_steps = series.rare(
            "joined_steps_total", "Steps over shared memory batched with another attention worker's step."
        )
        self.busy = counter("busy_seconds_total", "Time spent computing expert calls.")
        self.refused_peers = counter("refused_peers_total", REFUSED_PEERS, PEER_REASON)
