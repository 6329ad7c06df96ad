"""The check that every index of the queue in Redis agrees with the records."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

LIVE = ("queued", "claimed", "running", "lost")
Contents = Mapping[str, Any]
"""Keys without their prefix -> what they hold: members with scores, fields with values, lists, or a string."""
_READ = """
local found, P = {}, KEYS[1]
for _, key in ipairs(redis.call('KEYS', P .. '*')) do
  local kind, name, content = redis.call('TYPE', key).ok, string.sub(key, #P + 1), nil
  if kind == 'zset' then content = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
  elseif kind == 'set' then content = redis.call('SMEMBERS', key)
  elseif kind == 'list' then content = redis.call('LRANGE', key, 0, -1)
  elseif kind == 'hash' then content = redis.call('HGETALL', key)
  elseif kind == 'string' then content = redis.call('GETRANGE', key, 0, 20)
  end
  if content then found[#found + 1] = { name, kind, content } end
end
return cjson.encode(found)
"""


async def contents(redis: Any, prefix: str) -> Contents:
    """All keys of a namespace but its streams, in one call."""
    reply = await redis.eval(_READ, 1, prefix)
    found: dict[str, Any] = {}
    for name, kind, content in json.loads(reply.decode(errors="replace")):
        values = list(content) if kind != "string" else content  # an empty table is {}
        if kind == "zset":
            found[name] = dict(zip(values[::2], map(float, values[1::2]), strict=True))
        else:
            found[name] = dict(zip(values[::2], values[1::2], strict=True)) if kind == "hash" else values
    return found


async def check(bench: Any) -> None:
    """Every index agrees with the records; nothing is in two places or in none."""
    check_contents(await contents(bench.redis, bench.keys.prefix))


def check_contents(found: Contents) -> None:
    records = _under(found, "req:")
    by_state = {state: {i for i, r in records.items() if r["state"] == state} for state in LIVE}
    live = set().union(*by_state.values())
    _check_queues(found, by_state["queued"])
    assert set(found.get("leases", ())) == live - by_state["queued"]
    assert set(found.get("claims", ())) == by_state["claimed"]
    _check_credit(found, records)
    _check_prompts(found, [record for record in records.values() if record["state"] in LIVE])
    for kind, name in (("tenant:", "tenant"), ("owned:", "reply_to")):
        indexed = {(key, member) for key, members in _under(found, kind).items() for member in members}
        assert indexed == {(records[request_id][name], request_id) for request_id in live}


def _under(found: Contents, prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): content for name, content in found.items() if name.startswith(prefix)}


def _check_queues(found: Contents, queued: set[str]) -> None:
    waiting = {name: members for name, members in _under(found, "queue:").items() if name[0].isdigit()}
    parts = [member.split(":", 2) for members in waiting.values() for member in members]
    assert {request_id for _, _, request_id in parts} == queued == set(found.get("deadlines", ()))
    stats = found.get("queue:stats", {})
    assert int(stats.get("requests", 0)) == len(parts) == len(queued)
    assert int(stats.get("tokens", 0)) == sum(int(cost) for _, cost, _ in parts)
    rings, deficits = _under(found, "ring:"), _under(found, "deficit:")
    assert {name: sorted(ring) for name, ring in rings.items()} == {name: sorted(d) for name, d in deficits.items()}
    assert Counter(f"{name}:{tenant}" for name, ring in rings.items() for tenant in ring) == Counter(waiting.keys())


def _check_credit(found: Contents, records: Mapping[str, Any]) -> None:
    held = _under(found, "held:")
    for name, worker in _under(found, "worker:").items():
        mine = {i: r["cost"] for i, r in records.items() if r.get("holder") == name and r["state"] == "running"}
        assert held.get(name, {}) == mine
        assert int(worker["outstanding_tokens"]) == sum(map(int, mine.values()))


def _check_prompts(found: Contents, live: list[dict[str, str]]) -> None:
    """Each prompt is there as long as a record or a dead letter needs it, and counts those."""
    dead = [letter["prompt"] for letter in _under(found, "dead:").values()]
    needed = Counter([record["prompt"] for record in live] + dead)
    del needed[""]
    assert set(_under(found, "prompt:")) == set(needed)
    assert {name: int(refs) for name, refs in _under(found, "prompt_refs:").items()} == dict(needed)
