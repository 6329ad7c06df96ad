"""What a role's user may not do, on a real server: whoever has broken into one role's pod has no more than this.

That each may do what it has to is in the other suites of the queue, whose connections log in as the role's user."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, ResponseError
from testkit.queue.redis_server import NAMESPACE, RedisServer, version_of, write_users

from services.errors import ConfigError, QueueUnavailable
from services.gateway.key_stores import RedisKeys
from services.queue.acl import READ_ONLY_SINCE, RULES
from services.queue.connect import check_server, command, connect
from services.queue.expert_side import ExpertQueue
from services.queue.gateway_side import GatewayQueue
from services.queue.keys import Keys
from services.queue.scheduler_side import SchedulerQueue
from services.queue.script_keeper import ScriptKeeper

KEYS = Keys(NAMESPACE)
SERVED = ("gateway", "scheduler", "attention", "experts", "workers", "operator")


class Users:
    """Connections as users; nobody may load scripts who may not."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._clients: dict[str, Redis] = {}

    def of(self, role: str) -> Redis:
        if role not in self._clients:
            self._clients[role] = connect(f"unix://{role}:{role}@{self._server.socket}")
        return self._clients[role]

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()


@pytest.fixture
async def users(redis_server: RedisServer, redis: Redis) -> AsyncIterator[Users]:
    await redis.script_flush()
    made = Users(redis_server)
    yield made
    await made.close()


async def denied(redis: Redis, *words: str | int) -> None:
    with pytest.raises(QueueUnavailable, match="does not let this user do that") as refused:
        await command(redis, *words)
    assert isinstance(refused.value.__cause__, (NoPermissionError, ResponseError))


SERVERS_OWN = (
    *("FLUSHALL", "CONFIG GET *", "CONFIG SET dir /tmp", "ACL LIST", "ACL SETUSER default on", "SHUTDOWN NOSAVE"),
    *("KEYS *", "SCAN 0", "CLIENT LIST", "MONITOR", "REPLICAOF 127.0.0.1 1", "SAVE", "LATENCY DOCTOR", "SWAPDB 0 1"),
    *("MODULE LIST", "SCRIPT FLUSH", "SORT any", "RESTORE a 0 b", "MIGRATE h 1 k 0 1", "CLUSTER INFO", "PUBLISH c m"),
    *("SUBSCRIBE c", "COMMAND GETKEYS GET a", "EVAL x 0"),
)
OF_ANOTHER = ("SET {other}:seq 1", "GET {other}:seq", "GET seq", "HGET {other}:keys a")


@pytest.mark.parametrize("role", SERVED)
@pytest.mark.parametrize("words", [*SERVERS_OWN, *OF_ANOTHER])
async def test_nobody_has_the_server_or_another_deployment(users: Users, role: str, words: str) -> None:
    await denied(users.of(role), *words.split())


@pytest.mark.parametrize("role", ["gateway", "attention", "experts", "workers"])
async def test_lua_of_ones_own_runs_for_nobody_who_serves(users: Users, redis_server: RedisServer, role: str) -> None:
    redis = users.of(role)
    text = "return redis.call('GET', 'a')"
    for words in (("EVAL", text, 0), ("SCRIPT", "LOAD", text)):
        await denied(redis, *words)
    if version_of(redis_server.binary) >= (7, 0):
        for words in (("EVAL_RO", text, 0), ("FUNCTION", "LOAD", "#!lua name=x\n")):
            await denied(redis, *words)


FOREIGN = {
    "experts": "req:1 prompt:1 queue:5:t ring:5 deficit:5 leases results:g1 inbox:w worker:w held:w owned:g dead:1 "
    "dead keys leader leader:epoch idem:t:h rate:t tenant:t gateways workers targets",
    "gateway": "seat:e seat_numbers table table_epoch table_readers dead dead:1 targets run_id",
    "attention": "keys idem:t:h rate:t leader leader:epoch gateways claims seq seats seat:e targets run_id",
    "workers": "keys idem:t:h rate:t leader leader:epoch gateways claims seq targets run_id",
    "scheduler": "keys idem:t:h rate:t",
}
"""Keys that a role neither reads nor writes."""


@pytest.mark.parametrize("role", FOREIGN)
async def test_keys_of_others_are_closed(users: Users, role: str) -> None:
    for name in FOREIGN[role].split():
        for words in (("HGET", KEYS.prefix + name, "body"), ("GET", KEYS.prefix + name), ("DEL", KEYS.prefix + name)):
            with pytest.raises(QueueUnavailable, match="does not let this user do that"):
                await command(users.of(role), *words)


async def test_a_gateway_looks_keys_up(users: Users, redis: Redis) -> None:
    await redis.hset(KEYS.api_keys, "ab" * 32, json.dumps({"name": "alice", "sha256": "ab" * 32}))
    keys = RedisKeys(users.of("gateway"), KEYS.api_keys)
    found = await asyncio.gather(keys.find("ab" * 32), keys.find("cd" * 32))
    assert [key and key.name for key in found] == ["alice", None]


@pytest.mark.parametrize(
    ("role", "name", "write"),
    [
        ("gateway", "keys", ("HSET", "digest", "record")),
        ("gateway", "leader", ("SET", "me")),
        ("gateway", "workers", ("ZADD", 1, "w")),
        ("attention", "table", ("XADD", "9-0", "t", "mine")),
        ("experts", "table", ("XADD", "9-0", "t", "mine")),
        ("experts", "table_epoch", ("SET", 9)),
    ],
)
async def test_what_a_role_reads_it_cannot_write(
    users: Users, redis_server: RedisServer, role: str, name: str, write: tuple[str | int, ...]
) -> None:
    """From 7.0 on: before it a pattern is for both."""
    if version_of(redis_server.binary) < READ_ONLY_SINCE:
        pytest.skip("patterns for reading alone are of Redis 7.0")
    first, *rest = write
    await denied(users.of(role), str(first), KEYS.prefix + name, *rest)


async def test_an_expert_worker_is_neither_leader_nor_anybodys_worker(users: Users) -> None:
    await ScriptKeeper(users.of("scheduler")).look()
    scheduler = SchedulerQueue(users.of("experts"), KEYS)
    gateway = GatewayQueue(users.of("experts"), KEYS, "g")
    for call in (
        scheduler.campaign("me", 60),
        scheduler.workers(),
        scheduler.depth(),
        scheduler.wait_for_work(0.01),
        gateway.heartbeat(60),
        gateway.survey({"r1": 1}),
        gateway.follow("0-0", 0),
    ):
        with pytest.raises(QueueUnavailable, match="does not let this user do that"):
            await call
    assert await users.of("operator").exists(KEYS.leader) == 0


async def test_within_a_script_the_callers_rule_counts(users: Users, redis: Redis) -> None:
    """An experts' user runs a script of the operator's on a prompt."""
    await redis.hset(KEYS.request("r1"), "body", "confidential")
    sha = await users.of("operator").script_load("return redis.call('HGET', KEYS[1] .. 'req:r1', 'body')")
    assert await command(users.of("operator"), "EVALSHA", sha, 1, KEYS.prefix) == b"confidential"
    await denied(users.of("experts"), "EVALSHA", sha, 1, KEYS.prefix)
    await denied(users.of("experts"), "EVALSHA", sha, 1, "{other}:")


async def test_who_may_not_load_scripts_waits_for_a_scheduler(users: Users) -> None:
    seats = ExpertQueue(users.of("experts"), KEYS)
    with pytest.raises(QueueUnavailable, match="a scheduler loads them"):
        await seats.leave("nobody")
    keeper = ScriptKeeper(users.of("scheduler"))
    assert await keeper.look() > 30
    assert await keeper.look() == 0
    assert not await seats.leave("nobody")
    await GatewayQueue(users.of("gateway"), KEYS, "g").heartbeat(60)


async def test_a_scheduler_and_an_operator_load_what_they_lack_themselves(users: Users) -> None:
    for role in ("scheduler", "operator"):
        assert await SchedulerQueue(users.of(role), KEYS).workers() == []


async def test_every_user_passes_the_check_of_the_server_and_a_wrong_password_does_not(
    users: Users, redis_server: RedisServer
) -> None:
    for role in SERVED:
        await check_server(users.of(role))
    unknown = connect(f"unix://gateway:wrong@{redis_server.socket}")
    with pytest.raises(ConfigError, match="rejects the credentials"):
        await check_server(unknown)
    await unknown.aclose()


async def test_a_connection_leaves_no_trace_in_the_log_of_denials(users: Users, redis: Redis) -> None:
    await redis.acl_log_reset()
    for role in SERVED:
        await command(users.of(role), "PING")
    assert await redis.acl_log() == []


async def test_only_info_and_config_are_dangerous(redis: Redis) -> None:
    """``CONFIG SET`` for what renews the server's certificate, and nobody else."""
    dangerous = {
        word.decode()
        for category in ("dangerous", "admin")
        for word in await redis.execute_command("ACL", "CAT", category)
    }
    for role, rule in RULES.items():
        bad = {name for name in rule.allowed() if name in dangerous or name.partition("|")[0] in dangerous}
        assert bad - {"info"} == ({"config|set"} if role == "renewal" else set()), role


def test_the_file_is_one_that_the_server_takes(tmp_path: Path, redis_server: RedisServer) -> None:
    """It did start with it; here: on either version, with hashes alone."""
    text = write_users(tmp_path, redis_server.binary).read_text()
    assert not re.search(r" >", text)
    assert text.count("%R~") == 0 or version_of(redis_server.binary) >= READ_ONLY_SINCE
