"""The routing table through Redis: epochs, waiting readers, its cost, and which seat may go when."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis
from testkit.fabric.expert_floor import GROUPS, LEASE_S, WAITING, table
from testkit.waiting import LIMIT_S

from services.errors import QueueUnavailable, StaleTable
from services.messages import SeatReport
from services.queue.connect import connect
from services.queue.limits import QueueLimits
from services.queue.scripts import load_scripts
from services.queue.tables import TableReader
from services.routing import RoutingTable, Seat, even_groups


async def test_epochs_of_the_table_only_rise(floor):
    await floor.registry.publish_table(floor.e, table(7))
    await floor.registry.publish_table(floor.e, table(7))  # the reply to the first call may have been lost
    for refused in (table(6), table(7, Seat(number=1, worker="e", group=0, host="h", port=1))):
        with pytest.raises(StaleTable, match="Epoch 7"):
            await floor.registry.publish_table(floor.e, refused)
    assert await floor.reader.read_table() == table(7)
    await floor.registry.publish_table(floor.e, table(8))
    epochs = await floor.registry.table_epochs()
    assert epochs.published == 8
    assert epochs.following > 8


async def test_a_table_that_redis_lost_comes_back_above_what_readers_have(floor):
    await floor.join("e1")
    old = await floor.publish("e1")
    await floor.redis.flushall()
    await floor.bench.lead()
    assert await floor.reader.read_table(old.epoch) is None
    assert await floor.reader.note_epoch("w", old.epoch, LEASE_S) == 0
    epochs = await floor.registry.table_epochs()
    assert (epochs.published, epochs.newest) == (0, old.epoch)
    assert epochs.following > old.epoch
    with pytest.raises(StaleTable, match=f"Epoch {old.epoch}"):
        await floor.registry.publish_table(floor.bench.epoch, table(old.epoch))
    await floor.registry.publish_table(floor.bench.epoch, table(epochs.following))
    assert await floor.reader.read_table(old.epoch) == table(epochs.following)


async def test_one_call_reads_a_newer_table_and_only_a_newer_one(floor):
    assert await floor.reader.read_table() is None
    for epoch in (3, 4, 9):
        await floor.registry.publish_table(floor.e, table(epoch))
    for known in (0, 3, 4, 8):
        assert await floor.reader.read_table(known) == table(9)
    assert await floor.reader.read_table(9) is None
    assert await floor.reader.read_table(12) is None


async def test_waiting_readers_wake_all(floor, redis_server):
    await floor.registry.publish_table(floor.e, table(3))
    clients = [connect(redis_server.url) for _ in range(3)]
    waits = [
        asyncio.create_task(TableReader(client, floor.keys).read_table(known, 600_000))
        for client, known in zip(clients, (3, 4, 4), strict=True)
    ]
    await blocked(floor.redis, 3)
    await floor.registry.publish_table(floor.e, table(5))
    assert await asyncio.wait_for(asyncio.gather(*waits), LIMIT_S) == [table(5)] * 3
    for client in clients:
        await client.aclose()


async def blocked(redis: Redis, count: int) -> None:
    """Waits until ``count`` clients wait in blocking reads."""
    async with asyncio.timeout(LIMIT_S):
        while (await redis.info("clients"))["blocked_clients"] < count:
            await asyncio.sleep(0.005)


async def test_a_wait_for_a_table_ends(floor):
    assert await asyncio.wait_for(floor.reader.read_table(0, 20), LIMIT_S) is None


async def test_a_waiting_reader_learns_of_a_table_after_a_reconnect(durable_floor):
    server, floor = durable_floor
    made = await floor.publish()
    reading = asyncio.create_task(floor.reader.read_table(made.epoch, 600_000))
    await blocked(floor.redis, 1)
    server.kill()
    with pytest.raises(QueueUnavailable):
        await asyncio.wait_for(reading, LIMIT_S)
    server.start()
    newer = await floor.publish()
    assert await floor.reader.read_table(made.epoch) == newer


async def test_bytes_of_a_large_table_and_of_asking_for_a_newer_one(floor):
    layers, experts = 64, 256
    groups = even_groups(list(range(layers)), experts, 16)
    seats = tuple(Seat(number=10**8 + i, worker=f"expert-{i:032d}", group=i % 16, host="h", port=1) for i in range(32))
    made = RoutingTable(epoch=5, fingerprint="f" * 64, num_experts=experts, groups=groups, seats=seats)
    await floor.redis.script_load(load_scripts()["publish_table"].text)  # else the table goes twice, the first time
    before = await traffic(floor.redis)
    await floor.registry.publish_table(floor.e, made)
    assert await floor.reader.read_table(4) == made
    moved = await traffic(floor.redis) - before
    assert layers * experts < moved < 2 * 2 * layers * experts + 200 * len(seats) + 8192
    polls = 100
    before = await traffic(floor.redis)
    for _ in range(polls):
        assert await floor.reader.read_table(5) is None
    asking = await traffic(floor.redis) - before
    assert 50 * polls < asking < 200 * polls


async def traffic(redis: Redis) -> int:
    """Bytes that the server has moved, without those of asking for it."""
    one, two = [await _moved(redis) for _ in range(2)]
    return two - 2 * (two - one)


async def _moved(redis: Redis) -> int:
    stats = await redis.info("stats")
    return int(stats["total_net_input_bytes"]) + int(stats["total_net_output_bytes"])


async def test_a_reader_enters_with_the_table_that_is_current_when_it_is_noted(floor, monkeypatch):
    """A table replaced between being read and being noted may list seats that went already."""
    await floor.join("e1")
    await floor.publish("e1")
    read, newer = floor.reader.read_table, []

    async def overtaken(known_epoch: int = 0, block_ms: int = 0) -> RoutingTable | None:
        found = await read(known_epoch, block_ms)
        if not newer:
            newer.append(await floor.publish())
        return found

    monkeypatch.setattr(floor.reader, "read_table", overtaken)
    assert await floor.reader.enter("w", LEASE_S) == newer[0]
    assert (await floor.registry.table_epochs()).oldest == newer[0].epoch


async def test_a_leaving_seat_waits_for_the_last_reader_of_its_tables(floor):
    await floor.join("e1", "e2")
    first = await floor.publish("e1", "e2")
    assert await floor.reader.enter("w1", LEASE_S) == first
    assert await floor.reader.enter("w2", LEASE_S) == first
    assert await floor.registry.dismiss(floor.e, "e1")
    assert (await floor.experts.heartbeat("e1", SeatReport(status="ready"))).leave
    assert not (await floor.experts.heartbeat("e2", WAITING)).leave
    assert await floor.experts.leave("e1")
    assert (await floor.seats())["e1"].status == "leaving"
    assert (await floor.seats())["e1"].dismissed
    assert await floor.registry.assign_groups(floor.e, [("e1", GROUPS[0])]) == [False]
    assert not await floor.may_go("e1")  # still in the table
    second = await floor.publish("e2")
    assert not await floor.may_go("e1")
    await floor.reader.note_epoch("w1", second.epoch, LEASE_S)
    assert (await floor.registry.table_epochs()).oldest == first.epoch
    assert not await floor.may_go("e1")
    await floor.reader.forget("w2")
    assert await floor.may_go("e1")
    assert not await floor.may_go("e2")
    await floor.experts.deregister("e1")
    assert set(await floor.seats()) == {"e2"}
    assert not await floor.experts.leave("e1")
    assert (await floor.experts.heartbeat("e1", WAITING)).leave
    assert set(await floor.seats()) == {"e2"}


async def test_leaving_is_final_whatever_a_late_heartbeat_says(floor):
    await floor.join("e1")
    await floor.experts.leave("e1")
    orders = await floor.experts.heartbeat("e1", SeatReport(status="ready"))
    assert orders.leave
    assert (await floor.seats())["e1"].status == "leaving"


async def test_a_dead_reader_holds_a_leaving_seat_until_its_lease_is_reaped(floor):
    await floor.join("e1")
    await floor.publish("e1")
    await floor.reader.enter("dead", LEASE_S)
    second = await floor.publish()
    await floor.reader.enter("alive", LEASE_S)
    assert not await floor.may_go("e1")
    await floor.registry.reap(floor.e)
    assert not await floor.may_go("e1")
    await floor.bench.expire_lease(floor.keys.table_readers, "dead")
    assert not await floor.may_go("e1")
    assert (await floor.registry.reap(floor.e)).readers == 1
    assert (await floor.registry.table_epochs()).oldest == second.epoch
    assert await floor.may_go("e1")


@pytest.mark.parametrize("queue_limits", [QueueLimits(lease_s=0.3)])
async def test_after_redis_lost_everything_no_seat_goes_before_readers_had_a_lease_to_report(floor):
    await floor.join("e1")
    old = await floor.publish("e1")
    await floor.reader.enter("w", LEASE_S)
    await floor.experts.leave("e1")
    await floor.redis.flushall()
    await floor.bench.lead()
    orders = await floor.experts.heartbeat("e1", SeatReport(status="leaving"))
    assert orders.number > 0, "it has joined again"
    await floor.registry.publish_table(floor.bench.epoch, table(old.epoch + 1))
    assert not await floor.may_go("e1")  # the reader's epoch is not known
    await floor.reader.note_epoch("w", old.epoch, LEASE_S)
    await asyncio.sleep(0.35)
    assert not await floor.may_go("e1")
    await floor.reader.note_epoch("w", old.epoch + 1, LEASE_S)
    assert await floor.may_go("e1")
