"""Latencies against their targets, as the leader hears of them."""

from __future__ import annotations

from services.gateway.targets import LatencyTargets
from services.messages import LATENCY_EDGES


def test_each_latency_falls_into_the_bucket_of_the_edge_that_it_does_not_exceed() -> None:
    latencies = LatencyTargets(ttft_s=2.0, tpot_s=0.1)
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
