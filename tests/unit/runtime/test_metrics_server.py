"""/metrics, /health and /ready for the roles without a web app."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from services.errors import PortInUse
from services.runtime import MetricsServer


class _Role:
    def __init__(self) -> None:
        self.missing: list[str] = []
        self.registry = CollectorRegistry()
        Counter("things_total", "Things.", registry=self.registry).inc(3)


@pytest.fixture
def role() -> _Role:
    return _Role()


@pytest.fixture
async def url(role: _Role) -> AsyncIterator[str]:
    server = MetricsServer(role.registry, missing=lambda: role.missing)
    port = await server.start()
    yield f"http://127.0.0.1:{port}"
    await server.close()


async def _get(url: str, method: str = "GET", **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.request(method, url, headers=headers)


async def test_metrics_in_both_formats(url: str) -> None:
    plain = await _get(f"{url}/metrics?x=1")
    assert "things_total 3.0" in plain.text
    assert plain.headers["content-type"].startswith("text/plain; version=")
    assert (await _get(f"{url}/metrics", accept="application/openmetrics-text")).text.endswith("# EOF\n")


async def test_ready_says_what_is_missing(url: str, role: _Role) -> None:
    role.missing = ["the model", "Redis"]
    answer = await _get(f"{url}/ready")
    assert (answer.status_code, answer.text) == (503, "waiting for the model, Redis\n")
    assert (await _get(f"{url}/health")).status_code == 200
    role.missing = []
    assert (await _get(f"{url}/ready")).status_code == 200


async def test_other_paths_and_methods(url: str) -> None:
    assert (await _get(f"{url}/other")).status_code == 404
    assert (await _get(f"{url}/metrics", "POST")).status_code == 405


@pytest.mark.parametrize("said", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"x" * 100_000, b""])
async def test_nonsense_is_answered_and_survived(url: str, said: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
    writer.write(said)
    writer.write_eof()
    assert (await reader.read(12)) == b"HTTP/1.1 400"
    writer.close()
    assert (await _get(f"{url}/health")).status_code == 200


async def test_a_taken_port_is_a_start_up_error(url: str) -> None:
    port = int(url.rsplit(":", 1)[1])
    with pytest.raises(PortInUse, match="--metrics-port"):
        await MetricsServer(CollectorRegistry(), port=port).start()
