"""Latencies against their targets, as the leader hears of them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from services.gateway.targets import LatencyTargets
from services.messages import LATENCY_EDGES, decode_gateway_load, encode
from services.metrics import GatewayMetrics


def test_each_latency_falls_into_the_bucket_of_the_edge_that_it_does_not_exceed() -> None:
    latencies = LatencyTargets(GatewayMetrics(CollectorRegistry()), ttft_s=2.0, tpot_s=0.1)
    latencies.came(2)
    for seconds in (2.0, 2.01, 100.0):
        latencies.first_token(seconds)
    latencies.per_token(0.01)
    latencies.ended()
    load = latencies.load()
    assert (load.came, load.ended) == (2, 1)
    at_target = LATENCY_EDGES.index(1.0)
    assert {at: count for at, count in enumerate(load.ttft) if count} == {
        at_target: 1,
        at_target + 1: 1,
        len(LATENCY_EDGES): 1,
    }
    assert load.tpot[0] == sum(load.tpot) == 1


def test_the_histograms_of_latencies_are_reported_as_they_are() -> None:
    metrics = GatewayMetrics(CollectorRegistry())
    for seconds in (0.03, 0.04, 99999.0):
        metrics.ttft.observe(seconds)
    metrics.inter_token.observe(0.02)
    load = LatencyTargets(metrics, ttft_s=2.0, tpot_s=0.1).load()
    assert decode_gateway_load(encode(load)) == load
    ttft = load.latencies["ttft"]
    assert dict(zip(ttft.bounds, ttft.counts, strict=False))[0.025] == 0
    assert dict(zip(ttft.bounds, ttft.counts, strict=False))[0.05] == 2
    assert (len(ttft.counts), ttft.counts[-2:]) == (len(ttft.bounds) + 1, (2, 3))
    assert [load.latencies[name].counts[-1] for name in ("tpot", "itl")] == [0, 1]
