"""What expires, what is lost, and how it comes back: every request ends exactly once."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs
from testkit.waiting import LIMIT_S

from services.messages import Cancel
from services.queue.gateway_side import FIRST_ID
from services.queue.limits import QueueLimits


def next_attempt(request, attempt: int, delivered: int = 0):
    return structs.replace(request, attempt=attempt, token_ids=request.token_ids + [7] * delivered)


async def test_a_deadline_in_the_queue_ends_the_request(bench):
    await bench.admit(bench.request("a"), timeout_s=0.005)
    await bench.admit(bench.request("b"))
    await asyncio.sleep(0.01)
    assert (await bench.scheduler.reap(bench.epoch)).expired == 1
    (event,) = await bench.events()
    assert (event.request_id, event.finish, event.error.code) == ("a", "error", "deadline_exceeded")
    assert event.error.retry_after_s
    assert await bench.depth() == (1, 12)
    assert await bench.live() == 1


async def test_a_lost_attempt_is_resubmitted_at_its_place(bench):
    await bench.add_worker("w")
    (request,) = await bench.run_on("w", bench.request("first"))
    await bench.admit(bench.request("second"))
    await bench.worker.publish("w", [bench.token(request, 0), bench.token(request, 1)])
    await bench.expire_lease(bench.keys.leases, "first")
    report = await bench.scheduler.reap(bench.epoch)
    assert (report.lost, report.dead) == (1, 0)
    assert await bench.outstanding("w") == (0, 0)
    events = await bench.events()
    assert [event.index for event in events[:2]] == [0, 1]
    assert bench.lost(events[2:]) == [("first", 2)]
    assert await bench.worker.publish("w", [bench.token(request, 2)]) == {"first"}
    _, messages = await bench.worker.read_inbox("w", FIRST_ID, 0)
    assert messages[-1] == Cancel("first", 1)
    again = next_attempt(request, 2, delivered=2)
    assert await bench.gateway.resubmit(again)
    assert await bench.gateway.resubmit(again)  # an answer that got lost may be asked for again
    assert await bench.depth() == (2, 24)
    claimed = await bench.claim()
    assert [item.id for item in claimed] == ["first", "second"]
    assert claimed[0] == again
    assert not await bench.gateway.resubmit(next_attempt(request, 1))


async def test_a_dead_worker_gives_back_all_it_held(bench):
    await bench.add_worker("w")
    await bench.run_on("w", *(bench.request(f"r{i}") for i in range(5)))
    for index, member in ((bench.keys.workers, "w"), *((bench.keys.leases, f"r{i}") for i in range(5))):
        await bench.expire_lease(index, member)
    report = await bench.scheduler.reap(bench.epoch, 3)
    assert (report.lost, report.workers, report.more) == (5, 0, True)  # two of them through their own leases
    assert (await bench.scheduler.reap(bench.epoch)).workers == 1
    assert not await bench.redis.exists(
        bench.keys.worker("w"), bench.keys.inbox("w"), bench.keys.held("w"), bench.keys.workers
    )
    assert sorted(bench.lost(await bench.events())) == [(f"r{i}", 2) for i in range(5)]


async def test_a_heartbeat_keeps_leases_and_names_what_is_gone(bench):
    await bench.add_worker("w")
    await bench.run_on("w", bench.request("kept"), bench.request("dropped"))
    for request_id in ("kept", "dropped"):
        await bench.expire_lease(bench.keys.leases, request_id)
    assert await bench.worker.heartbeat("w", {"kept": 1, "gone": 1}) == {"gone"}
    assert (await bench.scheduler.reap(bench.epoch)).lost == 1
    assert await bench.worker.heartbeat("w", {"kept": 1, "dropped": 1}) == {"dropped"}
    assert await bench.worker.heartbeat("w", {"kept": 2}) == {"kept"}


async def test_a_worker_that_was_given_up_registers_again(bench):
    await bench.add_worker("w")
    await bench.run_on("w", bench.request("a"))
    await bench.expire_lease(bench.keys.workers, "w")
    assert (await bench.scheduler.reap(bench.epoch)).workers == 1
    assert await bench.worker.heartbeat("w", {"a": 1}) == {"a"}
    assert await bench.outstanding("w") == (0, 0)


@pytest.mark.parametrize("queue_limits", [QueueLimits(max_attempts=2)])
async def test_over_the_cap_a_request_becomes_a_dead_letter(bench):
    await bench.add_worker("w")
    (request,) = await bench.run_on("w", bench.request("a"))
    await bench.expire_lease(bench.keys.leases, "a")
    await bench.scheduler.reap(bench.epoch)
    assert await bench.gateway.resubmit(next_attempt(request, 2))
    await bench.scheduler.assign(bench.epoch, [(claimed, "w") for claimed in await bench.claim()])
    await bench.expire_lease(bench.keys.leases, "a")
    report = await bench.scheduler.reap(bench.epoch)
    assert (report.lost, report.dead) == (0, 1)
    events = await bench.events()
    assert bench.lost(events) == [("a", 2)]
    assert bench.ends(events) == [("a", "attempts_exhausted")]
    assert await bench.live() == 0
    assert await bench.outstanding("w") == (0, 0)
    assert (await bench.scheduler.depth()).dead_letters == 1
    assert not await bench.gateway.resubmit(next_attempt(request, 3))


@pytest.mark.parametrize("queue_limits", [QueueLimits(max_attempts=5, max_stuck=2)])
@pytest.mark.parametrize(("new_tokens", "deaths"), [(True, 5), (False, 2)])
async def test_a_request_that_is_stuck_reaches_the_dead_letters_sooner(bench, new_tokens, deaths):
    await bench.add_worker("w")
    (request,) = await bench.run_on("w", bench.request("a"))
    for attempt in range(1, deaths + 1):
        for index in range(2 * attempt - 2, 2 * attempt if new_tokens else 0):
            await bench.worker.publish("w", [bench.token(structs.replace(request, attempt=attempt), index)])
        await bench.expire_lease(bench.keys.leases, "a")
        report = await bench.scheduler.reap(bench.epoch)
        assert (report.lost, report.dead) == ((1, 0) if attempt < deaths else (0, 1))
        if attempt < deaths:
            assert await bench.gateway.resubmit(next_attempt(request, attempt + 1))
            await bench.scheduler.assign(bench.epoch, [(claimed, "w") for claimed in await bench.claim()])


async def test_a_heartbeat_that_overlaps_deregistering_does_not_enter_the_worker_again(bench):
    await bench.add_worker("w")
    await bench.worker.deregister("w")
    assert await bench.worker.heartbeat("w", {}) == set()
    assert await bench.scheduler.workers() == []


async def test_a_worker_that_leaves_gives_back_without_a_failure(bench):
    await bench.add_worker("w")
    started, waiting = await bench.run_on("w", bench.request("started"), bench.request("waiting"))
    await bench.admit(bench.request("later"))
    await bench.worker.publish("w", [bench.token(started, 0)])
    await bench.worker.deregister("w")
    assert await bench.order() == ["waiting", "later"]
    assert await bench.attempt("waiting") == 1
    assert bench.lost(await bench.events()) == [("started", 2)]
    for request_id in ("started", "waiting"):
        assert int(await bench.redis.hget(bench.keys.request(request_id), "failures")) == 0
    assert await bench.worker.publish("w", [bench.token(waiting, 0)]) == {"waiting"}
    assert await bench.scheduler.workers() == []


async def test_a_lost_attempt_that_nobody_resubmits_is_given_up(bench):
    await bench.add_worker("w")
    await bench.run_on("w", bench.request("a"))
    await bench.expire_lease(bench.keys.leases, "a")
    await bench.scheduler.reap(bench.epoch)
    assert await bench.state("a") == "lost"
    await bench.expire_lease(bench.keys.leases, "a")
    assert (await bench.scheduler.reap(bench.epoch)).abandoned == 1
    assert bench.ends(await bench.events()) == [("a", "unavailable")]
    assert await bench.live() == 0


async def test_a_claim_that_the_leader_forgot_goes_back(bench):
    await bench.admit(bench.request("a"))
    (claimed,) = await bench.claim()
    await bench.expire_lease(bench.keys.leases, "a")
    assert (await bench.scheduler.reap(bench.epoch)).requeued == 1
    await bench.add_worker("w")
    assert not any(await bench.scheduler.assign(bench.epoch, [(claimed, "w")]))
    assert await bench.order() == ["a"]


async def test_requests_of_a_dead_gateway_are_cancelled(bench):
    await bench.add_worker("w")
    await bench.run_on("w", bench.request("running"))
    await bench.admit(bench.request("queued"))
    await bench.expire_lease(bench.keys.gateways, "g1")
    report = await bench.scheduler.reap(bench.epoch)
    assert (report.cancelled, report.gateways) == (2, 1)
    assert await bench.depth() == (0, 0)
    assert await bench.outstanding("w") == (0, 0)
    assert await bench.live() == 0
    _, messages = await bench.worker.read_inbox("w", FIRST_ID, 0)
    assert messages[-1] == Cancel("running", 1)
    assert sorted(bench.ends(await bench.events())) == [("queued", "cancelled"), ("running", "cancelled")]
    assert 0 < await bench.redis.pttl(bench.keys.results("g1")) <= bench.limits.tombstone_s * 1000


async def test_a_gateway_that_died_right_after_its_first_admission_is_noticed(bench):
    await bench.new_gateway("g2").admit([bench.request("a", reply_to="g2")], timeout_s=60)
    await bench.expire_lease(bench.keys.gateways, "g2")
    assert (await bench.scheduler.reap(bench.epoch)).cancelled == 1


async def test_a_gateway_leaves_when_it_waits_for_nothing(bench):
    await bench.admit(bench.request("a"))
    await bench.gateway.leave()
    assert await bench.redis.zscore(bench.keys.gateways, "g1")
    await bench.gateway.cancel(["a"])
    await bench.gateway.leave()
    assert await bench.redis.zscore(bench.keys.gateways, "g1") is None


async def test_nothing_is_reclaimed_while_a_hold_is_on(bench):
    await bench.add_worker("w")
    await bench.run_on("w", bench.request("a"))
    await bench.admit(bench.request("late"), timeout_s=0.001)
    for index, member in ((bench.keys.leases, "a"), (bench.keys.workers, "w"), (bench.keys.gateways, "g1")):
        await bench.expire_lease(index, member)
    await asyncio.sleep(0.01)  # past the deadline
    await bench.scheduler.hold_reclaims(1.0)
    await bench.scheduler.hold_reclaims(0.001)  # does not shorten it
    report = await bench.scheduler.reap(bench.epoch)
    assert report.held
    assert (report.lost, report.workers, report.gateways, report.cancelled) == (0, 0, 0, 0)
    assert report.expired == 1
    await asyncio.sleep(1.1)
    report = await bench.scheduler.reap(bench.epoch)
    assert not report.held
    assert (report.workers, report.gateways) == (1, 1)


async def until_reclaimed(bench):
    """The first report after a hold. Whoever asks so often starts none, but for a machine that stands still."""
    async with asyncio.timeout(LIMIT_S):
        while (report := await bench.scheduler.reap(bench.epoch)).held:
            await asyncio.sleep(0.02)
    return report


@pytest.mark.parametrize("queue_limits", [QueueLimits(lease_s=1.0)])
async def test_a_new_run_id_of_the_server_starts_a_hold(bench):
    assert not (await bench.scheduler.reap(bench.epoch)).held
    await bench.redis.set(f"{bench.keys.prefix}run_id", "the server before")
    assert (await bench.scheduler.reap(bench.epoch)).held
    assert (await bench.scheduler.reap(bench.epoch)).held
    await until_reclaimed(bench)
    assert (await bench.redis.info("server"))["run_id"] == (
        await bench.redis.get(f"{bench.keys.prefix}run_id")
    ).decode()


@pytest.mark.parametrize("queue_limits", [QueueLimits(lease_s=1.0)])
async def test_a_server_that_stood_still_starts_a_hold(bench):
    """Its own clock ran on, and everybody's lease with it; that nobody called shows it."""
    await bench.add_worker("w")
    await bench.run_on("w", bench.request("a"))
    assert not (await bench.scheduler.reap(bench.epoch)).held
    await bench.expire_lease(bench.keys.leases, "a")
    await bench.expire_lease(bench.keys.gateways, "g1")
    await asyncio.sleep(0.7)
    report = await bench.scheduler.reap(bench.epoch)
    assert (report.held, report.lost, report.gateways) == (True, 0, 0)
    await bench.gateway.heartbeat(60)
    assert await bench.worker.heartbeat("w", {"a": 1}) == set()
    report = await until_reclaimed(bench)
    assert (report.lost, report.gateways) == (0, 0)


async def test_resync_fences_the_running_attempt_off(bench):
    await bench.add_worker("w")
    (request,) = await bench.run_on("w", bench.request("a"))
    assert await bench.gateway.resync("a", 1) == 2
    assert await bench.worker.publish("w", [bench.token(request, 5)]) == {"a"}
    assert await bench.gateway.resync("a", 1) == 2
    assert await bench.gateway.resubmit(next_attempt(request, 2))
    (claimed,) = await bench.claim()
    assert claimed.attempt == 2
    assert int(await bench.redis.hget(bench.keys.request("a"), "failures")) == 0
    assert await bench.gateway.resync("unknown", 4) == 5


async def test_a_cancelled_request_cannot_come_back_by_resubmission(bench):
    await bench.add_worker("w")
    (request,) = await bench.run_on("w", bench.request("a"))
    await bench.expire_lease(bench.keys.leases, "a")
    await bench.scheduler.reap(bench.epoch)
    await bench.gateway.cancel(["a"])
    assert not await bench.gateway.resubmit(next_attempt(request, 2))
    assert await bench.gateway.resync("a", 2) is None


async def test_reaping_is_bounded_and_says_that_more_is_left(bench):
    await bench.admit(*(bench.request() for _ in range(10)), timeout_s=0.001)
    await asyncio.sleep(0.005)
    report = await bench.scheduler.reap(bench.epoch, 4)
    assert (report.expired, report.more) == (4, True)
    report = await bench.scheduler.reap(bench.epoch, 100)
    assert (report.expired, report.more) == (6, False)
