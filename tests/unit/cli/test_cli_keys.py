"""`expertmesh keys`: what it writes is what the gateway reads, and a secret is seen once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from services.config import Settings
from services.gateway.auth import Authenticator
from services.gateway.key_stores import FileKeys, RedisKeys
from services.queue.keys import Keys
from services.runtime.local_servers import announce
from services.runtime.run_folder import RunFolder

NAME = Keys("expertmesh").api_keys
Run = Callable[..., Any]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


@pytest.fixture
def keys(run: Run, file: Path) -> Run:
    return lambda code, *argv: run(code, "keys", *argv, "--api-keys-file", str(file))


def test_a_key_of_the_file(keys: Run, file: Path) -> None:
    limits = ("--requests-per-minute", "60", "--max-concurrency", "2", "--priority", "3")
    secret = keys(0, "create", "alice", *limits).out.strip()
    keys(0, "create", "bob")
    assert secret not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    store = Authenticator(FileKeys(file, warn=print))
    caller = asyncio.run(store.identify(f"Bearer {secret}"))
    assert caller.tenant == "alice"
    assert caller.limits is not None
    assert (caller.limits.requests_per_minute, caller.limits.concurrency, caller.most_urgent) == (60, 2, 3)

    rows = keys(0, "list").out.splitlines()
    assert [row.split()[0] for row in rows] == ["alice", "bob"]
    assert rows[0].endswith("requests_per_minute=60  max_concurrency=2  priority=3")
    assert rows[1].endswith("  priority=5")
    keys(0, "create", "carol", "--priority", "0")
    assert keys(0, "list").out.splitlines()[2].endswith("  priority=0"), "who may pass all others by is seen"

    for name_or_digest in ("carol", "alice", rows[1].split()[1]):
        keys(0, "revoke", name_or_digest)
    assert keys(0, "list").out == "no keys\n"


def test_limits_of_a_key_are_changed_and_its_secret_stays(keys: Run, file: Path) -> None:
    """Keys that an earlier release wrote have priority 0."""
    secret = keys(0, "create", "old", "--priority", "0", "--burst", "2").out.strip()
    keys(0, "create", "other")
    assert keys(0, "limit", "old", "--priority", "5").out.strip().endswith("burst=2  priority=5")
    caller = asyncio.run(Authenticator(FileKeys(file, warn=print)).identify(f"Bearer {secret}"))
    assert (caller.tenant, caller.most_urgent) == ("old", 5)
    assert len(keys(0, "list").out.splitlines()) == 2


def test_the_gateway_says_how_many_keys_of_a_file_may_pass_others_by(
    keys: Run, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    keys(0, "create", "plain")
    FileKeys(file, warn=print)
    assert "jump the queue" not in caplog.text
    keys(0, "create", "first", "--priority", "0")
    keys(0, "create", "second", "--priority", "4")
    FileKeys(file, warn=print)
    assert "2 API keys may jump the queue" in caplog.text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["create", "alice"], "A key named 'alice' already exists."),
        (["create", "no spaces"], "Names are letters"),
        (["create", "eve", "--burst", "0"], "limits are above 0"),
        (["create"], "needs a name"),
        (["limit", "alice"], "No limit is given"),
        (["limit", "bob", "--priority", "5"], "There is no key 'bob'"),
        (["limit", "alice", "--priority", "10"], "limits are above 0"),
        (["revoke", "mallory"], "There is no key 'mallory'."),
        (["list", "x"], "`keys list` takes no name."),
        (["destroy"], "invalid choice: 'destroy'"),
    ],
)
def test_mistakes_say_what_to_do(keys: Run, file: Path, argv: list[str], message: str) -> None:
    keys(0, "create", "alice")
    before = file.read_text()
    assert message in keys(2, *argv).err
    assert file.read_text() == before


def test_a_damaged_file_is_left_alone(keys: Run, file: Path) -> None:
    file.write_text("keys: {alice: 1}")
    assert "not a usable file of API keys" in keys(2, "create", "bob").err
    assert file.read_text() == "keys: {alice: 1}"


def test_some_place_is_needed(run: Run) -> None:
    assert "--api-keys-file FILE or --redis-url URL" in run(2, "keys", "list").err


def test_rates_are_shown_as_they_were_given(keys: Run) -> None:
    for name, rate in (("often", "1200000"), ("seldom", "0.5")):
        keys(0, "create", name, "--requests-per-minute", rate)
        assert f"requests_per_minute={rate}  " in keys(0, "limit", name, "--priority", "5").out


def test_keys_go_to_where_the_server_on_this_machine_looks_for_them(
    run: Run, file: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunFolder() as folder:
        announce(folder, Settings(model=Path("m"), api_keys_file=file), url="http://here", redis_url=redis_url)
        run(0, "keys", "create", "alice")
        run(0, "keys", "create", "carol", "--redis-url", redis_url)
        run(0, "keys", "create", "dave", "--url", "http://here", "--api-keys-file", str(file))
        assert all(name in file.read_text() for name in ("alice", "carol", "dave"))
        (folder.path / "server.json").unlink()
        announce(folder, Settings(model=Path("m")), url="http://here", redis_url=redis_url)
        run(0, "keys", "create", "bob")
        assert run(0, "keys", "list", "--redis-url", redis_url).out.startswith("bob  ")
        monkeypatch.setenv("EXPERTMESH_API_KEYS_FILE", str(file))
        assert run(0, "keys", "list", "--url", "http://here").out.startswith("bob  ")


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = Redis.from_url(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
def kept(run: Run, redis_url: str) -> Run:
    """`expertmesh keys` with Redis."""
    return lambda code, *argv: asyncio.to_thread(run, code, "keys", *argv, "--redis-url", redis_url)


async def test_keys_in_redis_are_those_the_gateway_reads(
    redis: Redis, kept: Run, caplog: pytest.LogCaptureFixture
) -> None:
    secret = (await kept(0, "create", "carol", "--burst", "4")).out.strip()
    store = Authenticator(RedisKeys(redis, NAME))
    assert (await store.identify(f"Bearer {secret}")).tenant == "carol"
    caplog.set_level("INFO")
    await kept(0, "limit", "carol", "--priority", "1")
    found = [await Authenticator(RedisKeys(redis, NAME)).identify(f"Bearer {secret}") for _ in range(2)]
    assert [(caller.tenant, caller.most_urgent) for caller in found] == [("carol", 1)] * 2
    assert "API key carol may jump the queue (priority 1)" in caplog.text
    await kept(0, "revoke", "carol")
    assert await redis.hlen(NAME) == 0


async def test_a_damaged_key_in_redis_is_named(redis: Redis, kept: Run) -> None:
    await redis.hset(NAME, "ab" * 32, b"{")  # type: ignore[misc]
    assert "The key abababababab in Redis is damaged" in (await kept(2, "list")).err
