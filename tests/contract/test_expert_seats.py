"""Seats of expert workers: numbers, leases, assignments, and what only the leader may do."""

from __future__ import annotations

import asyncio
from unittest.mock import AsyncMock

import pytest
from msgspec import structs
from testkit.fabric.expert_floor import GROUPS, LEASE_S, WAITING, expert, table
from testkit.waiting import LIMIT_S

from services.errors import FingerprintMismatch, QueueUnavailable, StaleLeader
from services.messages import SeatReport, SeatRows
from services.queue.limits import QueueLimits
from services.queue.scheduler_side import SchedulerQueue
from services.queue.seats import WHOLE_S, SeatRegistry
from services.routing import Seat


async def test_workers_that_race_get_seats_of_their_own(floor):
    numbers = await asyncio.gather(*(floor.new_experts().join(expert(f"e{i}"), LEASE_S) for i in range(20)))
    assert len(set(numbers)) == 20
    assert {state.number for state in await floor.registry.seats()} == set(numbers)


async def test_joining_twice_keeps_the_seat_and_renews_what_is_known(floor):
    (first,) = await floor.join("e1")
    assert await floor.join("e1") == [first]
    assert await floor.new_experts().join(structs.replace(expert("e1"), port=9), LEASE_S) == first
    (state,) = await floor.registry.seats()
    assert (state.number, state.info.port, state.status, state.report) == (first, 9, "waiting", WAITING)
    assert state.seat(1) == Seat(number=first, worker="e1", group=1, host="h", port=9, node="n")


async def test_a_number_is_never_given_to_another(floor):
    given = await floor.join("e1", "e2")
    await floor.experts.deregister("e2")
    given += await floor.join("e3")
    await floor.lapse("e3")
    assert (await floor.registry.reap(floor.e)).seats == (given[-1],)
    given += await floor.join("e4")
    assert given == sorted(set(given))
    assert set(await floor.seats()) == {"e1", "e4"}


async def test_a_worker_whose_lease_was_lost_gets_its_seat_back(floor):
    (number,) = await floor.join("e1")
    await floor.lapse("e1")
    await floor.registry.reap(floor.e)
    assert await floor.seats() == {}
    await floor.join("e2")
    orders = await floor.experts.heartbeat("e1", SeatReport(status="ready", group=1, digest="d"))
    assert orders.number == number
    assert (await floor.seats())["e1"].report.group == 1
    assert (await floor.experts.heartbeat("e1", WAITING)).number == number


async def test_a_lapsed_seat_that_was_not_reaped_is_only_renewed(floor, monkeypatch):
    (number,) = await floor.join("e1")
    await floor.lapse("e1")
    assert "e1" in await floor.seats()
    entered = AsyncMock(side_effect=AssertionError("it joined again"))
    monkeypatch.setattr(floor.experts, "_enter", entered)
    orders = await floor.experts.heartbeat("e1", WAITING)
    assert orders.number == number
    assert (await floor.registry.reap(floor.e)).seats == ()


async def test_an_emptied_redis_gives_no_old_number_to_a_new_worker(floor):
    numbers = await floor.join("e1", "e2")
    second, _ = await floor.redis.time()
    while (await floor.redis.time())[0] < second + 2:  # numbers follow Redis TIME, in seconds
        await asyncio.sleep(0.02)
    await floor.redis.flushall()
    await floor.redis.script_flush()
    (fresh,) = await floor.join("e3")
    assert fresh not in numbers
    back = [await floor.experts.heartbeat(worker, WAITING) for worker in ("e1", "e2")]
    assert [orders.number for orders in back] == numbers
    assert (await floor.join("e4"))[0] > fresh


async def test_a_number_that_another_has_by_now_is_not_taken_back(floor):
    (number,) = await floor.join("e1")
    await floor.redis.flushall()
    await floor.redis.zadd(floor.keys.seat_numbers, {"e2": number})
    assert (await floor.experts.heartbeat("e1", WAITING)).number > number


async def test_numbers_survive_a_counter_that_is_ahead_of_the_clock(floor):
    await floor.redis.set(floor.keys.last_seat, 4_000_000_000)
    assert await floor.join("e1", "e2") == [4_000_000_001, 4_000_000_002]


async def test_another_model_is_refused_among_experts_and_attention_workers(floor):
    await floor.bench.add_worker("w")  # serves "f"
    with pytest.raises(FingerprintMismatch, match="fingerprint f"):
        await floor.experts.join(expert("e1", "g"), LEASE_S)
    assert await floor.seats() == {}
    assert (await floor.experts.heartbeat("e1", WAITING)).number == 0
    await floor.join("e2")
    await floor.redis.delete(f"{floor.keys.prefix}model")
    await floor.experts.heartbeat("e2", WAITING)
    with pytest.raises(FingerprintMismatch):
        await floor.bench.worker.register(
            floor.bench.worker_info("w2", "g"), LEASE_S, credit_tokens=1, credit_requests=1
        )
    await floor.redis.set(f"{floor.keys.prefix}model", "g")
    await floor.redis.zadd(floor.keys.seats, {"e2": 1})  # it was silent for long enough for others to come
    with pytest.raises(FingerprintMismatch):
        await floor.experts.heartbeat("e2", WAITING)


async def test_an_assignment_reaches_the_worker_and_its_report_the_scheduler(floor):
    await floor.join("e1")
    assert (await floor.experts.heartbeat("e1", WAITING)).assignment is None
    assert await floor.registry.assign_groups(floor.e, [("e1", GROUPS[1])]) == [True]
    orders = await floor.experts.heartbeat("e1", WAITING)
    assert orders.assignment is not None
    assert orders.assignment.group == GROUPS[1]
    again = await floor.experts.heartbeat("e1", SeatReport(status="loading", group=1))
    assert again.assignment == orders.assignment
    state = (await floor.seats())["e1"]
    assert (state.status, state.assigned, state.serves(GROUPS[1])) == ("loading", orders.assignment.digest, False)
    ready = SeatReport(status="ready", group=1, digest=orders.assignment.digest, outstanding_rows=40)
    await floor.experts.heartbeat("e1", ready)
    state = (await floor.seats())["e1"]
    assert (state.report, state.serves(GROUPS[1]), state.serves(GROUPS[0])) == (ready, True, False)
    assert await floor.registry.assign_groups(floor.e, [("e1", GROUPS[0])]) == [True]
    changed = (await floor.experts.heartbeat("e1", ready)).assignment
    assert changed is not None
    assert (changed.group, changed.digest) == (GROUPS[0], GROUPS[0].digest)
    assert await floor.registry.assign_groups(floor.e, [("nobody", GROUPS[0])]) == [False]


async def test_a_seat_that_redis_forgot_is_back_with_all_that_it_holds_in_one_step(floor, monkeypatch):
    await floor.join("e1", "e2")
    for worker, group in (("e1", GROUPS[1]), ("e2", GROUPS[0])):
        await floor.registry.assign_groups(floor.e, [(worker, group)])
        await floor.experts.heartbeat(worker, WAITING)
    await floor.redis.flushall()
    await floor.bench.lead()
    report = SeatReport(status="ready", group=1, digest=GROUPS[1].digest)
    beat, seen = floor.experts._beat, []

    async def watched(*arguments):
        seen.append(await floor.seats())
        return await beat(*arguments)

    monkeypatch.setattr(floor.experts, "_beat", watched)
    orders = await floor.experts.heartbeat("e1", report)
    assert orders.assignment is not None
    assert orders.assignment.group == GROUPS[1]
    assert seen[0] == {}
    state = seen[1]["e1"]
    assert (state.status, state.report, state.assigned) == ("ready", report, report.digest)
    assert await floor.registry.groups() == [GROUPS[1]]


async def test_a_seat_back_without_a_table_holds_reaping_off_and_one_that_lapsed_does_not(floor):
    await floor.join("e1", "e2")
    await floor.publish("e1", "e2")
    await floor.registry.reap(floor.e)
    await floor.lapse("e1")
    await floor.registry.reap(floor.e)
    await floor.experts.heartbeat("e1", WAITING)
    assert not (await floor.registry.reap(floor.e)).held
    await floor.redis.flushall()
    await floor.bench.lead()
    assert not (await floor.registry.reap(floor.bench.epoch)).held
    await floor.join("fresh")
    assert not (await floor.registry.reap(floor.bench.epoch)).held
    await floor.experts.heartbeat("e2", WAITING)
    assert (await floor.registry.reap(floor.bench.epoch)).held


async def test_counted_rows_reach_the_scheduler_separately_from_the_seats(floor):
    numbers = await floor.join("e1", "e2")
    rows = SeatRows(digest="d", rows={0: (3, 0), 7: (0, 900)})
    await floor.experts.heartbeat("e1", WAITING, rows)
    await floor.experts.heartbeat("e1", WAITING)
    assert await floor.registry.rows() == {numbers[0]: rows}


@pytest.mark.parametrize("act", ["join", "status", "leave", "deregister"])
async def test_the_scheduler_wakes_when_a_seat_changes(floor, act):
    await floor.join("e1")
    await floor.redis.delete(floor.keys.wake)
    await floor.experts.heartbeat("e1", WAITING)
    assert not await floor.bench.scheduler.wait_for_work(0.1)
    if act == "join":
        await floor.join("e2")
    elif act == "status":
        await floor.experts.heartbeat("e1", SeatReport(status="ready"))
    elif act == "leave":
        await floor.experts.leave("e1")
    else:
        await floor.experts.deregister("e1")
    assert await floor.bench.scheduler.wait_for_work(0.1)


async def test_only_the_leader_assigns_publishes_dismisses_and_reaps(floor):
    await floor.join("e1")
    await floor.publish("e1")
    await floor.redis.delete(floor.keys.leader)
    other = SchedulerQueue(floor.redis, floor.keys, floor.bench.limits)
    epoch = await other.campaign("other", 60)
    assert epoch is not None
    assert epoch > floor.e
    following = (await floor.registry.table_epochs()).following
    await floor.lapse("e1")
    for call in (
        floor.registry.publish_table(floor.e, table(following)),
        floor.registry.assign_groups(floor.e, [("e1", GROUPS[0])]),
        floor.registry.dismiss(floor.e, "e1"),
        floor.registry.reap(floor.e),
    ):
        with pytest.raises(StaleLeader):
            await call
    state = (await floor.seats())["e1"]
    assert (state.assigned, state.dismissed) == (None, False)
    assert len((await floor.reader.read_table()).seats) == 1
    await floor.registry.publish_table(epoch, table(following))
    assert await floor.reader.read_table() == table(following)
    assert len((await floor.registry.reap(epoch)).seats) == 1


async def test_a_dead_seat_is_reaped_after_its_lease_and_not_before(floor):
    lived, died = await floor.join("e1"), await floor.experts.join(expert("e2"), 30)
    assert (await floor.registry.reap(floor.e)).seats == ()
    assert await floor.experts.join(expert("e2"), 0.15) == died
    await asyncio.sleep(0.2)
    assert len(await floor.registry.seats()) == 2
    report = await floor.registry.reap(floor.e)
    assert (report.seats, report.more) == ((died,), False)
    assert [state.number for state in await floor.registry.seats()] == lived
    assert not await floor.redis.exists(floor.keys.seat("e2"))


async def test_reaping_is_bounded_and_says_that_more_is_left(floor):
    for worker in ("e1", "e2", "e3"):
        await floor.join(worker)
        await floor.lapse(worker)
    report = await floor.registry.reap(floor.e, 2)
    assert (len(report.seats), report.more) == (2, True)
    report = await floor.registry.reap(floor.e, 2)
    assert (len(report.seats), report.more) == (1, False)


async def test_a_record_without_its_seat_is_joined_again_under_its_number(floor):
    """The hash expires when no scheduler has reaped for long."""
    (number,) = await floor.join("e1")
    await floor.redis.delete(floor.keys.seat("e1"))
    assert await floor.registry.seats() == []
    orders = await floor.experts.heartbeat("e1", WAITING)
    assert orders.number == number


@pytest.mark.parametrize("queue_limits", [QueueLimits(lease_s=0.4)])
async def test_after_redis_was_away_nobody_is_reaped_for_one_lease(durable_floor):
    server, floor = durable_floor
    numbers = await floor.join("e1", "e2")
    made = await floor.publish("e1", "e2")
    await floor.reader.enter("w", LEASE_S)
    assert not (await floor.registry.reap(floor.e)).held
    server.kill()
    for call in (
        floor.experts.join(expert("e3"), LEASE_S),
        floor.experts.heartbeat("e1", WAITING),
        floor.experts.leave("e1"),
        floor.registry.seats(),
        floor.registry.reap(floor.e),
        floor.registry.publish_table(floor.e, table(made.epoch + 1)),
        floor.reader.read_table(made.epoch, 10),
        floor.reader.note_epoch("w", made.epoch, LEASE_S),
    ):
        with pytest.raises(QueueUnavailable):
            await call
    server.start()
    for index, member in ((floor.keys.seats, "e1"), (floor.keys.seats, "e2"), (floor.keys.table_readers, "w")):
        await floor.bench.expire_lease(index, member)
    report = await floor.registry.reap(floor.e)
    assert (report.held, report.seats, report.readers) == (True, (), 0)
    assert [state.number for state in await floor.registry.seats()] == numbers
    assert await floor.reader.read_table() == made
    assert (await floor.registry.table_epochs()).oldest == made.epoch
    assert (await floor.experts.heartbeat("e1", WAITING)).number == numbers[0]
    async with asyncio.timeout(LIMIT_S):
        while (report := await floor.registry.reap(floor.e)).held:
            await asyncio.sleep(0.05)
    assert (report.seats, report.readers) == ((numbers[1],), 1)
    assert (await floor.join("e4"))[0] > numbers[1]


async def test_only_what_changed_is_read_again(floor, monkeypatch):
    now = 0.0
    registry = SeatRegistry(floor.redis, floor.keys, floor.bench.limits, clock=lambda: now + 100)
    read, run = [], registry._scripts.run

    async def counted(name, *arguments):
        reply = await run(name, *arguments)
        if name == "seats":
            read.append((reply[1], sorted(row[0] for row in reply[4])))
        return reply

    monkeypatch.setattr(registry._scripts, "run", counted)
    first, second, third = await floor.join("e1", "e2", "e3")
    whole = await registry.seats()
    assert read.pop() == (1, [first, second, third])
    assert [found is seat for found, seat in zip(await registry.seats(), whole, strict=True)] == [True] * 3
    assert read.pop() == (0, [])
    busy = SeatReport(status="waiting", outstanding_rows=7)
    await floor.experts.heartbeat("e1", busy)
    await floor.experts.heartbeat("e1", SeatReport(status="waiting", outstanding_rows=9))
    await registry.seats()
    assert len(read.pop()[1]) <= 1, "the first report of a seat is news, rows in flight are not"
    await floor.experts.heartbeat("e1", SeatReport(status="waiting", outstanding_rows=8))
    await registry.seats()
    assert read.pop() == (0, [])
    news = (
        ("e1", floor.experts.heartbeat("e1", SeatReport(status="loading", group=1))),
        ("e1", floor.experts.heartbeat("e1", SeatReport(status="loading", group=1, digest="d"))),
        ("e2", floor.registry.assign_groups(floor.e, [("e2", GROUPS[0])])),
        ("e2", floor.registry.dismiss(floor.e, "e2")),
        ("e3", floor.experts.leave("e3")),
        ("e3", floor.experts.join(structs.replace(expert("e3"), port=9), LEASE_S)),
    )
    numbers = {"e1": first, "e2": second, "e3": third}
    for worker, change in news:
        await change
        assert await registry.seats() == await floor.registry.seats()
        assert read.pop() == (0, [numbers[worker]])
    await floor.experts.deregister("e2")
    await floor.lapse("e3")
    await floor.registry.reap(floor.e)
    assert [state.number for state in await registry.seats()] == [first]
    assert read.pop() == (0, [])
    now = WHOLE_S
    await registry.seats()
    assert read.pop() == (1, [first])


async def test_no_change_is_missed_where_redis_lost_its_data_or_a_reply_was_lost(floor, monkeypatch):
    registry = SeatRegistry(floor.redis, floor.keys, floor.bench.limits, clock=lambda: 100.0)
    await floor.join("e1", "e2")
    assert len(await registry.seats()) == 2
    await floor.redis.flushall()
    assert await registry.seats() == []
    await floor.bench.lead()
    await floor.experts.heartbeat("e1", WAITING)
    assert [state.info.id for state in await registry.seats()] == ["e1"]
    run = registry._scripts.run

    async def fails(name, *arguments):
        await run(name, *arguments)
        raise QueueUnavailable("The reply was lost.")

    await floor.experts.leave("e1")
    monkeypatch.setattr(registry._scripts, "run", fails)
    with pytest.raises(QueueUnavailable):
        await registry.seats()
    monkeypatch.setattr(registry._scripts, "run", run)
    assert [state.status for state in await registry.seats()] == ["leaving"]
