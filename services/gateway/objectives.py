"""Which requests met the objectives of the service. In: how each request ended. Out: a series to alert by."""

from __future__ import annotations

from collections.abc import Mapping

from services.errors import RequestError
from services.metrics import GatewayMetrics

Latencies = Mapping[str, bool]
"""Whether each latency that was measured (ttft, tpot) met its target."""
_NONE: Latencies = {}
_FAULT = 500
"""From this HTTP status on an error is a fault of the server."""


class Objectives:
    """Counts each request once: by each objective that applies to it, and by all of them together."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        labels = metrics.slo_requests.labels
        self._counters = {
            (objective, met): labels(objective, str(met).lower())
            for objective in ("ttft", "tpot", "availability", "all")
            for met in (True, False)
        }

    def served(self, latencies: Latencies) -> None:
        """Counts a request that was answered to its end."""
        self._count(latencies, available=True)

    def failed(self, error: RequestError, latencies: Latencies = _NONE) -> None:
        """Counts a request that ended with ``error``, unless that is its client's fault."""
        if error.status >= _FAULT:
            self._count(latencies, available=False)

    def refused(self, status: int) -> None:
        """Counts a request that was answered ``status`` before it could be queued."""
        if status >= _FAULT:
            self._count(_NONE, available=False)

    def _count(self, latencies: Latencies, *, available: bool) -> None:
        for objective, met in latencies.items():
            self._counters[objective, met].inc()
        self._counters["availability", available].inc()
        self._counters["all", available and all(latencies.values())].inc()
