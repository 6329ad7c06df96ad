"""Batches of several calls: one decision for all, bounds that hold meanwhile, and nothing left of one given up."""

from __future__ import annotations

import pytest
from msgspec import structs

from services.errors import ConcurrencyLimited, QueueFull
from services.queue.limits import QueueLimits, TenantLimits
from services.queue.scripts import PIECE_BYTES


@pytest.mark.parametrize("queue_limits", [QueueLimits(max_tokens=10**9)])
async def test_a_long_batch_is_admitted_in_bounded_calls_under_one_decision(bench, monkeypatch):
    calls: list[int] = []
    run = bench.gateway._scripts.run

    async def noting(name, *arguments):
        calls.append(sum(len(value) for value in arguments if isinstance(value, bytes)))
        return await run(name, *arguments)

    monkeypatch.setattr(bench.gateway._scripts, "run", noting)
    prompts = [list(range(number, number + 60_000)) for number in range(8)]
    batch = [
        structs.replace(bench.request(), token_ids=prompts[number % 8], prompt_len=60_000) for number in range(320)
    ]
    batch.sort(key=lambda request: request.token_ids[0])
    limits = TenantLimits(concurrency=320)
    admitted = await bench.gateway.admit(batch, timeout_s=60, tenant_limits=limits)
    assert [request.id for request in admitted] == [request.id for request in batch]
    assert len(calls) >= 4
    assert max(calls) <= PIECE_BYTES + 4 * 60_000
    assert (await bench.depth())[0] == 320
    stored = [await bench.redis.strlen(name) for name in await bench.redis.keys(bench.keys.prompt("*"))]
    assert sorted(stored) == [240_000] * 8  # each once
    one = [bench.request() for _ in range(1)]
    with pytest.raises(ConcurrencyLimited):
        await bench.gateway.admit(one, timeout_s=60, tenant_limits=limits)


@pytest.mark.parametrize("queue_limits", [QueueLimits(max_requests=250)])
async def test_a_batch_of_several_calls_is_refused_whole(bench):
    with pytest.raises(QueueFull):
        await bench.admit(*(bench.request() for _ in range(251)))
    assert await bench.depth() == (0, 0)
    await bench.admit(*(bench.request() for _ in range(250)))


def between_calls(bench, monkeypatch, interrupt):
    """Makes a gateway that calls ``interrupt`` once, after the first call of its next batch."""
    gateway = bench.new_gateway("g2")
    run, interrupts = gateway._scripts.run, [interrupt]

    async def interrupted(name, *arguments):
        reply = await run(name, *arguments)
        if interrupts:
            await interrupts.pop()()
        return reply

    monkeypatch.setattr(gateway._scripts, "run", interrupted)
    return gateway


def batch_of(bench, count: int, reply_to: str = "g1"):
    return [bench.request(reply_to=reply_to) for _ in range(count)]


@pytest.mark.parametrize(
    ("queue_limits", "concurrency", "refusal"),
    [
        (QueueLimits(max_requests=250), None, QueueFull),
        (QueueLimits(max_tokens=250 * 12), None, QueueFull),
        (QueueLimits(), 250, ConcurrencyLimited),
    ],
)
async def test_what_a_batch_has_still_to_bring_counts_against_the_bounds(bench, monkeypatch, concurrency, refusal):
    limits = TenantLimits(concurrency=concurrency)
    outcomes: list[bool] = []

    async def others():
        for count in (150, 20, 1):  # 100 are admitted, 130 to come
            try:
                await bench.gateway.admit(batch_of(bench, count), timeout_s=60, tenant_limits=limits)
            except refusal:
                outcomes.append(False)
            else:
                outcomes.append(True)

    gateway = between_calls(bench, monkeypatch, others)
    batch = batch_of(bench, 230, "g2")
    assert len(await gateway.admit(batch, timeout_s=60, tenant_limits=limits)) == 230
    assert outcomes == [False, True, False]  # the last fills it to the brim
    assert await bench.depth() == (250, 250 * 12)
    assert not await bench.redis.exists(f"{bench.keys.prefix}queue:reserved")


@pytest.mark.parametrize("ends", ["cancelled", "lapsed"])
@pytest.mark.parametrize("queue_limits", [QueueLimits(max_requests=250)])
async def test_what_a_batch_that_was_given_up_had_reserved_is_free_again(bench, monkeypatch, ends):
    reserved = f"{bench.keys.prefix}queue:reserved"

    async def fail():
        raise ConnectionError("between two calls")

    batch = batch_of(bench, 250, "g2")
    gateway = between_calls(bench, monkeypatch, fail)
    with pytest.raises(ConnectionError):
        await gateway.admit(batch, timeout_s=60)
    with pytest.raises(QueueFull, match="250 requests wait already"):
        await bench.admit(bench.request())
    if ends == "cancelled":
        await gateway.cancel([request.id for request in batch])
    else:
        assert 0 < await bench.redis.pttl(reserved) <= bench.limits.lease_s * 1000
        await bench.redis.hset(reserved, batch[0].id, "150:1800:1:t")  # its time is over
    await bench.admit(*batch_of(bench, 150))
    assert not await bench.redis.exists(reserved)
