"""Expert servers that end with their test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from testkit.fabric.tcp import Serve, serve

from services.fabric.tcp.server import ExpertServer


@pytest.fixture
def served() -> Iterator[Serve]:
    """:func:`serve`, with seats numbered as they come."""
    servers: list[ExpertServer] = []

    def one(*compute: Any, **options: Any) -> ExpertServer:
        servers.append(serve(*compute, **{"seat": len(servers)} | options))
        return servers[-1]

    yield one
    for server in servers:
        server.close()
