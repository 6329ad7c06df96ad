"""What a role does at its start about a Redis that refuses it, is away, or says nothing."""

from __future__ import annotations

import asyncio
import socket

import pytest
from testkit.queue.redis_server import RedisServer, running_redis

from services.errors import ConfigError
from services.queue.connect import check_access, connect
from services.queue.embedded import find_redis_server


async def _checked(url: str, stop: asyncio.Event | None = None) -> None:
    redis = connect(url)
    try:
        await check_access(redis, stop or asyncio.Event())
    finally:
        await redis.aclose()


async def test_one_that_lets_us_in_is_enough(server: RedisServer) -> None:
    await _checked(server.url)


@pytest.mark.parametrize("url", ["{url}", "{url}?password=another"])
async def test_one_that_refuses_the_password_ends_the_role(url: str) -> None:
    with running_redis(str(find_redis_server())) as server:
        owner = connect(server.url)
        await owner.config_set("requirepass", "the right one")
        with pytest.raises(ConfigError, match="rejects the credentials"):
            await _checked(url.format(url=server.url))
        await owner.aclose()


async def test_one_that_is_away_is_waited_for_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    await _checked("unix:///tmp/there-is-no-such-redis.sock")
    assert "Redis does not answer" in caplog.text


async def test_one_that_says_nothing_does_not_hold_up_the_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, stop.set)
        async with asyncio.timeout(4):  # sooner than the socket's timeout
            await _checked(f"redis://127.0.0.1:{silent.getsockname()[1]}", stop)
