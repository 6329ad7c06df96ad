"""What waits in the queue, by tenant and priority, and what a scheduler's series show of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.metrics import OTHER, TOP_TENANTS, SchedulerMetrics
from services.queue.limits import QueueLimits
from services.queue.scheduler_side import LINE_READ, Line
from services.scheduler.observer import Observer

MANY = QueueLimits(max_requests=100_000, max_tokens=10**9)


def line(tenant: str, requests: int, tokens: int, priority: int = 5) -> Line:
    return Line(priority=priority, tenant=tenant, requests=requests, tokens=tokens)


def lines(found: list[Line]) -> list[Line]:
    return sorted(found, key=lambda each: (each.priority, each.tenant))


async def test_lines_are_counted_by_tenant_and_priority(bench):
    assert (await bench.scheduler.waiting()).lines == []
    await bench.admit(bench.request(tenant="a"), bench.request(tenant="a", prompt=100))
    await bench.admit(bench.request(tenant="b", priority=9))
    await bench.admit(bench.request(tenant="a", priority=9))
    assert lines((await bench.scheduler.waiting()).lines) == [
        line("a", 2, 12 + 108), line("a", 1, 12, priority=9), line("b", 1, 12, priority=9),
    ]  # fmt: skip
    assert await bench.depth() == (4, 12 + 108 + 12 + 12)
    await bench.lead()
    await bench.claim()
    assert (await bench.scheduler.waiting()).lines == []


async def test_the_oldest_of_those_that_are_first_is_timed(bench):
    assert (await bench.scheduler.waiting()).oldest_s == 0
    await bench.admit(bench.request(tenant="a"))
    await asyncio.sleep(0.2)
    await bench.admit(bench.request(tenant="b"))
    assert 0.2 <= (await bench.scheduler.waiting()).oldest_s < 5


@pytest.mark.parametrize("queue_limits", [MANY])
async def test_the_first_requests_of_a_long_line_stand_for_the_others(bench):
    await bench.admit(*(bench.request() for _ in range(2 * LINE_READ)))
    await bench.admit(*(bench.request(prompt=1000) for _ in range(LINE_READ)), timeout_s=900)
    assert (await bench.scheduler.waiting()).lines == [line("t", 3 * LINE_READ, 3 * LINE_READ * 12)]


@pytest.mark.parametrize("queue_limits", [MANY])
async def test_a_thousand_tenants_have_a_bounded_number_of_series(bench):
    for number in range(1000):
        await bench.admit(bench.request(tenant=f"tenant-{number}", prompt=4 + number, priority=number % 10))
    registry = CollectorRegistry()
    observer = Observer(SchedulerMetrics(registry), bench.scheduler)
    await observer.refresh()
    waiting = samples(registry, "queue_waiting_requests")
    largest = {f"tenant-{number}" for number in range(1000 - TOP_TENANTS, 1000)}
    assert {tenant for tenant, _ in waiting} == largest | {OTHER}
    assert len(waiting) == TOP_TENANTS + 10, "the others have a series for each priority"
    assert sum(waiting.values()) == 1000
    tokens = samples(registry, "queue_waiting_tokens")
    assert tokens["tenant-999", "9"] == 4 + 999 + 8
    assert sum(tokens.values()) == (await bench.depth())[1]
    observer.follows()
    assert samples(registry, "queue_waiting_requests") == {}
    assert registry.get_sample_value("expertmesh_queue_oldest_seconds") == 0


def samples(registry: CollectorRegistry, name: str) -> dict[tuple[str, str], float]:
    found: Any = (sample for family in registry.collect() for sample in family.samples)
    return {
        (sample.labels["tenant"], sample.labels["priority"]): sample.value
        for sample in found
        if sample.name == f"expertmesh_{name}"
    }
