"""Leadership and its fencing, and assignment within leases and credit."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

from services.errors import ErrorInfo, FingerprintMismatch, StaleLeader
from services.messages import Assign, ExpertInfo, SeatReport, TokenEvent
from services.queue.expert_side import ExpertQueue
from services.queue.gateway_side import FIRST_ID
from services.queue.scheduler_side import SchedulerQueue


async def snapshot(bench) -> dict[bytes, bytes]:
    """All that Redis holds."""
    return {key: await bench.redis.dump(key) for key in await bench.redis.keys("*")}


async def test_one_leader_and_rising_epochs(bench):
    standby = SchedulerQueue(bench.redis, bench.keys, bench.limits)
    assert await standby.campaign("standby", 60) is None
    assert await bench.scheduler.renew(bench.epoch, 60)
    await bench.scheduler.resign(bench.epoch)
    epoch = await standby.campaign("standby", 60)
    assert epoch is not None
    assert epoch > bench.epoch
    assert not await bench.scheduler.renew(bench.epoch, 60)
    await bench.scheduler.resign(bench.epoch)  # of no effect: it does not lead any more
    assert await bench.scheduler.campaign("leader", 60) is None


async def test_the_lock_passes_on_when_its_holder_is_silent(bench):
    standby = SchedulerQueue(bench.redis, bench.keys, bench.limits)
    assert await bench.scheduler.renew(bench.epoch, 30)
    assert await standby.campaign("standby", 60) is None
    assert await bench.scheduler.renew(bench.epoch, 0.03)
    await asyncio.sleep(0.05)
    assert await standby.campaign("standby", 60)


async def test_epochs_rise_though_redis_forgot_the_last_one(bench):
    before = bench.epoch
    await asyncio.sleep(0.005)
    await bench.redis.delete(bench.keys.leader, f"{bench.keys.leader}:epoch")
    await bench.lead()
    assert bench.epoch > before


async def test_a_stale_leader_is_refused_and_changes_nothing(bench):
    await bench.add_worker("w")
    await bench.admit(bench.request(), bench.request(), timeout_s=60)
    (claimed,) = await bench.claim(1)
    old = bench.epoch
    await bench.scheduler.resign(old)
    await SchedulerQueue(bench.redis, bench.keys, bench.limits).campaign("other", 60)
    before = await snapshot(bench)
    calls = [
        lambda: bench.scheduler.claim(old, 5),
        lambda: bench.scheduler.assign(old, [(claimed, "w")]),
        lambda: bench.scheduler.release(old, [claimed]),
        lambda: bench.scheduler.fail(old, claimed, ErrorInfo(code="x", message="y")),
        lambda: bench.scheduler.reap(old),
    ]
    for call in calls:
        with pytest.raises(StaleLeader):
            await call()
    assert await snapshot(bench) == before


async def test_claims_of_an_older_epoch_go_back_to_their_places(bench):
    await bench.admit(*(bench.request(f"r{i}") for i in range(3)))
    await bench.claim(2)
    await bench.scheduler.resign(bench.epoch)
    await bench.lead()
    assert (await bench.scheduler.reap(bench.epoch)).requeued == 2
    assert await bench.order() == ["r0", "r1", "r2"]


async def test_assignment_moves_lease_and_credit(bench):
    await bench.add_worker("w", tokens=30)
    (request,) = await bench.run_on("w", bench.request("a"))
    assert await bench.state("a") == "running"
    assert await bench.outstanding("w") == (12, 1)
    _, messages = await bench.worker.read_inbox("w", FIRST_ID, 0)
    assert [Assign(await bench.whole(message.request)) for message in messages] == [Assign(request)]


async def test_assignment_reports_the_time_in_the_queue_to_scheduler_and_worker(bench):
    await bench.add_worker("w")
    await bench.admit(bench.request())
    await asyncio.sleep(0.03)
    (claim,) = await bench.scheduler.claim(bench.epoch, 1)
    (outcome,) = await bench.scheduler.assign(bench.epoch, [(claim.request, "w")])
    assert outcome
    _, (assign,) = await bench.worker.read_inbox("w", FIRST_ID, 0)
    assert 30 <= assign.request.queued_ms <= 1000 * outcome.queued_s < 1000


async def test_credit_bounds_tokens_and_requests(bench):
    await bench.add_worker("tokens", tokens=24, requests=10)
    await bench.add_worker("requests", tokens=1000, requests=2)
    await bench.admit(*(bench.request(f"r{i}") for i in range(6)))
    claimed = await bench.claim()
    pairs = [(request, worker) for request, worker in zip(claimed, ["tokens"] * 3 + ["requests"] * 3, strict=True)]
    outcomes = await bench.scheduler.assign(bench.epoch, pairs)
    assert [bool(outcome) for outcome in outcomes] == [True, True, False, True, True, False]
    assert await bench.order() == ["r2", "r5"]


async def test_an_idle_worker_takes_one_request_beyond_its_credit(bench):
    await bench.add_worker("w", tokens=10)
    state = (await bench.scheduler.workers())[0]
    assert state.has_credit(12)
    await bench.run_on("w", bench.request("a"))
    state = (await bench.scheduler.workers())[0]
    assert not state.has_credit(1)
    await bench.admit(bench.request("b", prompt=1, max_tokens=0))
    assert not any(await bench.scheduler.assign(bench.epoch, [(r, "w") for r in await bench.claim()]))


async def test_a_worker_without_lease_gets_nothing(bench):
    await bench.add_worker("w")
    await bench.admit(bench.request("a"))
    claimed = await bench.claim()
    await bench.expire_lease(bench.keys.workers, "w")
    assert not any(await bench.scheduler.assign(bench.epoch, [(claimed[0], "w")]))
    assert not any(await bench.scheduler.assign(bench.epoch, [(claimed[0], "nobody")]))
    assert await bench.order() == ["a"]
    assert await bench.scheduler.workers() == []
    assert await bench.gateway.look() == []


async def test_a_request_cancelled_while_claimed_is_not_assigned(bench):
    await bench.add_worker("w")
    await bench.admit(bench.request("a"), bench.request("b"))
    claimed = await bench.claim()
    await bench.gateway.cancel(["a"])
    outcomes = await bench.scheduler.assign(bench.epoch, [(request, "w") for request in claimed])
    assert [bool(outcome) for outcome in outcomes] == [False, True]
    assert await bench.depth() == (0, 0)


async def test_an_older_claim_of_the_same_request_is_not_assigned(bench):
    await bench.add_worker("w")
    (old,) = await bench.admit(bench.request("a"))
    (old,) = await bench.claim()
    attempt = await bench.gateway.resync("a", 1)
    await bench.gateway.resubmit(structs.replace(old, attempt=attempt))
    (new,) = await bench.claim()
    outcomes = await bench.scheduler.assign(bench.epoch, [(old, "w"), (new, "w")])
    assert [bool(outcome) for outcome in outcomes] == [False, True]


async def test_the_leader_can_end_a_request_with_an_error(bench):
    await bench.admit(bench.request("a"))
    (claimed,) = await bench.claim()
    error = ErrorInfo(code="context_length_exceeded", message="No worker is large enough.")
    assert await bench.scheduler.fail(bench.epoch, claimed, error)
    assert not await bench.scheduler.fail(bench.epoch, claimed, error)
    (event,) = await bench.events()
    assert event == TokenEvent(request_id="a", attempt=1, index=0, finish="error", error=error)
    assert await bench.live() == 0


async def test_an_unreadable_body_ends_its_request_only(bench):
    await bench.admit(bench.request("bad"), bench.request("good"))
    await bench.redis.hset(bench.keys.request("bad"), "body", b"\xc1")
    assert [request.id for request in await bench.claim()] == ["good"]
    assert bench.ends(await bench.events()) == [("bad", "internal_error")]


async def test_other_weights_of_an_equal_shape_are_refused_while_members_live(bench):
    """A gateway, and a worker of the release before, claim no weights and agree with any."""
    experts, key = ExpertQueue(bench.redis, bench.keys, bench.limits), f"{bench.keys.prefix}weights"
    seat = ExpertInfo(id="e", fingerprint="f", host="h", port=1, memory_bytes=1, pid=1, version="0", weights="tuned")

    async def register(name, weights):
        info = structs.replace(bench.worker_info(name), weights=weights)
        await bench.worker.register(info, 60, credit_tokens=1, credit_requests=1)

    await register("old", "")
    await register("w", "base")
    await bench.gateway.heartbeat(60, "f")
    for refused in (register("w2", "tuned"), experts.join(seat, 60)):
        with pytest.raises(FingerprintMismatch, match="different weights of the same shape"):
            await refused
    await experts.join(structs.replace(seat, weights="base"), 60)
    await bench.redis.set(key, "tuned")  # no member can have written that
    await bench.worker.heartbeat("old", {})
    assert await bench.redis.get(key) == b"tuned"
    for beat in (bench.worker.heartbeat("w", {}), experts.heartbeat("e", SeatReport(status="waiting"))):
        await bench.redis.set(key, "tuned")
        await beat
        assert await bench.redis.get(key) == b"base"
    assert await bench.redis.pttl(key) > 0


async def test_another_form_of_experts_is_refused_by_both_names(bench):
    experts = ExpertQueue(bench.redis, bench.keys, bench.limits)
    seat = ExpertInfo(id="e", fingerprint="f", host="h", port=1, memory_bytes=1, pid=1, version="0", weights="base")
    info = structs.replace(bench.worker_info("w"), weights="base+int4-g128")
    await bench.worker.register(info, 60, credit_tokens=1, credit_requests=1)
    with pytest.raises(FingerprintMismatch, match="hold experts in int4-g128, and this worker in dense"):
        await experts.join(seat, 60)
    with pytest.raises(FingerprintMismatch, match="hold experts in int4-g128, and this worker in int8-channel"):
        await experts.join(structs.replace(seat, weights="base+int8-channel"), 60)
    words = "in int4-g128, and this worker in int4-g128 and other linear layers in fp8-128x128"
    with pytest.raises(FingerprintMismatch, match=words) as refused:
        await experts.join(structs.replace(seat, weights="base+int4-g128+fp8-128x128"), 60)
    assert "--dense-format" in str(refused.value)
    await experts.join(structs.replace(seat, weights="base+int4-g128"), 60)


async def test_another_model_is_refused_while_members_live(bench):
    await bench.add_worker("w")
    with pytest.raises(FingerprintMismatch):
        await bench.worker.register(bench.worker_info("w2", "other"), 60, credit_tokens=1, credit_requests=1)
    with pytest.raises(FingerprintMismatch):
        await bench.gateway.heartbeat(60, "other")
    await bench.gateway.heartbeat(60, "f")
    await bench.redis.delete(f"{bench.keys.prefix}model")  # as its lifetime ends
    await bench.gateway.heartbeat(60, "other")
    await bench.expire_lease(bench.keys.workers, "w")  # it was silent for as long
    with pytest.raises(FingerprintMismatch):
        await bench.worker.heartbeat("w", {})
