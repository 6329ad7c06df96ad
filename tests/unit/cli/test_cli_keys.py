"""`expertmesh keys`: what it writes is what the gateway reads, and a secret is seen once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from redis.asyncio import Redis

from services.cli.keys import main as keys
from services.cli.main import main
from services.gateway.auth import Authenticator
from services.gateway.key_stores import FileKeys, RedisKeys
from services.queue.keys import Keys


def _create(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["keys", "create", *argv]) == 0
    return capsys.readouterr().out.strip()


def test_a_key_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.yaml"
    at = ["--api-keys-file", str(file)]
    secret = _create(capsys, "alice", *at, "--requests-per-minute", "60", "--max-concurrency", "2", "--priority", "3")
    _create(capsys, "bob", *at)
    assert secret not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    store = Authenticator(FileKeys(file, warn=print))
    caller = asyncio.run(store.identify(f"Bearer {secret}"))
    assert caller.tenant == "alice"
    assert caller.limits is not None
    assert (caller.limits.requests_per_minute, caller.limits.concurrency, caller.most_urgent) == (60, 2, 3)

    assert main(["keys", "list", *at]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["alice", "bob"]
    assert rows[0].endswith("requests_per_minute=60.0  max_concurrency=2  priority=3")
    assert rows[1].endswith("  priority=5")
    _create(capsys, "carol", *at, "--priority", "0")
    assert main(["keys", "list", *at]) == 0
    assert capsys.readouterr().out.splitlines()[2].endswith("  priority=0"), "who may pass all others by is seen"
    assert main(["keys", "revoke", "carol", *at]) == 0

    digest = rows[1].split()[1]
    assert main(["keys", "revoke", "alice", *at]) == 0
    assert main(["keys", "revoke", digest, *at]) == 0
    capsys.readouterr()
    assert main(["keys", "list", *at]) == 0
    assert capsys.readouterr().out == ""


def test_limits_of_a_key_are_changed_and_its_secret_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys that an earlier release wrote have priority 0."""
    file = tmp_path / "keys.yaml"
    at = ["--api-keys-file", str(file)]
    secret = _create(capsys, "old", *at, "--priority", "0", "--burst", "2")
    _create(capsys, "other", *at)
    assert main(["keys", "limit", "old", *at, "--priority", "5"]) == 0
    assert capsys.readouterr().out.strip().endswith("burst=2  priority=5")
    caller = asyncio.run(Authenticator(FileKeys(file, warn=print)).identify(f"Bearer {secret}"))
    assert (caller.tenant, caller.most_urgent) == ("old", 5)
    assert main(["keys", "list", *at]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_the_gateway_says_how_many_keys_of_a_file_may_pass_others_by(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    file = tmp_path / "keys.yaml"
    at = ["--api-keys-file", str(file)]
    _create(capsys, "plain", *at)
    FileKeys(file, warn=print)
    assert "pass others by" not in caplog.text
    _create(capsys, "first", *at, "--priority", "0")
    _create(capsys, "second", *at, "--priority", "4")
    FileKeys(file, warn=print)
    assert "2 API keys may pass others by" in caplog.text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["create", "alice"], "There is a key named 'alice' already."),
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
def test_mistakes_say_what_to_do(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = ["--api-keys-file", str(tmp_path / "keys.yaml")]
    _create(capsys, "alice", *file)
    before = (tmp_path / "keys.yaml").read_text()
    assert main(["keys", *argv, *file]) == 2
    assert message in capsys.readouterr().err
    assert (tmp_path / "keys.yaml").read_text() == before


def test_a_damaged_file_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("keys: {alice: 1}")
    assert main(["keys", "create", "bob", "--api-keys-file", str(file)]) == 2
    assert "not a usable file of API keys" in capsys.readouterr().err
    assert file.read_text() == "keys: {alice: 1}"


def test_some_place_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "list"]) == 2
    assert "--api-keys-file FILE or --redis-url URL" in capsys.readouterr().err


async def test_keys_in_redis_are_those_the_gateway_reads(
    redis_url: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    secret = await asyncio.to_thread(_create, capsys, "carol", "--redis-url", redis_url, "--burst", "4")
    redis = Redis.from_url(redis_url)
    store = Authenticator(RedisKeys(redis, _name()))
    assert (await store.identify(f"Bearer {secret}")).tenant == "carol"
    caplog.set_level("INFO")
    assert await asyncio.to_thread(keys, ["limit", "carol", "--redis-url", redis_url, "--priority", "1"]) == 0
    found = [await Authenticator(RedisKeys(redis, _name())).identify(f"Bearer {secret}") for _ in range(2)]
    assert [(caller.tenant, caller.most_urgent) for caller in found] == [("carol", 1)] * 2
    assert "API key carol may pass others by (priority 1)" in caplog.text
    assert await asyncio.to_thread(keys, ["revoke", "carol", "--redis-url", redis_url]) == 0
    assert await redis.hlen(_name()) == 0
    await redis.aclose()


async def test_a_damaged_key_in_redis_is_named(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    redis = Redis.from_url(redis_url)
    await redis.hset(_name(), "ab" * 32, b"{")  # type: ignore[misc]
    assert await asyncio.to_thread(main, ["keys", "list", "--redis-url", redis_url]) == 2
    assert "The key abababababab in Redis is damaged" in capsys.readouterr().err
    await redis.aclose()


def _name() -> str:
    return Keys("expertmesh").api_keys
