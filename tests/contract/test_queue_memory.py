"""Nothing stays: after a load, Redis holds a small constant number of keys."""

from __future__ import annotations

import asyncio

import pytest

from services.messages import ExpertInfo
from services.queue.expert_side import ExpertQueue
from services.queue.gateway_side import IdempotencyKey
from services.queue.limits import QueueLimits
from services.queue.scripts import load_scripts
from services.queue.seats import SeatRegistry
from services.queue.tables import TableReader
from services.routing import RoutingTable

TINY = QueueLimits(
    max_requests=10_000, max_tokens=10**9, tombstone_s=0.05, idempotency_s=0.05, lost_s=0.05, stream_s=30
)


@pytest.mark.parametrize("queue_limits", [TINY])
async def test_two_thousand_requests_leave_nothing_behind(bench):
    for i in range(4):
        await bench.add_worker(f"w{i}", tokens=10**9, requests=10_000)
    for batch in range(20):
        requests = [bench.request(f"{batch}-{i}", tenant=f"t{i % 7}", priority=i % 3) for i in range(100)]
        key = IdempotencyKey(key=f"key{batch}", fingerprint="f", base_id="b", seed=1)
        await bench.gateway.admit([requests[0]], timeout_s=600, key=key)
        for tenant in range(7):
            await bench.admit(*(request for request in requests if request.tenant == f"t{tenant}"))
        await bench.gateway.cancel([request.id for request in requests[:30]])
        claimed = await bench.claim(1000)
        assert len(claimed) == 70
        await bench.scheduler.assign(bench.epoch, [(request, f"w{i % 4}") for i, request in enumerate(claimed)])
        await bench.gateway.cancel([request.id for request in claimed[:20]])
        for i in range(4):
            events = [bench.token(request, 0, finish="stop") for request in claimed[20 + i :: 4]]
            await bench.worker.publish(f"w{i}", events)
        await bench.events()
    for i in range(4):
        await bench.worker.deregister(f"w{i}")
    await asyncio.sleep(0.1)
    assert await bench.depth() == (0, 0)
    left = {key.decode().removeprefix(bench.keys.prefix) for key in await bench.redis.keys("*")}
    assert left <= {
        "drain", "gateways", "leader", "leader:epoch", "model", "queue:stats", "seq", "wake", "results:g1", "run_id",
        "leader:wire", "wires", "wire:1-2", "handled:g1",
    }  # fmt: skip


@pytest.mark.parametrize("queue_limits", [TINY])
async def test_every_record_and_index_of_a_live_request_expires_eventually(bench):
    await bench.add_worker("w")
    await bench.run_on("w", bench.request("running"))
    await bench.admit(bench.request("queued"))
    keys = [
        bench.keys.request("running"), bench.keys.request("queued"), bench.keys.worker("w"), bench.keys.held("w"),
        bench.keys.inbox("w"), bench.keys.owned("g1"), f"{bench.keys.prefix}tenant:t",
    ]  # fmt: skip
    assert all([await bench.redis.pttl(key) > 0 for key in keys])


async def test_key_names_agree_with_the_scripts(bench):
    """Keys (Python) and the scripts (Lua) spell the same names."""
    await bench.add_worker("w")
    await bench.run_on("w", bench.request("r", tenant="te:nant", priority=3))
    await bench.admit(bench.request("q", tenant="te:nant", priority=3))
    keys = bench.keys
    names = [
        keys.request("r"), keys.queue(3, "te:nant"), keys.ring(3), keys.deficit(3), keys.stats, keys.leases,
        keys.workers,
        keys.worker("w"), keys.held("w"), keys.inbox("w"), keys.gateways, keys.owned("g1"), keys.leader, keys.wake,
    ]  # fmt: skip
    info = ExpertInfo(id="e", fingerprint="f", host="h", port=1, memory_bytes=1, pid=1, version="0")
    await ExpertQueue(bench.redis, keys).join(info, 60)
    await TableReader(bench.redis, keys).note_epoch("w", 1, 60)
    table = RoutingTable(epoch=2, fingerprint="f", num_experts=1, groups=())
    await SeatRegistry(bench.redis, keys).publish_table(bench.epoch, table)
    names += [
        keys.seats, keys.seat_numbers, keys.last_seat, keys.seat("e"), keys.table, keys.table_epoch, keys.table_readers,
        keys.table_epochs,
    ]  # fmt: skip
    assert {name for name in names if not await bench.redis.exists(name)} == set()
    assert all(key.startswith(b"{test}:") for key in await bench.redis.keys("*"))


async def test_every_script_compiles_and_documents_itself(redis):
    for name, script in load_scripts().items():
        assert (await redis.script_load(script.text)) == script.sha, name
        assert "-- ARGV: limits" in script.text, name
