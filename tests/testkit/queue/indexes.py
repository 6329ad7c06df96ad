"""The check that every index of the queue in Redis agrees with the records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

LIVE = ("queued", "claimed", "running", "lost")


async def check(bench: Any) -> None:
    """Every index agrees with the records; nothing is in two places or in none."""
    records = await _records(bench)
    by_state = {state: {i for i, r in records.items() if r["state"] == state} for state in LIVE}
    live = set().union(*by_state.values())
    await _check_queues(bench, by_state["queued"])
    assert names(await bench.redis.zrange(bench.keys.leases, 0, -1)) == live - by_state["queued"]
    assert names(await bench.redis.zrange(bench.keys.prefix + "claims", 0, -1)) == by_state["claimed"]
    await _check_credit(bench, records)
    await _check_prompts(bench, [record for record in records.values() if record["state"] in LIVE])
    for kind, name in (("tenant:", "tenant"), ("owned:", "reply_to")):
        indexed = set()
        for key in await bench.redis.keys(bench.keys.prefix + kind + "*"):
            members = await (bench.redis.zrange(key, 0, -1) if kind == "tenant:" else bench.redis.smembers(key))
            indexed |= {(key.decode().removeprefix(bench.keys.prefix + kind), member) for member in names(members)}
        assert indexed == {(records[request_id][name], request_id) for request_id in live}


async def _records(bench: Any) -> dict[str, dict[str, str]]:
    prefix = bench.keys.request("")
    records = {}
    for key in await bench.redis.keys(prefix + "*"):
        values = await bench.redis.hgetall(key)
        records[key.decode().removeprefix(prefix)] = {
            name.decode(): value.decode(errors="replace") for name, value in values.items()
        }
    return records


async def _check_queues(bench: Any, queued: set[str]) -> None:
    redis, prefix = bench.redis, bench.keys.prefix
    members, tokens, active = set(), 0, set()
    for key in await redis.keys(prefix + "queue:[0-9]*"):
        active.add(key.decode().removeprefix(prefix + "queue:"))
        for member in await redis.zrange(key, 0, -1):
            _, cost, request_id = member.decode().split(":", 2)
            members.add(request_id)
            tokens += int(cost)
    assert members == queued == names(await redis.zrange(prefix + "deadlines", 0, -1))
    assert await bench.depth() == (len(members), tokens)
    rings: Counter[str] = Counter()
    for priority in range(10):
        ring = await redis.lrange(bench.keys.ring(priority), 0, -1)
        rings.update(f"{priority}:{tenant.decode()}" for tenant in ring)
        assert names(await redis.hkeys(bench.keys.deficit(priority))) == names(ring)
    assert rings == Counter(active)


async def _check_credit(bench: Any, records: dict[str, dict[str, str]]) -> None:
    for state in await bench.scheduler.workers():
        mine = {i: r for i, r in records.items() if r.get("holder") == state.info.id and r["state"] == "running"}
        assert names(await bench.redis.hkeys(bench.keys.held(state.info.id))) == set(mine)
        assert state.outstanding_requests == len(mine)
        assert state.outstanding_tokens == sum(int(record["cost"]) for record in mine.values())


async def _check_prompts(bench: Any, live: list[dict[str, str]]) -> None:
    """Each prompt is there as long as a record or a dead letter needs it, and counts those."""
    redis, prefix = bench.redis, bench.keys.prefix
    dead = [await redis.hget(key, "prompt") for key in await redis.keys(prefix + "dead:*")]
    needed = Counter([record["prompt"] for record in live] + [name.decode() for name in dead])
    del needed[""]
    assert names(await redis.keys(prefix + "prompt:*")) == {f"{prefix}prompt:{name}" for name in needed}
    refs = {name: int(await redis.get(f"{prefix}prompt_refs:{name}")) for name in needed}
    assert refs == dict(needed)
    assert len(await redis.keys(prefix + "prompt_refs:*")) == len(needed)


def names(values: Iterable[bytes]) -> set[str]:
    return {value.decode() for value in values}
