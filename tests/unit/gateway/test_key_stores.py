"""Files of keys that change, vanish or break, and keys in Redis that somebody tries out."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from services.errors import QueueUnavailable, Unauthorized
from services.gateway import key_stores
from services.gateway.auth import ApiKey, digest
from services.gateway.key_stores import FileKeys, RedisKeys
from services.queue.connect import connect

GRACE_S = 5.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Followed:
    """A file of keys, and what is said of it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "keys.yaml"
        self.clock = Clock()
        self.warnings: list[str] = []
        self.usable: list[float] = []
        self.write("sk-a")
        self.keys = FileKeys(
            self.path, self.warnings.append, report=self.usable.append, grace_s=GRACE_S, clock=self.clock
        )

    def write(self, *secrets: str) -> None:
        """As a whole, as `expertmesh keys`, kubelets and careful editors do."""
        entries = [{"name": secret, "sha256": digest(secret)} for secret in secrets]
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps({"keys": entries}))
        draft.replace(self.path)

    async def knows(self, secret: str) -> bool:
        return await self.keys.find(digest(secret)) is not None


@pytest.fixture
def followed(tmp_path: Path) -> Followed:
    return Followed(tmp_path)


@pytest.mark.parametrize("way", ["deleted", "emptied", "blank"])
async def test_a_file_that_vanishes_shuts_everybody_out_after_a_grace(followed, way):
    if way == "deleted":
        followed.path.unlink()
    else:
        followed.path.write_text("" if way == "emptied" else " \n\n")
    assert await followed.knows("sk-a")
    followed.clock.now += GRACE_S - 0.1
    assert await followed.knows("sk-a")
    assert followed.warnings == []
    followed.clock.now += 0.1
    for _ in range(3):
        assert not await followed.knows("sk-a")
    assert len(followed.warnings) == 1
    assert "missing, empty or unreadable" in followed.warnings[0]
    assert (await followed.keys.usable(), followed.usable) == (False, [1, 0])
    followed.write("sk-a", "sk-b")
    assert await followed.knows("sk-a")
    assert await followed.knows("sk-b")
    assert (await followed.keys.usable(), followed.usable) == (True, [1, 0, 1])


async def test_an_editors_save_shuts_nobody_out(followed):
    """It may delete or empty the file for a moment."""
    for content in (None, ""):
        followed.path.unlink() if content is None else followed.path.write_text(content)
        assert await followed.knows("sk-a")
        followed.clock.now += GRACE_S / 2
        followed.write("sk-a", "sk-b")
        assert await followed.knows("sk-b")
        followed.clock.now += 10 * GRACE_S
        assert await followed.knows("sk-a")
    assert followed.warnings == []


async def test_a_secret_that_kubernetes_swaps_is_never_gone(tmp_path):
    """Its folder is a link that is replaced in one step."""

    def version(name: str, *secrets: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        entries = [{"name": secret, "sha256": digest(secret)} for secret in secrets]
        (folder / "keys.yaml").write_text(json.dumps({"keys": entries}))
        return folder

    data = tmp_path / "..data"
    data.symlink_to(version("v1", "sk-a"))
    (tmp_path / "keys.yaml").symlink_to(data / "keys.yaml")
    keys = FileKeys(tmp_path / "keys.yaml", pytest.fail, grace_s=0)
    assert await keys.find(digest("sk-a")) is not None
    swapped = tmp_path / "..data_tmp"
    restored = version("v2", "sk-b")
    os.utime(restored / "keys.yaml", ns=(1, 1))  # older than the one that it replaces
    swapped.symlink_to(restored)
    swapped.replace(data)
    assert await keys.find(digest("sk-b")) is not None
    assert await keys.find(digest("sk-a")) is None


async def test_a_broken_file_keeps_what_was_and_is_not_gone(followed):
    followed.path.write_text("keys: [")
    assert await followed.knows("sk-a")
    followed.clock.now += 10 * GRACE_S
    assert await followed.knows("sk-a")
    assert len(followed.warnings) == 1
    assert (await followed.keys.usable(), followed.usable) == (True, [1, 0])
    followed.write("sk-a", "sk-b")
    assert await followed.knows("sk-b")
    assert followed.usable == [1, 0, 1]


async def test_a_broken_file_brings_no_keys_back(followed):
    followed.path.write_text("")
    assert await followed.knows("sk-a")
    followed.path.write_text("keys: [")
    assert await followed.knows("sk-a")
    followed.clock.now += GRACE_S
    assert not await followed.knows("sk-a")
    followed.write("sk-a")
    assert await followed.knows("sk-a")


async def test_a_file_that_cannot_be_read_is_gone_and_tried_again(followed, monkeypatch):
    """Also where nothing of it changes: descriptors may have run out for a moment."""

    def refuse(_path: Path) -> bytes:
        raise PermissionError("not yours")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", refuse)
        followed.write("sk-a", "sk-b")
        assert await followed.knows("sk-a")
    assert await followed.knows("sk-b")
    followed.path.unlink()
    followed.path.mkdir()
    assert await followed.knows("sk-a")
    followed.clock.now += GRACE_S
    assert not await followed.knows("sk-a")
    assert (len(followed.warnings), followed.usable[-1]) == (1, 0)


async def test_a_change_of_its_mode_is_a_change(followed):
    before = followed.keys._look()
    followed.path.chmod(0o000)
    assert followed.keys._look() != before


async def test_a_file_without_keys_has_none(followed):
    followed.path.write_text("keys: []")
    assert not await followed.knows("sk-a")
    assert await followed.keys.usable()


async def test_a_large_file_is_read_in_a_thread_and_once(followed, monkeypatch):
    calls, go = [], threading.Event()
    parse = key_stores.parse_keys

    def wait_and_parse(path: Path, content: bytes) -> Any:
        calls.append(path)
        assert go.wait(10), "the loop stood still"
        return parse(path, content)

    monkeypatch.setattr(key_stores, "parse_keys", wait_and_parse)
    followed.write("sk-a", "sk-b")
    asked = [asyncio.create_task(followed.knows("sk-b")) for _ in range(5)]
    await asyncio.sleep(0.02)
    go.set()
    assert await asyncio.gather(*asked) == [True] * 5
    assert len(calls) == 1


class CountedRedis:
    """Redis, and how often it was asked; ``open`` is cleared where it does not answer."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self.asked = 0
        self.open = asyncio.Event()
        self.open.set()

    async def execute_command(self, *arguments: Any) -> Any:
        self.asked += 1
        await self.open.wait()
        return await self._redis.execute_command(*arguments)


@pytest.fixture
async def counted(redis_url: str) -> AsyncIterator[CountedRedis]:
    redis = connect(redis_url)
    for secret in ("sk-a", "sk-b"):
        record = {"name": secret, "sha256": digest(secret)}
        await redis.hset("keys", digest(secret), json.dumps(record))
    yield CountedRedis(redis)
    await redis.aclose()


async def test_who_tries_keys_out_keeps_nobody_out(counted):
    """Not even the holder of a key that this gateway has not seen yet; and Redis is asked few times for all of them."""
    keys = RedisKeys(counted, "keys", Clock())
    counted.open.clear()
    secrets = [*(f"guess {number}" for number in range(1000)), "sk-a", "sk-b"]
    asked = [asyncio.create_task(keys.find(digest(secret))) for secret in secrets]
    await asyncio.sleep(0)
    asked[0].cancel()
    asked[500].cancel()
    counted.open.set()
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert [key.name for key in found if isinstance(key, ApiKey)] == ["sk-a", "sk-b"]
    assert [place for place, key in enumerate(found) if isinstance(key, BaseException)] == [0, 500]
    assert counted.asked <= 6
    assert keys.recall(digest("sk-b")) == found[-1]
    assert len(keys._known) == 2, "nothing is kept of a guess"


async def test_who_waits_hears_that_redis_is_away_and_the_next_one_asks_again(counted, monkeypatch):
    keys = RedisKeys(counted, "keys", Clock())
    with monkeypatch.context() as patched:
        patched.setattr(counted._redis, "execute_command", _away)
        heard = await asyncio.gather(*(keys.find(digest(f"{n}")) for n in range(600)), return_exceptions=True)
    assert {type(error) for error in heard} == {QueueUnavailable}
    assert (await keys.find(digest("sk-a"))).name == "sk-a"


async def _away(*_arguments: Any) -> None:
    raise RedisConnectionError("away")


@pytest.mark.parametrize("record", ["{", '{"name": 3}', "\udcff"])
async def test_a_damaged_record_is_reported_to_its_holder_alone(counted, record):
    keys = RedisKeys(counted, "keys", Clock())
    await counted._redis.hset("keys", digest("sk-d"), record.encode(errors="surrogateescape"))
    damaged, good = await asyncio.gather(keys.find(digest("sk-d")), keys.find(digest("sk-a")), return_exceptions=True)
    assert isinstance(damaged, Unauthorized)
    assert good.name == "sk-a"


async def test_a_key_works_as_soon_as_it_is_made_and_for_some_seconds_after_it_was_revoked(counted):
    clock = Clock()
    keys = RedisKeys(counted, "keys", clock)
    made = ApiKey(name="c", sha256=digest("sk-c"), burst=2)
    for _ in range(2):
        assert await keys.find(digest("sk-c")) is None
        record = {"name": "c", "sha256": digest("sk-c"), "burst": 2}
        await counted._redis.hset("keys", digest("sk-c"), json.dumps(record))
        assert await keys.find(digest("sk-c")) == made
        await counted._redis.hdel("keys", digest("sk-c"))
        assert await keys.find(digest("sk-c")) == made
        clock.now += 6
