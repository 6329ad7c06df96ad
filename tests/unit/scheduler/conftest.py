"""A Redis per test, for the scheduler."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio import Redis
from testkit.redis_server import RedisServer

from services.queue.connect import connect


@pytest.fixture
def server() -> Iterator[RedisServer]:
    redis_server = RedisServer()
    yield redis_server
    redis_server.close()


@pytest.fixture
async def redis(server: RedisServer) -> AsyncIterator[Redis]:
    client = connect(server.url)
    yield client
    await client.aclose()
