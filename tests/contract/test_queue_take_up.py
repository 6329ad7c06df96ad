"""A client that comes back to another gateway: its request moves there. And what an operator does with dead letters."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

from services.errors import NotFound, QueueFull, RateLimited
from services.queue.limits import QueueLimits, TenantLimits


def next_attempt(request, attempt: int, delivered: int = 0):
    return structs.replace(request, attempt=attempt, token_ids=request.token_ids + [7] * delivered)


async def test_taking_up_a_queued_request_keeps_its_place(bench):
    admitted = await bench.admit(bench.request("a"), bench.request("b"))
    g2 = bench.new_gateway("g2")
    taken = await g2.take_up(structs.replace(admitted[0], reply_to="g2"), timeout_s=60)
    assert (taken.attempt, taken.deadline_ms) == (1, admitted[0].deadline_ms)
    assert await bench.order() == ["a", "b"]
    assert bench.ends(await bench.events("g1")) == [("a", "cancelled")]
    assert await bench.gateway.cancel(["a"]) == 0  # the former gateway's client is gone; that must not matter
    assert await bench.gateway.survey({"a": 1}) == {"a": ("moved", 1)}
    assert not await bench.gateway.resubmit(next_attempt(admitted[0], 2))
    assert await bench.gateway.resync("a", 1) is None
    await bench.expire_lease(bench.keys.gateways, "g1")
    assert (await bench.scheduler.reap(bench.epoch)).cancelled == 1  # b alone


async def test_taking_up_a_request_under_way_starts_from_scratch(bench):
    await bench.add_worker("w")
    (request,) = await bench.run_on("w", bench.request("a"))
    await bench.admit(bench.request("b"))
    await bench.worker.publish("w", [bench.token(request, 0)])
    taken = await bench.new_gateway("g2").take_up(structs.replace(request, reply_to="g2"), timeout_s=60)
    assert taken.attempt == 2
    assert await bench.worker.publish("w", [bench.token(request, 1)]) == {"a"}
    assert await bench.outstanding("w") == (0, 0)
    claimed = await bench.claim()
    assert [item.id for item in claimed] == ["a", "b"]
    assert claimed[0] == taken


async def test_taking_up_a_resubmitted_request_drops_what_the_former_client_got(bench):
    await bench.add_worker("w")
    (request,) = await bench.run_on("w", bench.request("a"))
    await bench.worker.publish("w", [bench.token(request, 0)])
    await bench.expire_lease(bench.keys.leases, "a")
    await bench.scheduler.reap(bench.epoch)
    await bench.gateway.resubmit(next_attempt(request, 2, delivered=1))
    taken = await bench.new_gateway("g2").take_up(structs.replace(request, reply_to="g2"), timeout_s=60)
    assert taken.attempt == 3
    (claimed,) = await bench.claim()
    assert claimed.token_ids == request.token_ids


@pytest.mark.parametrize("state", ["queued", "running", "cancelled"])
async def test_a_take_up_that_redis_forgot_is_made_good_by_the_heir(bench, state):
    """The record is the former gateway's again; the client came to the heir last and has a token already."""
    await bench.add_worker("w")
    heir = bench.new_gateway("g2")
    if state == "queued":
        (request,) = await bench.admit(bench.request("a"))
    else:
        (request,) = await bench.run_on("w", bench.request("a"))
    if state == "cancelled":
        await bench.gateway.cancel(["a"])
    assert await heir.survey({"a": 2}) == {"a": ("moved", 1)}
    assert await heir.resync("a", 2) is None
    assert await heir.resync("a", 2, retake=True) == 3
    assert await heir.resubmit(next_attempt(structs.replace(request, reply_to="g2"), 3, delivered=1))
    assert bench.ends(await bench.events("g1")) == ([] if state == "cancelled" else [("a", "cancelled")])
    assert await bench.gateway.cancel(["a"]) == 0
    (claimed,) = await bench.claim()
    assert (claimed.reply_to, claimed.attempt, claimed.delivered) == ("g2", 3, 1)
    await bench.expire_lease(bench.keys.gateways, "g1")
    assert (await bench.scheduler.reap(bench.epoch)).cancelled == 0


@pytest.mark.parametrize("queue_limits", [QueueLimits(max_requests=2)])
async def test_taking_up_an_ended_request_is_an_admission(bench):
    (request,) = await bench.admit(bench.request("a"))
    await bench.gateway.cancel(["a"])
    g2 = bench.new_gateway("g2")
    moved = structs.replace(request, reply_to="g2")
    await bench.admit(bench.request(), bench.request())
    with pytest.raises(QueueFull):
        await g2.take_up(moved, timeout_s=60)
    await bench.claim(1)
    assert (await g2.take_up(moved, timeout_s=60)).attempt == 2
    await bench.claim()
    unknown = bench.request("never seen", reply_to="g2")
    assert (await g2.take_up(unknown, timeout_s=60)).attempt == 1


@pytest.mark.parametrize("queue_limits", [QueueLimits(max_attempts=1, max_dead_letters=3)])
async def test_dead_letters_are_listed_shown_retried_and_dropped(bench):
    await bench.add_worker("w")
    for i in range(5):
        await bench.run_on("w", bench.request(f"d{i}"))
        await asyncio.sleep(0.002)
        await bench.expire_lease(bench.keys.leases, f"d{i}")
        assert (await bench.scheduler.reap(bench.epoch)).dead == 1
    assert [letter.request.id for letter in await bench.dead.list()] == ["d4", "d3", "d2"]
    assert not await bench.redis.exists(bench.keys.dead_letter("d0"))
    letter = await bench.dead.show("d4")
    assert (letter.failures, letter.last_worker, letter.request.prompt_len) == (1, "w", 4)
    operator = bench.new_gateway("operator")
    await operator.heartbeat(60)
    retried = await bench.dead.retry("d4", reply_to="operator", timeout_s=60)
    assert retried.attempt == letter.request.attempt + 1
    (claimed,) = await bench.claim()
    assert claimed == retried
    await bench.scheduler.assign(bench.epoch, [(claimed, "w")])
    await bench.worker.publish("w", [bench.token(claimed, 0, finish="stop")])
    assert bench.ends(await bench.events("operator")) == [("d4", "stop")]
    await bench.dead.drop("d3")
    assert [item.request.id for item in await bench.dead.list()] == ["d2"]


async def test_unknown_dead_letters_are_not_found(bench):
    for call in (bench.dead.show("x"), bench.dead.drop("x"), bench.dead.retry("x", reply_to="g1", timeout_s=1)):
        with pytest.raises(NotFound):
            await call


async def come_back(bench, requests, limits: TenantLimits) -> None:
    """As a gateway does: the POST is charged as it comes, and what it stands for taken up."""
    await bench.gateway.charge("t", limits)
    for place, request in enumerate(requests):
        await bench.gateway.take_up(request, timeout_s=60, tenant_limits=limits, place=place, of=len(requests))


async def test_who_comes_back_for_what_ended_is_charged_for_each_sequence(bench):
    limits = TenantLimits(requests_per_minute=6, burst=8)
    batch = [bench.request() for _ in range(3)]
    await bench.gateway.charge("t", limits)
    await bench.gateway.admit(batch, timeout_s=60, tenant_limits=limits)  # 3 of 8
    await bench.gateway.cancel([request.id for request in batch])
    await come_back(bench, batch, limits)  # 6 of 8
    assert await bench.depth() == (3, 36)
    await bench.gateway.cancel([request.id for request in batch])
    with pytest.raises(RateLimited):
        await come_back(bench, batch, limits)
    assert await bench.depth() == (0, 0)  # refused whole
    await bench.gateway.charge("t", limits)  # and charged as it came alone
    with pytest.raises(RateLimited):
        await bench.gateway.charge("t", limits)


async def test_who_comes_back_for_what_lives_is_charged_once(bench):
    limits = TenantLimits(requests_per_minute=6, burst=4)
    batch = [bench.request() for _ in range(3)]
    await bench.gateway.charge("t", limits)
    await bench.gateway.admit(batch, timeout_s=60, tenant_limits=limits)  # 3 of 4
    await come_back(bench, batch, limits)
    assert await bench.depth() == (3, 36)


async def test_more_sequences_than_the_burst_are_taken_up_when_the_allowance_is_whole(bench):
    limits = TenantLimits(requests_per_minute=6, burst=2)
    batch = [bench.request() for _ in range(5)]
    await come_back(bench, batch, limits)
    assert await bench.depth() == (5, 60)
    with pytest.raises(RateLimited):
        await bench.gateway.charge("t", limits)
