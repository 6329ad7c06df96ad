"""What metrics cost: the time of an engine's thread for each step, that of an expert worker's page, and of a scrape.

    PYTHONPATH=.:kernels .venv/bin/python perf/server/metrics_cost.py [--step-ms 10]

No server runs: the observers get readings that change as those of a busy engine do, and pages are those of
docs/scale.md's model. Medians of 50 batches.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import fields, replace

from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.exposition import generate_latest

from services.attention.metrics import ExpertObserver, StepObserver
from services.attention.step.stats import Durations, EngineStats
from services.fabric.link import ExchangeTime
from services.metrics import WorkerMetrics

BATCHES, CALLS = 50, 200
LAYERS, EXPERTS = 48, 128
IDLE = EngineStats(
    **dict.fromkeys([field.name for field in fields(EngineStats)], 0) | {"kv_blocks": 1000, "step_failures": {}}
)


def median_us(call: Callable[[], object], calls: int = CALLS) -> float:
    """Microseconds of a call."""
    took = []
    for _ in range(BATCHES):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        took.append(1e6 * (time.perf_counter() - began) / calls)
    return statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--step-ms", type=float, default=10.0, help="of an engine's step (default: %(default)s)")
    given = parser.parse_args()
    disable_created_metrics()
    registry, numbers = CollectorRegistry(), itertools.count(1)
    metrics = WorkerMetrics(registry)

    def reading() -> EngineStats:
        number = next(numbers)
        busy = {"running": 64, "kv_used": 500, "step_tokens": 64, "step_seconds": 0.01, "decode_tokens": 64 * number}
        return replace(IDLE, steps=number, steps_ahead=number, graph_steps=number, exchange_wait_seconds=number, **busy)

    exchanged = Durations(exchanges=[ExchangeTime("tcp", 0.001, 0.002)])
    observer = StepObserver(metrics, reading, lambda: exchanged)
    making_us = median_us(reading)
    step_us = median_us(observer.after_step) - making_us
    rows = {layer: [0] * EXPERTS for layer in range(LAYERS)}

    def more() -> dict[int, list[int]]:
        for layer in rows:
            rows[layer] = [count + 1 for count in rows[layer]]
        return dict(rows)

    experts = ExpertObserver(metrics, more)
    refresh_us = median_us(experts.refresh, 5) - median_us(more, 5)
    page_us = median_us(lambda: generate_latest(registry), 5)
    share = 0.1 * step_us / given.step_ms
    print(f"after a step, on the engine's thread: {step_us:.0f} us, {share:.2f} % of {given.step_ms:g} ms")
    print(f"rows of {LAYERS} layers of {EXPERTS} experts, once a second: {refresh_us / 1000:.1f} ms")
    print(f"an attention worker's page: {page_us / 1000:.1f} ms")


if __name__ == "__main__":
    main()
