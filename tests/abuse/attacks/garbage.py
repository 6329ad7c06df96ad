"""M6: messages and records in Redis that cannot be read, as another release or a compromised pod may write them. They
are skipped and counted; who reads them goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from testkit.processes.servers import stopped

from abuse.attack import Attack, Bounds, Target
from abuse.kit.tokens import HOLD
from services.queue.keys import Keys

KEYS = Keys("expertmesh")
_pack = msgspec.msgpack.encode
UNREADABLE: list[bytes] = [
    b"",
    b"\xc1",
    b"\xff" * 1000,
    _pack([["tomorrow", "id", 1, 2, {"a": "b"}]]),
    _pack([["token", "id", "one", 0]]),
    _pack([["token", "id", 1, 0, 5, "because"]]),
    _pack({"kind": "token"}),
    _pack([[]]),
    b"\xdd\xff\xff\xff\xff",
    b"\x91" * 100_000,
]


async def _one(store: Any, key: str) -> str:
    """The one live member of a set that is ordered by leases."""
    found: str = (await store.zrange(key, 0, -1))[-1].decode()
    return found


async def _still_served(target: Target) -> None:
    """After what was done: a whole request goes through."""
    answer = await target.dialer("bob").post("/v1/completions", {"prompt": [9] * 20, "max_tokens": 3}, timeout_s=20)
    target.check(answer.kind == "200", f"afterwards a request gets {answer.kind}")


async def events(target: Target) -> None:
    """In the gateway's result stream, some under the id of a request that runs."""
    streaming = asyncio.create_task(
        target.post(
            "/v1/completions", {"prompt": [HOLD - 10] * 9, "max_tokens": 40, "ignore_eos": True, "stream": True}
        )
    )
    async with target.store() as store:
        await asyncio.sleep(1)
        gateway = await _one(store, KEYS.gateways)
        mine = [key.decode().rpartition(":")[2] for key in await store.keys(KEYS.request("*"))]
        for number, data in enumerate(UNREADABLE):
            await store.xadd(KEYS.results(gateway), {mine[number % len(mine)] if number < 3 else "nobody": data})
            await asyncio.sleep(0.1)
    await streaming
    await _still_served(target)


async def inbox(target: Target) -> None:
    """In the worker's inbox, also without the field that it reads."""
    async with target.store() as store:
        worker = await _one(store, KEYS.workers)
        for data in UNREADABLE:
            await store.xadd(KEYS.inbox(worker), {"m": data})
        await store.xadd(KEYS.inbox(worker), {"other": b"x"})
        await store.xadd(KEYS.inbox(worker), {"m": _pack(["assign", {"id": "x", "attempt": "one"}])})
    await asyncio.sleep(1)
    await _still_served(target)


async def workers(target: Target) -> None:
    """Workers under lease whose record says what no worker of this release says."""
    records = [*UNREADABLE[:3], _pack({"id": 5, "model": None}), _pack({"id": "worker", "kv_tokens": "many"})]
    async with target.store() as store:
        seconds, _ = await store.time()
        for number, record in enumerate(records):
            name = f"unreadable-{number}"
            fields = {"lease_ms": 20_000, "info": record, "credit_tokens": 10**6, "credit_requests": 10}
            await store.hset(KEYS.worker(name), mapping=fields | {"outstanding_tokens": 0, "fingerprint": "x"})
            await store.zadd(KEYS.workers, {name: (seconds + 20) * 1000})
        await asyncio.sleep(4)  # all have looked at the workers by now
        await _still_served(target)
        for number in range(len(records)):
            await store.zrem(KEYS.workers, f"unreadable-{number}")


async def requests(target: Target) -> None:
    """The record of a request that waits, changed while the scheduler stands still."""
    async with target.store() as store:
        before = set(await store.keys(KEYS.request("*")))
        with stopped(target.stage.procs["scheduler"].pid):
            asking = [
                asyncio.create_task(target.post("/v1/completions", {"prompt": [9] * 20, "max_tokens": 2}))
                for _ in range(4)
            ]
            await asyncio.sleep(0.5)
            fresh = [key for key in await store.keys(KEYS.request("*")) if key not in before]
            mine = [key for key in fresh if await store.hget(key, "tenant") == b"mallory"]
            for key, body in zip(mine, UNREADABLE[1:], strict=False):
                await store.hset(key, "body", body)
        await asyncio.gather(*asking)
        target.check(bool(mine), "no record was there to change")
        target.found["records changed"] = len(mine)
    await _still_served(target)


async def loads(target: Target) -> None:
    """What members report of their load."""
    async with target.store() as store:
        for members in (KEYS.gateways, KEYS.workers):
            member = await _one(store, members)
            for data in UNREADABLE[1:5]:
                await store.set(KEYS.load(member), data, px=1000)
                await asyncio.sleep(0.2)
    await _still_served(target)


async def agreed(target: Target) -> None:
    """What all have agreed in at their start, changed under them: the model, and who reads which versions."""
    model, wires, ranges = (f"{KEYS.prefix}{name}" for name in ("model", "wires", "wire:9-9"))
    async with target.store() as store:
        for wrong in ({model: "x"}, {wires: "x"}, {ranges: "tomorrow"}):
            kept = {key: await store.dump(key) for key in (model, wires)}
            for key, value in wrong.items():
                await store.set(key, value)
            if ranges in wrong:
                await store.sadd(wires, "9-9")
            await asyncio.sleep(4)  # all have reported their loads by now
            await store.delete(*wrong, ranges)
            for key, dumped in kept.items():
                if dumped is not None:
                    await store.restore(key, 5000, dumped, replace=True)
        await asyncio.sleep(2)
    await _still_served(target)


_LIVE = Bounds(within=40)
_ENDED = Bounds(within=40, also=("500 internal_error",))
ATTACKS = [
    Attack(name="garbage: events", finding="M6", run=events, bounds=_LIVE),
    Attack(name="garbage: a worker's inbox", finding="M6", run=inbox, bounds=_LIVE),
    Attack(name="garbage: workers' records", finding="M6", run=workers, bounds=_LIVE),
    Attack(name="garbage: requests' records", finding="M6", run=requests, bounds=_ENDED),
    Attack(name="garbage: loads", finding="M6", run=loads, bounds=_LIVE),
    Attack(name="garbage: what all agree in", finding="own", run=agreed, bounds=_LIVE, alone=True),
]
