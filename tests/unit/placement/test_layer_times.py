"""The estimates against what was measured on 4 H200; their figures come from other measurements
(planning/layer_times.py).
"""

from __future__ import annotations

import pytest

from services.placement.planning.layer_times import MARGIN, Batch, Gpus, LayerTimes, Link, Shapes

QWEN3_30B = Shapes(
    hidden=2048, expert_width=768, experts=128, top_k=8, layers=48, dense_weights=2048 * (4096 + 1024 + 4096 + 128)
)
SHARED_MEMORY = Link(bandwidth=295e9, latency=4.1e-6, joined=False)
H200S = Gpus(count=4, bandwidth=4.3e12, flops=790e12, memory=140e9)
WAYS = ("co-located", "2 + 2", "2 + 2 in ping-pong", "1 + 3", "1 + 3 in ping-pong")
MEASURED_US = {
    32: (147, 195, 199, 146, 156),
    128: (269, 270, 478, 168, 222),
    512: (328, 318, 619, 240, 248),
    2048: (421, 441, 662, 508, 327),
}
"""docs/log/2026-11.md, 2026-11-22, layer times by mode."""


def estimated_us(tokens: int) -> list[float]:
    layer = LayerTimes(QWEN3_30B, SHARED_MEMORY, H200S, Batch(tokens=tokens))
    times = (layer.colocated(4, SHARED_MEMORY), *layer.disaggregated(2), *layer.disaggregated(1))
    return [seconds * 1e6 for seconds in times]


@pytest.mark.parametrize("tokens", MEASURED_US)
@pytest.mark.parametrize("way", range(5), ids=WAYS)
def test_an_estimate_is_within_the_margin_that_users_see(tokens: int, way: int) -> None:
    assert estimated_us(tokens)[way] == pytest.approx(MEASURED_US[tokens][way], rel=MARGIN)


@pytest.mark.parametrize("tokens", MEASURED_US)
def test_the_way_that_is_chosen_is_the_fastest_one_measured(tokens: int) -> None:
    estimated, measured = estimated_us(tokens), MEASURED_US[tokens]
    assert WAYS[estimated.index(min(estimated))] == WAYS[measured.index(min(measured))]


def test_a_link_that_joins_reads_the_weights_once() -> None:
    joined = Link(bandwidth=SHARED_MEMORY.bandwidth, latency=SHARED_MEMORY.latency)
    layer = LayerTimes(QWEN3_30B, SHARED_MEMORY, H200S, Batch(tokens=512))
    assert layer.colocated(4, joined) < 0.5 * estimated_us(512)[0] * 1e-6
