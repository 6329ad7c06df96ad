"""Releases next to one another: who reads what, who must not start, and what becomes of bytes that nobody can read."""

from __future__ import annotations

import base64

import msgspec
import pytest
from msgspec import structs

from services.errors import FingerprintMismatch, QueueUnavailable, UnreadableMessage, VersionMismatch
from services.messages import Cancel, ExpertInfo, SeatReport
from services.queue import gateway_side, scripts
from services.queue.expert_side import ExpertQueue
from services.queue.gateway_side import GatewayQueue, Unreadable
from services.queue.limits import QueueLimits
from services.queue.loads import LoadReader
from services.queue.quarantine import Quarantine, quarantined
from services.queue.scheduler_side import SchedulerQueue
from services.queue.scripts import Scripts
from services.queue.seats import SeatRegistry
from services.queue.tables import TableReader
from services.queue.worker_side import WorkerQueue
from services.routing import RoutingTable

JUNK = msgspec.msgpack.encode([["a kind of a later release", 1]])


async def names_prompts(bench) -> bool:
    """Whether the gateway leaves prompts out of records."""
    (request,) = await bench.admit(bench.request())
    body = await bench.redis.hget(bench.keys.request(request.id), "body")
    await bench.gateway.cancel([request.id])
    return not msgspec.msgpack.decode(body)["token_ids"]


async def test_prompts_are_named_as_soon_as_everybody_reads_them_so_and_no_longer(bench):
    fresh = bench.new_gateway("g1")
    bench.gateway = fresh
    assert not await names_prompts(bench)  # it has not looked yet
    await fresh.look()
    assert await names_prompts(bench)
    old = structs.replace(bench.worker_info("old"), wire=1)
    await bench.worker.register(old, 60, credit_tokens=1, credit_requests=1)
    await bench.add_worker("new")
    assert {worker.id for worker in await fresh.look()} == {"old", "new"}
    assert not await names_prompts(bench)
    await bench.worker.deregister("old")
    await fresh.look()
    assert await names_prompts(bench)


@pytest.mark.parametrize("leader", ["of an earlier release", "none"])
async def test_prompts_stay_in_records_while_the_leader_cannot_be_known_to_read_otherwise(bench, leader):
    if leader == "none":
        await bench.scheduler.resign(bench.epoch)
    else:
        await bench.redis.incr(f"{bench.keys.prefix}leader:epoch")  # it takes the lock and writes no version
    await bench.gateway.look()
    assert not await names_prompts(bench)


async def test_a_worker_whose_record_cannot_be_read_counts_as_of_the_oldest_version(bench):
    await bench.add_worker("w")
    await bench.redis.hset(bench.keys.worker("w"), "info", JUNK)
    assert await bench.gateway.look() == []
    assert not await names_prompts(bench)


@pytest.fixture
def of_release(monkeypatch):
    """Makes scripts that are run from now on those of a release that reads these versions."""

    def set_range(oldest: int, newest: int) -> None:
        monkeypatch.setattr(scripts, "OLDEST_WIRE", oldest)
        monkeypatch.setattr(scripts, "WIRE", newest)

    return set_range


async def test_members_that_have_no_version_in_common_refuse_to_start_and_name_the_other(bench, of_release):
    of_release(3, 4)
    info = ExpertInfo(id="e", fingerprint="f", host="h", port=1, memory_bytes=1, pid=1, version="0")
    starts = [
        bench.new_gateway("g2").heartbeat(60),
        WorkerQueue(bench.redis, bench.keys).register(bench.worker_info("w"), 60, credit_tokens=1, credit_requests=1),
        SchedulerQueue(bench.redis, bench.keys).campaign("new", 60),
        ExpertQueue(bench.redis, bench.keys).join(info, 60),
    ]
    for start in starts:
        with pytest.raises(VersionMismatch, match=r"read versions 1-2 .* reads 3-4"):
            await start
    assert not await bench.redis.exists(bench.keys.workers, bench.keys.seats)


async def test_members_with_a_version_in_common_start(bench, of_release):
    of_release(2, 3)
    await bench.new_gateway("g2").heartbeat(60)
    of_release(1, 1)
    with pytest.raises(VersionMismatch, match="read versions 2-3"):
        await bench.new_gateway("g3").heartbeat(60)


async def test_members_that_are_gone_keep_nobody_out(bench, of_release):
    of_release(3, 4)
    await bench.redis.delete(f"{bench.keys.prefix}wire:1-2")  # as when the last of them has been silent for two leases
    await bench.new_gateway("g2").heartbeat(60)
    assert await bench.redis.smembers(f"{bench.keys.prefix}wires") == {b"3-4"}


def others_words(bench):
    """What somebody who may write what members agree in can put there: every expert worker's user may."""
    model, wires = f"{bench.keys.prefix}model", f"{bench.keys.prefix}wires"

    async def another_model():
        await bench.redis.set(model, "STALE LEADER x")

    async def a_list_for_a_model():
        await bench.redis.delete(model)
        await bench.redis.rpush(model, "x")

    async def another_version():
        await bench.redis.sadd(wires, "9-9")
        await bench.redis.set(f"{bench.keys.prefix}wire:9-9", "a release")

    async def a_list_for_a_release():
        await bench.redis.delete(f"{bench.keys.prefix}wire:1-2")
        await bench.redis.rpush(f"{bench.keys.prefix}wire:1-2", "x")

    async def no_set():
        await bench.redis.set(wires, "x")

    async def very_many():
        await bench.redis.sadd(wires, *(f"{n}-{n}" for n in range(5000)))

    return [another_model, a_list_for_a_model, another_version, a_list_for_a_release, no_set, very_many]


@pytest.mark.parametrize("number", range(6))
async def test_members_that_are_there_put_right_what_no_member_wrote_and_go_on(bench, number):
    experts = ExpertQueue(bench.redis, bench.keys, bench.limits)
    info = ExpertInfo(id="e", fingerprint="f", host="h", port=1, memory_bytes=1, pid=1, version="0")
    await experts.join(info, 60)
    await bench.add_worker("w")
    gateway = bench.new_gateway("g2")
    await gateway.heartbeat(60, "f")
    standby = SchedulerQueue(bench.redis, bench.keys, bench.limits)
    await standby.campaign("standby", 60)
    beats = [
        lambda: gateway.heartbeat(60, "f"),
        lambda: bench.worker.heartbeat("w", {}),
        lambda: bench.add_worker("w"),
        lambda: experts.heartbeat("e", SeatReport(status="waiting")),
        lambda: experts.join(info, 60),
    ]
    harm = others_words(bench)[number]
    for beat in beats:
        await harm()
        await beat()
        assert await bench.redis.get(f"{bench.keys.prefix}model") == b"f"
        assert await bench.redis.smembers(f"{bench.keys.prefix}wires") == {b"1-2"}
        await bench.new_gateway("late").heartbeat(60, "f")
        with pytest.raises(FingerprintMismatch):
            await bench.new_gateway("other").heartbeat(60, "g")
    await harm()
    assert await standby.campaign("standby", 60) is None


async def test_a_gateway_that_was_away_puts_nobodys_model_right(bench, monkeypatch):
    """Its claim had run out, though a thread of its own has just renewed its lease."""
    now = [1000.0]
    monkeypatch.setattr(gateway_side.time, "monotonic", lambda: now[0])
    gateway, thread = bench.new_gateway("g2"), bench.new_gateway("g2")
    await gateway.heartbeat(60, "f")
    await bench.redis.set(f"{bench.keys.prefix}model", "another")
    now[0] += 2 * bench.limits.lease_s + 1
    await thread.heartbeat(60)
    with pytest.raises(FingerprintMismatch):
        await gateway.heartbeat(60, "f")
    assert await bench.redis.get(f"{bench.keys.prefix}model") == b"another"


async def test_a_member_that_starts_gets_words_that_cannot_mislead(bench):
    await bench.redis.set(f"{bench.keys.prefix}model", " STALELEADER\n")
    with pytest.raises(FingerprintMismatch):
        await bench.new_gateway("g2").heartbeat(60, "f")
    await bench.redis.set(f"{bench.keys.prefix}model", "\n" * 10**6)
    with pytest.raises(FingerprintMismatch) as raised:
        await bench.new_gateway("g2").heartbeat(60, "f")
    assert len(raised.value.message) < 1000


@pytest.mark.parametrize("held", ["9e15", "inf", "nan", "not a number"])
async def test_nobody_holds_reclaiming_for_longer_than_two_leases(bench, held):
    await bench.redis.set(f"{bench.keys.prefix}reclaim_after", held)
    await bench.scheduler.reap(bench.epoch)
    now = int((await bench.redis.time())[0]) * 1000
    ends = await bench.redis.get(f"{bench.keys.prefix}reclaim_after")
    assert held == "not a number" or int(ends) <= now + 2 * 6000 + 1000
    await bench.redis.delete(f"{bench.keys.prefix}reclaim_after")
    await bench.redis.rpush(f"{bench.keys.prefix}reclaim_after", "x")
    assert not (await bench.scheduler.reap(bench.epoch)).held


async def test_a_key_of_another_type_is_an_error_that_callers_know_and_outlast(bench):
    await bench.redis.set(bench.keys.wake, "x")
    with pytest.raises(QueueUnavailable, match="no member writes"):
        await bench.scheduler.wait_for_work(0.01)
    await bench.redis.set(f"{bench.keys.prefix}gateways", "x")
    with pytest.raises(QueueUnavailable, match="no member writes"):
        await bench.gateway.heartbeat(60)


class Counted:
    def __init__(self, bench, reader: str) -> None:
        self.kinds: list[str] = []
        self.quarantine = Quarantine(Scripts(bench.redis, bench.keys, bench.limits), reader, self.kinds.append)


async def test_events_that_cannot_be_read_are_logged_counted_and_kept_and_others_come_through(bench):
    await bench.add_worker("w")
    (request, other) = await bench.run_on("w", bench.request("bad"), bench.request("good"))
    await bench.redis.xadd(bench.keys.results("g1"), {request.id: JUNK})
    await bench.worker.publish("w", [bench.token(other, 0)])
    counted = Counted(bench, "gateway")
    gateway = GatewayQueue(bench.redis, bench.keys, "g1", bench.limits, quarantine=counted.quarantine)
    _, (bad, good) = await gateway.follow("0-0", 0)
    assert isinstance(bad, Unreadable)
    assert bad.request_id == "bad"
    assert good.request_id == "good"
    assert counted.kinds == ["event"]
    (kept,) = await quarantined(bench.redis, bench.keys)
    assert (kept.kind, kept.source, kept.reader, base64.b64decode(kept.data)) == ("event", "bad", "gateway", JUNK)
    assert abs(kept.when_ms - int((await bench.redis.time())[0]) * 1000) < 10_000


async def test_a_result_stream_names_its_version_to_those_who_look_and_to_no_others(bench):
    """An earlier release reads each field of an entry as events."""
    await bench.add_worker("w")
    (request,) = await bench.run_on("w", bench.request())
    await bench.worker.publish("w", [bench.token(request, 0)])
    ((_, fields),) = await bench.redis.xrange(bench.keys.results("g1"))
    assert set(fields) == {b"wire:2", request.id.encode()}
    assert msgspec.msgpack.decode(fields[b"wire:2"]) == []


async def test_a_request_that_cannot_be_read_ends_with_an_error(bench):
    (request,) = await bench.admit(bench.request())
    await bench.admit(bench.request("good"))
    await bench.redis.hset(bench.keys.request(request.id), "body", JUNK)
    counted = Counted(bench, "scheduler")
    scheduler = SchedulerQueue(bench.redis, bench.keys, bench.limits, quarantine=counted.quarantine)
    assert [claim.request.id for claim in await scheduler.claim(bench.epoch, 10)] == ["good"]
    assert bench.ends(await bench.events()) == [(request.id, "internal_error")]
    assert counted.kinds == ["request"]


async def test_an_inbox_message_that_cannot_be_read_is_left_out(bench):
    await bench.add_worker("w")
    await bench.redis.xadd(bench.keys.inbox("w"), {"m": JUNK})
    await bench.redis.xadd(bench.keys.inbox("w"), {"something": "else"})
    await bench.run_on("w", bench.request("good"))
    counted = Counted(bench, "attention worker")
    worker = WorkerQueue(bench.redis, bench.keys, bench.limits, quarantine=counted.quarantine)
    _, messages = await worker.read_inbox("w", "0-0", 0)
    assert [message.request.id for message in messages] == ["good"]
    assert counted.kinds == ["inbox"]


@pytest.mark.parametrize("record", ["info", "whole"])
async def test_a_worker_record_that_cannot_be_read_stops_nobody(bench, record):
    await bench.add_worker("bad")
    await bench.add_worker("good")
    if record == "info":
        await bench.redis.hset(bench.keys.worker("bad"), "info", JUNK)
    else:
        await bench.redis.delete(bench.keys.worker("bad"))
        await bench.redis.set(bench.keys.worker("bad"), "no hash")
    counted = Counted(bench, "scheduler")
    scheduler = SchedulerQueue(bench.redis, bench.keys, bench.limits, quarantine=counted.quarantine)
    for _ in range(3):
        assert [state.info.id for state in await scheduler.workers()] == ["good"]
        assert [worker.id for worker in await bench.gateway.look()] == ["good"]
    assert counted.kinds == (["worker"] if record == "info" else [])  # once, however often it is read


async def test_records_of_seats_that_cannot_be_read_leave_the_others(bench):
    experts = ExpertQueue(bench.redis, bench.keys, bench.limits)
    for name in ("bad", "good"):
        info = ExpertInfo(id=name, fingerprint="f", host="h", port=1, memory_bytes=1, pid=1, version="0")
        await experts.join(info, 60)
        await experts.heartbeat(name, SeatReport(status="waiting"))
    await bench.redis.hset(bench.keys.seat("bad"), mapping={"info": JUNK, "rows": JUNK, "assignment": JUNK})
    counted = Counted(bench, "scheduler")
    registry = SeatRegistry(bench.redis, bench.keys, bench.limits, quarantine=counted.quarantine)
    assert [seat.info.id for seat in await registry.seats()] == ["good"]
    assert await registry.rows() == {}
    assert await registry.groups() == []
    assert counted.kinds == ["seat", "seat", "assignment"]


async def test_a_load_or_a_table_that_cannot_be_read_counts_as_none(bench):
    await bench.add_worker("w")
    counted = Counted(bench, "scheduler")
    await bench.redis.set(bench.keys.load("w"), JUNK)
    await bench.redis.set(bench.keys.load("g1"), JUNK)
    loads = await LoadReader(bench.redis, bench.keys, bench.limits, quarantine=counted.quarantine).loads()
    assert (dict(loads.workers), dict(loads.gateways)) == ({"w": None}, {})
    reader = TableReader(bench.redis, bench.keys, bench.limits, quarantine=counted.quarantine)
    await bench.redis.xadd(bench.keys.table, {"t": JUNK}, id="5-0")
    assert await reader.read_table(0) is None
    table = RoutingTable(epoch=6, fingerprint="f", num_experts=1, groups=())
    await SeatRegistry(bench.redis, bench.keys, bench.limits).publish_table(bench.epoch, table)
    assert await reader.read_table(5) == table
    assert counted.kinds == ["load", "load", "table"]


async def test_an_assignment_that_cannot_be_read_leaves_the_former_one(bench):
    counted = Counted(bench, "expert worker")
    experts = ExpertQueue(bench.redis, bench.keys, bench.limits, quarantine=counted.quarantine)
    info = ExpertInfo(id="e", fingerprint="f", host="h", port=1, memory_bytes=1, pid=1, version="0")
    await experts.join(info, 60)
    await bench.redis.hset(bench.keys.seat("e"), mapping={"digest": "d", "assignment": JUNK})
    orders = await experts.heartbeat("e", SeatReport(status="waiting"))
    assert orders.assignment is None
    assert counted.kinds == ["assignment"]


async def test_the_quarantine_is_bounded(bench):
    counted = Counted(bench, "gateway")
    gateway = GatewayQueue(bench.redis, bench.keys, "g1", bench.limits, quarantine=counted.quarantine)
    last_id = "0-0"
    for number in range(80):
        await bench.redis.xadd(bench.keys.results("g1"), {f"r{number}": b"\xc1" * 100_000})
        last_id, _ = await gateway.follow(last_id, 0)
    kept = await quarantined(bench.redis, bench.keys)
    assert len(kept) == bench.limits.max_unreadable
    assert kept[0].source == "r79"
    assert all(len(each.data) < 6_000 and each.size == 100_000 for each in kept)


async def test_a_prompt_that_went_with_its_request_is_no_damage_and_hides_none(bench):
    """The client left between the assignment and the reading of it."""
    await bench.add_worker("w")
    lengths = {"left": 4, "damaged": 5, "damaged too": 6}
    await bench.run_on("w", *(bench.request(name, prompt=length) for name, length in lengths.items()))
    await bench.gateway.cancel(["left"])
    await bench.redis.delete(*await bench.redis.keys(bench.keys.prompt("*")))
    counted = Counted(bench, "attention worker")
    worker = WorkerQueue(bench.user("attention"), bench.keys, bench.limits, quarantine=counted.quarantine)
    _, messages = await worker.read_inbox("w", "0-0", 0)
    assert messages == [Cancel("left", 1)]
    assert counted.kinds == ["inbox", "inbox"]
    assert {kept.source for kept in await quarantined(bench.redis, bench.keys)} == {"damaged", "damaged too"}


async def test_a_record_without_a_body_ends_with_an_error_and_no_scheduler_with_it(bench):
    await bench.admit(bench.request("bad"), bench.request("good"))
    await bench.redis.hdel(bench.keys.request("bad"), "body")
    counted = Counted(bench, "scheduler")
    scheduler = SchedulerQueue(bench.user("scheduler"), bench.keys, bench.limits, quarantine=counted.quarantine)
    assert [claim.request.id for claim in await scheduler.claim(bench.epoch, 10)] == ["good"]
    assert bench.ends(await bench.events()) == [("bad", "internal_error")]
    assert counted.kinds == ["request"]


@pytest.mark.parametrize("queue_limits", [QueueLimits(max_attempts=1)])
async def test_a_record_without_a_body_is_buried_as_others_are(bench):
    await bench.add_worker("w")
    await bench.run_on("w", bench.request("bad"))
    await bench.redis.hdel(bench.keys.request("bad"), "body")
    await bench.expire_lease(bench.keys.leases, "bad")
    assert (await bench.scheduler.reap(bench.epoch)).dead == 1
    assert bench.ends(await bench.events()) == [("bad", "attempts_exhausted")]
    assert await bench.dead.list() == []
    await bench.dead.drop("bad")


async def test_what_is_kept_is_listed_with_entries_that_cannot_be_read(bench):
    counted = Counted(bench, "gateway")
    await counted.quarantine.put("event", "good", UnreadableMessage("why"), b"data")
    await bench.redis.lpush(bench.keys.unreadable, b"no time", b"1:no json", b"x:{}", b"\xff")
    assert [kept.source for kept in await quarantined(bench.redis, bench.keys)] == ["good"]


async def test_where_nothing_can_be_kept_it_is_counted_and_its_reader_goes_on(bench, caplog):
    await bench.redis.set(bench.keys.unreadable, "no list")
    counted = Counted(bench, "gateway")
    await counted.quarantine.put("event", "r", UnreadableMessage("why"), b"data")
    assert counted.kinds == ["event"]
    assert "cannot keep" in caplog.text
