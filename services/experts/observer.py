"""Readings of an expert worker on their way into its series."""

from __future__ import annotations

import time

from services.experts.serving import TcpServing
from services.experts.worker import ExpertWorker
from services.fabric.faults import Faults
from services.metrics import ALL_LAYERS, ExpertMetrics
from services.runtime import release

LOAD_SHOWN_S = 600.0
"""How long a page says how long the last loading took."""


class ExpertsObserver:
    """Brings the series of one expert worker up to date. A group that is loaded again counts from zero."""

    def __init__(self, metrics: ExpertMetrics, worker: ExpertWorker, faults: Faults, *, by_layer: bool = False) -> None:
        self._metrics = metrics
        self._faults, self._refused = faults, dict[str, int]()
        self._by_layer = by_layer
        self._worker = worker
        self._serving: object = None
        self._status = ""
        self._rows: dict[int, int] = {}
        self._seen = (0, 0, 0, 0, 0.0)
        self._load_shown_until = 0.0

    def refresh(self) -> None:
        """Read the worker and its server, which may wait for a device."""
        worker, metrics = self._worker, self._metrics
        if self._status != worker.status:
            metrics.status.clear()
            metrics.status.labels(worker.status, release()).set(1)
            self._status = worker.status
        for reason, count in self._faults.totals().items():
            metrics.refused_peers.labels(reason).inc(count - self._refused.get(reason, 0))
            self._refused[reason] = count
        serving = worker.serving
        metrics.rows_in_flight.set(serving.rows_in_flight if serving else 0)
        if isinstance(serving, TcpServing):
            self._count(serving)

    def _count(self, serving: TcpServing) -> None:
        if serving is not self._serving:
            self._serving, self._rows, self._seen = serving, {}, (0, 0, 0, 0, 0.0)
            source, seconds = serving.loaded
            self._metrics.weight_load.clear()
            self._metrics.weight_load.labels(source).set(seconds)
            self._load_shown_until = time.monotonic() + LOAD_SHOWN_S
        elif time.monotonic() > self._load_shown_until:
            self._metrics.weight_load.clear()
        counts, metrics, shard = serving.server.counts, self._metrics, str(serving.group.number)
        for layer, rows in serving.layer_rows().items():
            metrics.rows.labels(layer if self._by_layer else ALL_LAYERS, shard).inc(rows - self._rows.get(layer, 0))
            self._rows[layer] = rows
        now = (counts.calls, counts.failed, counts.computations, serving.joined_steps, serving.busy_s)
        series = (metrics.calls, metrics.failed, metrics.computations, metrics.joined_steps, metrics.busy)
        for counter, new, old in zip(series, now, self._seen, strict=True):
            counter.inc(new - old)
        self._seen = now
