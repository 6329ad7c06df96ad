"""Clients that leave, and more of them than the queue holds."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil
import pytest
from testkit.processes.servers import Server, bench, metric_sum
from testkit.waiting import LIMIT_S, until

PROMPT = list(range(3, 203))


def blocks_in_use(client: httpx.Client) -> float:
    return metric_sum(client.get("/metrics").text, "expertmesh_kv_blocks", state="used")


def wait_for_blocks(client: httpx.Client, busy: bool) -> float:
    """Seconds until KV blocks are (not) in use."""
    start = time.monotonic()
    until(lambda: (blocks_in_use(client) > 0) == busy, f"KV blocks in use: {busy}", every_s=0.0)
    return time.monotonic() - start


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_frees_kv_blocks_long_before_the_answer_would_end(server: Server, stream: bool) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "stream": stream}

    async def leave_in_the_middle(looking: httpx.Client) -> float:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            request = asyncio.create_task(client.post("/v1/completions", json=body))
            await asyncio.to_thread(wait_for_blocks, looking, True)
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
        return await asyncio.to_thread(wait_for_blocks, looking, False)

    with httpx.Client(base_url=server.url, timeout=10) as looking:  # to connect takes as long as what is measured
        freed = statistics.median(asyncio.run(leave_in_the_middle(looking)) for _ in range(5))
        began = time.monotonic()
        looking.post(f"{server.url}/v1/completions", json=body | {"stream": False}, timeout=LIMIT_S).raise_for_status()
        whole = time.monotonic() - began
    assert freed <= whole / 4, f"{freed:.3f} s of {whole:.3f} s"
    assert server.metric("expertmesh_requests_total", finish="cancelled") > 0


def rss_mib(server: Server) -> float:
    """Resident memory of the server's whole process tree, MiB."""
    parent = psutil.Process(server.proc.pid)
    return sum(process.memory_info().rss for process in [parent, *parent.children(recursive=True)]) / 2**20


def test_a_thousand_requests_against_a_queue_of_a_hundred(tiny: Path, tmp_path: Path) -> None:
    async def one(client: httpx.AsyncClient, i: int) -> httpx.Response:
        body = {"model": "tiny", "prompt": [3 + i % 300, 5, 7], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        return await client.post("/v1/completions", json=body)

    async def burst(url: str) -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
            return await asyncio.gather(*(one(client, i) for i in range(1000)))

    with bench(tmp_path) as stage:
        server = stage.serve(
            tiny, served_model_name="tiny", dtype="float32", max_queued_requests=100, max_num_seqs=8, kv_blocks=64
        )
        asyncio.run(burst(server.url))
        before = rss_mib(server)
        responses = asyncio.run(burst(server.url))
        after = rss_mib(server)
        statuses = Counter(response.status_code for response in responses)
        assert set(statuses) == {200, 429}
        assert statuses[200] >= 100
        for response in responses:
            if response.status_code == 429:
                assert 1 <= int(response.headers["Retry-After"]) <= 120
                assert response.json()["error"]["code"] == "queue_full"
            else:
                assert response.json()["usage"]["completion_tokens"] == 24
        assert after - before < 40, f"memory grew from {before:.0f} to {after:.0f} MiB"
        until(lambda: server.metric("expertmesh_queue_requests") == 0, "the queue's gauge follows")
        assert server.metric("expertmesh_kv_blocks", state="used") == 0
