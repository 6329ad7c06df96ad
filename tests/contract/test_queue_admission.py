"""Admission: all or nothing, bounded, idempotent, with an honest Retry-After."""

from __future__ import annotations

import asyncio
import time

import pytest

from services.errors import ConcurrencyLimited, Conflict, QueueFull, RateLimited
from services.queue.gateway_side import IdempotencyKey, KeyBound
from services.queue.limits import QueueLimits, TenantLimits

SMALL = QueueLimits(max_requests=4, max_tokens=100)


async def test_admission_sets_attempt_and_deadline_by_redis_time(bench):
    seconds, microseconds = await bench.redis.time()
    (admitted,) = await bench.admit(bench.request(), timeout_s=60)
    assert admitted.attempt == 1
    assert 0 <= admitted.deadline_ms - (seconds * 1000 + microseconds // 1000) - 60_000 < 5_000
    assert await bench.depth() == (1, 12)


@pytest.mark.parametrize("queue_limits", [SMALL])
async def test_a_batch_that_does_not_fit_is_refused_whole(bench):
    await bench.admit(bench.request("a"), bench.request("b"))
    with pytest.raises(QueueFull) as refusal:
        await bench.admit(*(bench.request() for _ in range(3)))
    assert 1 <= refusal.value.retry_after_s <= 120
    assert await bench.depth() == (2, 24)
    assert await bench.live() == 2
    await bench.admit(bench.request(), bench.request())
    assert await bench.depth() == (4, 48)


@pytest.mark.parametrize("queue_limits", [SMALL])
async def test_tokens_are_bounded_whatever_waits(bench):
    with pytest.raises(QueueFull, match="0 tokens"):
        await bench.admit(bench.request("large", max_tokens=97))
    await bench.admit(bench.request("fits", max_tokens=96))
    with pytest.raises(QueueFull, match="100 tokens"):
        await bench.admit(bench.request())


@pytest.mark.parametrize("queue_limits", [SMALL])
async def test_only_queued_requests_count(bench):
    await bench.admit(*(bench.request() for _ in range(4)))
    assert len(await bench.claim(3)) == 3
    await bench.admit(*(bench.request() for _ in range(3)))
    assert await bench.depth() == (4, 48)


@pytest.mark.parametrize("queue_limits", [SMALL])
async def test_admitting_an_id_again_changes_nothing_even_when_full(bench):
    batch = [bench.request(f"r{i}") for i in range(4)]
    first = await bench.admit(*batch)
    await asyncio.sleep(0.005)
    assert await bench.admit(*batch) == first
    assert await bench.depth() == (4, 48)


async def test_concurrency_counts_until_the_end(bench):
    limits = TenantLimits(concurrency=2)
    await bench.add_worker("w")
    first, second = [bench.request(tenant="k") for _ in range(2)]
    await bench.gateway.admit([first, second], timeout_s=60, tenant_limits=limits)
    first, second = await bench.claim()
    await bench.scheduler.assign(bench.epoch, [(first, "w"), (second, "w")])
    third = bench.request(tenant="k")
    with pytest.raises(ConcurrencyLimited) as refusal:
        await bench.gateway.admit([third], timeout_s=60, tenant_limits=limits)
    assert 1 <= refusal.value.retry_after_s <= 120
    await bench.gateway.admit([bench.request(tenant="other")], timeout_s=60, tenant_limits=limits)
    await bench.worker.publish("w", [bench.token(first, 0, finish="stop")])
    await bench.gateway.admit([third], timeout_s=60, tenant_limits=limits)
    assert await bench.live("k") == 2


async def _ask(bench, limits: TenantLimits, count: int = 1, tenant: str = "t") -> None:
    """As a gateway does: charged as it comes, admitted when it was read."""
    await bench.gateway.charge(tenant, limits)
    requests = [bench.request(tenant=tenant) for _ in range(count)]
    await bench.gateway.admit(requests, timeout_s=60, tenant_limits=limits)


def _waits(refused: Exception, seconds: int, since: float) -> bool:
    """Whether what is refused is to wait for ``seconds``, less those that have passed ``since`` the first request."""
    return seconds - 1 - (time.monotonic() - since) <= refused.retry_after_s <= seconds


async def _seconds_pass(bench, seconds: int, tenant: str = "t") -> None:
    rate = f"{bench.keys.prefix}rate:{tenant}"
    whole, noted = (float(part) - 1000 * seconds for part in (await bench.redis.get(rate)).split(b":"))
    await bench.redis.set(rate, f"{whole:.3f}:{noted:.0f}")


async def test_rate_allows_a_burst_and_then_one_per_interval(bench):
    limits, began = TenantLimits(requests_per_minute=6, burst=3), time.monotonic()
    await _ask(bench, limits, 3)
    with pytest.raises(RateLimited) as refusal:
        await _ask(bench, limits)
    assert _waits(refusal.value, 10, began)
    await _seconds_pass(bench, 10)
    await _ask(bench, limits)
    with pytest.raises(RateLimited):
        await _ask(bench, limits)


async def test_a_request_is_charged_once_as_it_comes_and_for_its_other_sequences_as_it_is_admitted(bench):
    limits = TenantLimits(requests_per_minute=6, burst=4)
    for _ in range(2):
        await bench.gateway.charge("t", limits)  # whatever was in their bodies
    await _ask(bench, limits, 2)
    with pytest.raises(RateLimited):
        await bench.gateway.charge("t", limits)
    await _seconds_pass(bench, 20)
    await bench.gateway.charge("t", limits)
    requests = [bench.request() for _ in range(3)]
    with pytest.raises(RateLimited):
        await bench.gateway.admit(requests, timeout_s=60, tenant_limits=limits)
    await bench.gateway.charge("t", limits)


async def test_a_request_of_more_sequences_than_the_burst_passes_when_nothing_came_before(bench):
    limits, began = TenantLimits(requests_per_minute=6, burst=2), time.monotonic()
    await _ask(bench, limits, 5)
    with pytest.raises(RateLimited) as refusal:
        await _ask(bench, limits)
    assert _waits(refusal.value, 40, began)
    await _seconds_pass(bench, 40)
    await bench.gateway.charge("t", limits)
    with pytest.raises(RateLimited):
        await bench.gateway.admit([bench.request() for _ in range(5)], timeout_s=60, tenant_limits=limits)


async def test_what_is_refused_does_not_use_up_the_rate(bench):
    limits, began = TenantLimits(requests_per_minute=1, burst=3, concurrency=0), time.monotonic()
    with pytest.raises(ConcurrencyLimited):
        await _ask(bench, limits, 3)
    for _ in range(2):
        await bench.gateway.charge("t", limits)
    for _ in range(2):
        with pytest.raises(RateLimited) as refusal:
            await bench.gateway.charge("t", limits)
        assert _waits(refusal.value, 60, began)


async def test_the_rate_says_how_long_to_wait_and_never_over_two_minutes(bench):
    limits, began = TenantLimits(requests_per_minute=2, burst=1), time.monotonic()
    await _ask(bench, limits)
    with pytest.raises(RateLimited) as refusal:
        await _ask(bench, limits)
    assert _waits(refusal.value, 30, began)
    slow = TenantLimits(requests_per_minute=0.1, burst=1)
    await _ask(bench, slow, tenant="s")
    with pytest.raises(RateLimited) as refusal:
        await _ask(bench, slow, tenant="s")
    assert refusal.value.retry_after_s == 120


@pytest.mark.parametrize("queue_limits", [QueueLimits(max_requests=1000, max_tokens=3_000)])
async def test_retry_after_follows_the_speed_at_which_the_queue_drains(bench):
    await bench.add_worker("w", tokens=10**6)
    seconds, _ = await bench.redis.time()
    await bench.run_on("w", *(bench.request(prompt=100, max_tokens=900) for _ in range(3)))
    await bench.admit(*(bench.request(prompt=100, max_tokens=900) for _ in range(3)))
    with pytest.raises(QueueFull) as refusal:
        await bench.admit(bench.request(prompt=100, max_tokens=900))
    assert refusal.value.retry_after_s == 1  # three were assigned within the last second
    await bench.gateway.cancel([f"r{i}" for i in range(3, 6)])
    # 3,000 tokens in 30 s, as the decaying mean sees it a long while after the first of them: 100 tokens per second
    await bench.redis.hset(f"{bench.keys.prefix}drain", mapping={"rate": 0.1, "since": (seconds - 1000) * 1000})
    await bench.admit(*(bench.request(prompt=100, max_tokens=900) for _ in range(3)))
    with pytest.raises(QueueFull) as refusal:
        await bench.admit(bench.request(prompt=100, max_tokens=900))
    assert 9 <= refusal.value.retry_after_s <= 12


def key(name: str, fingerprint: str, base_id: str, seed: int) -> IdempotencyKey:
    return IdempotencyKey(key=name, fingerprint=fingerprint, base_id=base_id, seed=seed)


async def admit_keyed(bench, bound: IdempotencyKey, *, tenant: str = "t", gateway=None, limits=None):
    gateway, name = (gateway, "g2") if gateway else (bench.gateway, "g1")
    request = bench.request(f"{bound.base_id}-0", tenant=tenant, reply_to=name)
    return await gateway.admit([request], timeout_s=60, key=bound, tenant_limits=limits)


async def test_an_idempotency_key_is_bound_once(bench):
    await admit_keyed(bench, key("key", "body", "base1", 11))
    g2 = bench.new_gateway("g2")
    for gateway, owner in ((g2, "g1"), (bench.gateway, "g2")):
        with pytest.raises(KeyBound) as bound:
            await admit_keyed(bench, key("key", "body", "base2", 22), gateway=gateway if gateway is g2 else None)
        assert (bound.value.base_id, bound.value.seed, bound.value.owner) == ("base1", 11, owner)
    assert await bench.depth() == (1, 12)
    await admit_keyed(bench, key("key", "body", "base4", 44), tenant="other")
    with pytest.raises(Conflict):
        await admit_keyed(bench, key("key", "another body", "base5", 55))
    assert await bench.depth() == (2, 24)


async def test_admitting_a_keyed_request_again_after_an_unknown_outcome_changes_nothing(bench):
    first = await admit_keyed(bench, key("key", "body", "base1", 11))
    assert await admit_keyed(bench, key("key", "body", "base1", 11)) == first
    assert await bench.depth() == (1, 12)


async def test_a_refused_request_binds_no_key(bench):
    limits = TenantLimits(concurrency=1)
    await admit_keyed(bench, key("first", "body", "base0", 1), limits=limits)
    before = await bench.redis.dbsize()
    for number in range(20):
        with pytest.raises(ConcurrencyLimited):
            await admit_keyed(bench, key(f"key{number}", "body", f"base{number + 1}", 1), limits=limits)
    assert await bench.redis.dbsize() == before


@pytest.mark.parametrize("queue_limits", [QueueLimits(max_idempotency_keys=3)])
async def test_a_tenant_keeps_its_newest_keys(bench):
    for number in range(5):
        await admit_keyed(bench, key(f"key{number}", "body", f"base{number}", number))
        await asyncio.sleep(0.002)
    await admit_keyed(bench, key("key1", "another body", "new", 1))  # forgotten
    with pytest.raises(Conflict):
        await admit_keyed(bench, key("key4", "another body", "newer", 1))


@pytest.mark.parametrize("queue_limits", [QueueLimits(max_all_idempotency_keys=3)])
async def test_all_tenants_together_keep_the_newest_keys(bench):
    for number in range(5):
        await admit_keyed(bench, key("key", "body", f"base{number}", number), tenant=f"t:{number}")
        await asyncio.sleep(0.002)
    kept = await bench.redis.keys(f"{bench.keys.prefix}idem_of:*")
    assert sorted(name[-3:] for name in kept) == [b"t:2", b"t:3", b"t:4"]
    assert await bench.redis.zcard(f"{bench.keys.prefix}idem:all") == 3
    await admit_keyed(bench, key("key", "another body", "new", 1), tenant="t:1")  # forgotten
    with pytest.raises(Conflict):
        await admit_keyed(bench, key("key", "another body", "newer", 1), tenant="t:4")


@pytest.mark.parametrize("queue_limits", [QueueLimits(idempotency_s=0.05)])
async def test_an_idempotency_key_is_forgotten(bench):
    await admit_keyed(bench, key("key", "body", "base1", 11))
    await asyncio.sleep(0.08)
    await admit_keyed(bench, key("key", "other", "base2", 22))
