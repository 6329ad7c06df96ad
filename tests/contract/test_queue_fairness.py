"""The order in which requests are claimed: priorities, deficit round-robin between tenants, deadlines within one."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter

import pytest

from services.queue.limits import QueueLimits

BIG = QueueLimits(max_requests=100_000, max_tokens=10**9)


async def drain(bench, step: int = 1) -> list[tuple[str, int]]:
    """(tenant, cost) of everything queued, in the order of the claims."""
    served = []
    while claimed := await bench.claim(step):
        served += [(request.tenant, request.cost) for request in claimed]
    return served


def largest_gap(served: list[tuple[str, int]], until: int) -> int:
    """The largest difference of two tenants' tokens at any time in the first ``until`` claims."""
    totals = Counter({tenant: 0 for tenant, _ in served})
    gap = 0
    for tenant, cost in served[:until]:
        totals[tenant] += cost
        gap = max(gap, max(totals.values()) - min(totals.values()))
    return gap


async def test_a_lower_number_goes_first(bench):
    for priority in (9, 5, 0, 5, 9, 0):
        await bench.admit(bench.request(f"p{priority}-{await bench.depth()}", priority=priority))
    assert [name[:2] for name in await bench.order()] == ["p0", "p0", "p5", "p5", "p9", "p9"]


async def test_within_a_tenant_by_deadline_and_then_by_admission(bench):
    await bench.admit(bench.request("late"), timeout_s=900)
    await bench.admit(bench.request("a"), bench.request("b"), bench.request("c"), timeout_s=60)
    await bench.admit(bench.request("urgent"), timeout_s=30)
    assert await bench.order() == ["urgent", "a", "b", "c", "late"]


@pytest.mark.parametrize("queue_limits", [BIG])
@pytest.mark.parametrize("step", [1, 7])
async def test_tokens_are_shared_within_one_request_and_one_quantum(bench, step):
    await bench.admit(*(bench.request(tenant="small", prompt=50, max_tokens=50) for _ in range(400)))
    await bench.admit(*(bench.request(tenant="large", prompt=1500, max_tokens=500) for _ in range(20)))
    served = await drain(bench, step)
    until = min(max(i for i, (name, _) in enumerate(served) if name == tenant) for tenant in ("small", "large"))
    assert len(served) == 420
    assert largest_gap(served, until) <= 2000 + BIG.quantum


@pytest.mark.parametrize("queue_limits", [BIG])
@pytest.mark.parametrize("seed", range(3))
async def test_any_mix_of_tenants_shares_tokens(bench, seed):
    draw = random.Random(seed)
    largest = 0
    for tenant in ("a", "b", "c", "d"):
        size = draw.choice([60, 300, 1500, 6000])
        largest = max(largest, size)
        costs = []
        while sum(costs) < 40_000:
            costs.append(draw.randint(size // 2, size))
        await bench.admit(*(bench.request(tenant=tenant, prompt=1, max_tokens=cost - 1) for cost in costs))
    served = await drain(bench, draw.choice([1, 3, 16]))
    last = {tenant: i for i, (tenant, _) in enumerate(served)}
    assert largest_gap(served, min(last.values())) <= largest + BIG.quantum


@pytest.mark.parametrize("queue_limits", [BIG])
async def test_a_late_light_tenant_does_not_wait_for_a_heavy_one(bench):
    await bench.admit(*(bench.request(tenant="heavy", prompt=1000, max_tokens=1000) for _ in range(200)))
    await bench.claim(10)
    await bench.admit(bench.request("light", tenant="light"))
    following = [request.id for request in await bench.claim(3)]
    assert "light" in following


@pytest.mark.parametrize("queue_limits", [BIG])
async def test_a_light_tenant_comes_through_though_claims_keep_being_released(bench):
    await bench.admit(*(bench.request(tenant="heavy", prompt=1000, max_tokens=1000) for _ in range(100)))
    for _ in range(20):
        await bench.scheduler.release(bench.epoch, await bench.claim(16))
    await bench.admit(bench.request("light", tenant="light"))
    assert "light" in [request.id for request in await bench.claim(3)]


@pytest.mark.parametrize("queue_limits", [BIG])
async def test_release_restores_place_and_share(bench):
    for tenant in ("a", "b"):
        await bench.admit(*(bench.request(tenant=tenant, prompt=100, max_tokens=900) for _ in range(20)))
    for _ in range(10):
        await bench.scheduler.release(bench.epoch, await bench.claim(5))
    served = await drain(bench)
    assert len(served) == 40
    assert largest_gap(served, 38) <= 1000 + BIG.quantum
    assert await bench.depth() == (0, 0)


async def test_release_keeps_the_order_within_a_tenant(bench):
    await bench.admit(*(bench.request(f"r{i}") for i in range(6)))
    first = await bench.claim(3)
    await bench.scheduler.release(bench.epoch, list(reversed(first)))
    assert [request.id for request in await bench.claim()] == [f"r{i}" for i in range(6)]


@pytest.mark.parametrize("queue_limits", [BIG])
async def test_unused_tokens_are_refunded_to_a_tenant_that_waits(bench):
    """Two tenants ask for 1,000 tokens each time; one uses 100 of them and so gets more requests through."""
    await bench.add_worker("w", tokens=10**9, requests=10**6)
    for tenant in ("modest", "greedy"):
        await bench.admit(*(bench.request(tenant=tenant, prompt=10, max_tokens=990) for _ in range(120)))
    counts: Counter[str] = Counter()
    for _ in range(100):
        (request,) = await bench.claim(1)
        counts[request.tenant] += 1
        await bench.scheduler.assign(bench.epoch, [(request, "w")])
        used = 90 if request.tenant == "modest" else 990
        await bench.worker.publish("w", [bench.token(request, used - 1, finish="stop")])
    assert counts["modest"] > 3 * counts["greedy"]


@pytest.mark.parametrize("queue_limits", [QueueLimits(quantum=100, refund_quanta=2)])
async def test_refunds_are_bounded_and_an_idle_tenant_keeps_nothing(bench):
    await bench.add_worker("w", tokens=10**9)
    await bench.admit(*(bench.request(tenant="a", prompt=1, max_tokens=9_999) for _ in range(3)))
    running = await bench.claim(2)
    await bench.scheduler.assign(bench.epoch, [(request, "w") for request in running])
    deficits = bench.keys.deficit(5)
    before = int(await bench.redis.hget(deficits, "a"))
    await bench.worker.publish("w", [bench.token(running[0], 0, finish="stop")])
    assert int(await bench.redis.hget(deficits, "a")) == max(before, 200)
    await bench.claim(1)
    await bench.worker.publish("w", [bench.token(running[1], 0, finish="stop")])
    assert not await bench.redis.exists(deficits, bench.keys.ring(5))


async def test_a_claim_can_be_bounded_by_tokens_without_passing_a_priority_over(bench):
    await bench.admit(
        bench.request("big", prompt=10, max_tokens=90, priority=1),
        bench.request("big2", prompt=10, max_tokens=90, priority=1),
    )
    await bench.admit(bench.request("small", prompt=1, max_tokens=1, priority=2))
    assert [c.request.id for c in await bench.scheduler.claim(bench.epoch, 10, max_tokens=150)] == ["big"]
    assert [c.request.id for c in await bench.scheduler.claim(bench.epoch, 10, max_tokens=50)] == ["big2"]


async def test_cancelled_and_expired_requests_do_not_stand_in_the_way(bench):
    await bench.admit(*(bench.request(f"x{i}") for i in range(5)))
    await bench.admit(bench.request("short"), timeout_s=0.001)
    await bench.gateway.cancel(["x0", "x2"])
    await asyncio.sleep(0.005)
    assert [request.id for request in await bench.claim()] == ["x1", "x3", "x4"]
    assert bench.ends(await bench.events()) == [("short", "deadline_exceeded")]
    assert await bench.depth() == (0, 0)


@pytest.mark.parametrize("queue_limits", [QueueLimits(max_requests=1000, max_tokens=10**15)])
async def test_a_thousand_tenants_with_huge_requests_are_claimed_quickly(bench):
    for tenant in range(1000):
        await bench.admit(bench.request(tenant=f"t{tenant}", prompt=1, max_tokens=10**8 + tenant))
    start = time.monotonic()
    claimed = await bench.claim(64)
    assert time.monotonic() - start < 1
    assert len({request.tenant for request in claimed}) == 64
