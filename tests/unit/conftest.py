"""A Redis per test, append-only, that the test may kill; a folder of temporary files without servers in it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from testkit.queue.redis_server import APPEND_ONLY, RedisServer, running_redis

from services.queue.embedded import find_redis_server


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with running_redis(str(find_redis_server()), *APPEND_ONLY) as running:
        yield running


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of temporary files, with a name that is short enough for sockets, and without records of servers."""
    tmp_path_factory.getbasetemp()  # made at its first use: not in a folder that ends with this test
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)
