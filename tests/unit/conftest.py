"""A Redis per test, append-only, that the test may kill."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from testkit.queue.redis_server import APPEND_ONLY, RedisServer, running_redis

from services.queue.embedded import find_redis_server


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with running_redis(str(find_redis_server()), *APPEND_ONLY) as running:
        yield running
