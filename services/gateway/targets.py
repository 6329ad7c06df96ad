"""This gateway's latencies against their targets. In: each latency. Out: totals for the leading scheduler, and for
`expertmesh top`."""

from __future__ import annotations

import time

from prometheus_client import Histogram

from services.errors import RequestError
from services.gateway.objectives import Objectives
from services.messages import LATENCY_BUCKETS, GatewayLoad, LatencyCounts, latency_bucket
from services.metrics import GatewayMetrics
from services.wire import WIRE


class LatencyTargets:
    """Counts latencies by how far they are from ``ttft_s`` and ``tpot_s``, the targets in seconds; ``metrics`` has the
    histograms."""

    def __init__(self, metrics: GatewayMetrics, *, ttft_s: float, tpot_s: float) -> None:
        self._histograms = {"ttft": metrics.ttft, "tpot": metrics.tpot, "itl": metrics.inter_token}
        self._ttft_s, self._tpot_s = ttft_s, tpot_s
        self._objectives = Objectives(metrics)
        self._ttft, self._tpot = ([0] * LATENCY_BUCKETS for _ in range(2))
        self._came = self._ended = 0
        self._began = time.monotonic()

    def came(self, sequences: int) -> None:
        """Counts a request of a client."""
        self._came += sequences

    def ended(self) -> None:
        """Counts a sequence that ended in any way."""
        self._ended += 1

    def first_token(self, seconds: float) -> None:
        self._ttft[latency_bucket(seconds, self._ttft_s)] += 1

    def per_token(self, seconds: float) -> None:
        """Counts the mean gap between the tokens of a request that ended."""
        self._tpot[latency_bucket(seconds, self._tpot_s)] += 1

    def judge(self, error: RequestError | None, *, ttft_s: float | None, tpot_s: float | None) -> None:
        """Counts whether a sequence that ended by itself, or with ``error``, met the objectives; a latency that is None
        was not measured."""
        measured = {"ttft": (ttft_s, self._ttft_s), "tpot": (tpot_s, self._tpot_s)}
        latencies = {name: took <= target for name, (took, target) in measured.items() if took is not None}
        if error is None:
            self._objectives.served(latencies)
        else:
            self._objectives.failed(error, latencies)

    def load(self) -> GatewayLoad:
        return GatewayLoad(
            up_s=time.monotonic() - self._began,
            cpu_s=time.process_time(),
            came=self._came,
            ended=self._ended,
            ttft=tuple(self._ttft),
            tpot=tuple(self._tpot),
            wire=WIRE,
            latencies={name: _counts(histogram) for name, histogram in self._histograms.items()},
        )


def _counts(histogram: Histogram) -> LatencyCounts:
    [family] = histogram.collect()
    buckets = [each for each in family.samples if each.name.endswith("_bucket")]
    bounds = tuple(float(each.labels["le"]) for each in buckets)
    return LatencyCounts(bounds[:-1], tuple(int(each.value) for each in buckets))
