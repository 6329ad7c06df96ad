"""What Ray Serve's proxy adds: the same workers asked through it and through a gateway of their own, in one run.

    PYTHONPATH=.:kernels:tests .venv/bin/python perf/server/ray_overhead.py [--rounds 7] [--streams 1 16]
    RAY_SERVE_ENABLE_HA_PROXY=1 ...    the same with HAProxy as Serve's proxy

One Ray node, the pocket model in one attention worker. Beside the application runs `expertmesh gateway` at the same
Redis. Rounds alternate between the two ways in; the table has medians over rounds of the time to the first token, the
time between tokens, and tokens per second. All processes have the same priority: Ray would give its own a low one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import httpx
import ray
from ray import serve
from testkit.pocket.answers import POCKET
from testkit.processes.servers import free_port
from testkit.waiting import until

from services.ray import app

_APP = "overhead"
_BODY = {"model": "pocket", "prompt": "define: violinist\n", "max_tokens": 64, "ignore_eos": True, "stream": True}


@dataclass(frozen=True, kw_only=True)
class Round:
    ttft_ms: float
    gap_ms: float
    tokens_s: float


async def _stream(client: httpx.AsyncClient, url: str) -> list[float]:
    """Return when the request was sent, and when each event came."""
    times = [time.perf_counter()]
    async with client.stream("POST", f"{url}/v1/completions", json=_BODY | {"temperature": 0}) as answer:
        answer.raise_for_status()
        events = (time.perf_counter() async for line in answer.aiter_lines() if line.startswith("data: {"))
        times.extend([at async for at in events])
    return times


async def _round(url: str, streams: int) -> Round:
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=streams)) as client:
        await _stream(client, url)
        began = time.perf_counter()
        found = await asyncio.gather(*(_stream(client, url) for _ in range(streams)))
        took = time.perf_counter() - began
    return Round(
        ttft_ms=1e3 * statistics.median(times[1] - times[0] for times in found),
        gap_ms=1e3 * statistics.median((times[-1] - times[1]) / (int(_BODY["max_tokens"]) - 1) for times in found),
        tokens_s=streams * int(_BODY["max_tokens"]) / took,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    options = parser.parse_args()
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(num_cpus=8, num_gpus=0, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    port, own_port = free_port(), free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    model = {"model": str(POCKET / "model"), "served_model_name": "pocket", "auth": "off", "threads": 1}
    serve.run(app({"settings": model, "schedulers": 1}), name=_APP, route_prefix="/")
    redis = serve.get_deployment_handle("Controller", _APP).redis_url.remote().result()
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in model.items() if name != "threads"]
    command = [sys.executable, "-m", "expertmesh", "gateway", *flags, f"--redis-url={redis}", f"--port={own_port}"]
    own = subprocess.Popen(command, env=os.environ, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    ways = {"expertmesh gateway": f"http://127.0.0.1:{own_port}", "through Ray Serve": f"http://127.0.0.1:{port}"}
    try:
        for url in ways.values():
            until(lambda url=url: _ready(url), f"{url} is ready", limit_s=120, every_s=0.5)
        for streams in options.streams:
            rounds: dict[str, list[Round]] = {way: [] for way in ways}
            for _ in range(options.rounds):
                for way, url in ways.items():
                    rounds[way].append(asyncio.run(_round(url, streams)))
            for way, done in rounds.items():
                medians = {
                    field: round(statistics.median(getattr(each, field) for each in done), 2)
                    for field in ("ttft_ms", "gap_ms", "tokens_s")
                }
                print(json.dumps({"streams": streams, "way": way} | medians), flush=True)
    finally:
        own.terminate()
        serve.delete(_APP)
        serve.shutdown()
        ray.shutdown()


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False


if __name__ == "__main__":
    main()
