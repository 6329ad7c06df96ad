"""What tracing costs a server on CPUs: the pocket model without it, and with a part or all of the requests traced.

    PYTHONPATH=.:kernels:tests .venv/bin/python perf/server/tracing_cost.py [--rounds 9] [--seconds 6] [--streams 8]

A server for each way, all at once; one has load at a time, in rounds, in an order that turns. The medians over rounds
of requests per second, of the mean engine step, and of CPU time per generated token of all processes: what neighbours
take of the cores is not in that. CPU time is compared with that of the same round's server that does not trace. Then
what the gateway does for a request that is not sampled, by itself: the noise of rounds is a hundred times as much.

    off      no tracing
    1 %      to a collector, one request of a hundred
    100 %    to a collector, every request
    files    every request and every step of engine and experts into files
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from testkit.collector import collecting
from testkit.pocket.answers import serve_pocket
from testkit.processes.servers import Server, bench

from services.gateway.request_trace import TracedRequests
from services.runtime.tracing import Span, Tracer

BODY = {"model": "pocket", "prompt": "define: violinist\n", "max_tokens": 32, "temperature": 0, "ignore_eos": True}


@dataclass(frozen=True, kw_only=True)
class Round:
    requests_s: float
    step_ms: float
    cpu_ms: float
    """Of all processes, per generated token."""


def ways(endpoint: str, folder: Path) -> dict[str, dict[str, object]]:
    """Way -> its options."""
    return {
        "off": {},
        "1 %": {"otlp_endpoint": endpoint, "trace_sample": 0.01},
        "100 %": {"otlp_endpoint": endpoint, "trace_sample": 1},
        "files": {"trace_folder": folder / "traces", "trace_sample": 1},
    }


def cpu_s(server: Server) -> float:
    total = 0.0
    for process in psutil.Process(server.proc.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


async def loaded(url: str, streams: int, seconds: float) -> int:
    """Requests that ended within ``seconds``."""
    until, ended = time.monotonic() + seconds, 0

    async def stream(client: httpx.AsyncClient) -> None:
        nonlocal ended
        while time.monotonic() < until:
            answer = await client.post("/v1/completions", json=BODY)
            answer.raise_for_status()
            ended += 1

    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        await asyncio.gather(*(stream(client) for _ in range(streams)))
    return ended


def measured(server: Server, streams: int, seconds: float) -> Round:
    names = ("engine_step_seconds_sum", "engine_step_seconds_count", "decode_tokens_total")
    before, cpu, began = [server.metric(f"expertmesh_{name}") for name in names], cpu_s(server), time.monotonic()
    ended = asyncio.run(loaded(server.url, streams, seconds))
    took, spent = time.monotonic() - began, cpu_s(server) - cpu
    step_s, steps, tokens = (
        server.metric(f"expertmesh_{name}") - value for name, value in zip(names, before, strict=True)
    )
    return Round(requests_s=ended / took, step_ms=1e3 * step_s / steps, cpu_ms=1e3 * spent / tokens)


def beside(results: Sequence[Round], off: Sequence[Round]) -> str:
    """The geometric mean over rounds of CPU time by that of ``off`` in the same round, and where 95 % of the means of
    rounds drawn again lie."""
    logs = [math.log(one.cpu_ms / other.cpu_ms) for one, other in zip(results, off, strict=True)]
    rng = random.Random(1)
    means = sorted(statistics.fmean(rng.choices(logs, k=len(logs))) for _ in range(2000))
    mean, low, high = (math.exp(each) for each in (statistics.fmean(logs), means[50], means[-51]))
    return f"{mean:.3f} ({low:.3f} to {high:.3f})"


class Nowhere:
    """A sink of a tracer that samples nothing."""

    def put(self, span: Span) -> None:
        raise AssertionError(f"{span.name} was sampled")


def unsampled_us(requests: int = 20_000) -> float:
    """Return the microseconds that tracing adds to a request that is not sampled."""

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def ignore(_message: Message) -> None:
        pass

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def seconds(app: ASGIApp) -> float:
        began = time.perf_counter()
        for _ in range(requests):
            await app({"type": "http", "method": "POST", "headers": [(b"host", b"127.0.0.1")]}, receive, ignore)
        return time.perf_counter() - began

    traced = TracedRequests(app, Tracer(Nowhere(), share=0.0))
    took = [asyncio.run(seconds(traced)) - asyncio.run(seconds(app)) for _ in range(5)]
    return 1e6 * statistics.median(took) / requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--layout", choices=["local", "disaggregated"], default="disaggregated")
    given = parser.parse_args()
    experts = {"expert_workers": 1, "expert_groups": 1, "fabric_shared": "off"}
    common = {"layout": given.layout, "lease": 30, **(experts if given.layout == "disaggregated" else {})}
    with tempfile.TemporaryDirectory() as temporary, collecting() as collector, bench(Path(temporary)) as stage:
        options = ways(collector.url, Path(temporary))
        servers = {way: serve_pocket(stage, **common, **options[way]) for way in options}
        rounds: dict[str, list[Round]] = defaultdict(list)
        for number in range(given.rounds + 1):
            order = list(servers)
            for way in order[number % len(order) :] + order[: number % len(order)]:
                result = measured(servers[way], given.streams, given.seconds)
                if number:  # the first round warms up
                    rounds[way].append(result)
        print(f"{given.layout}, {given.streams} streams, medians of {given.rounds} rounds of {given.seconds:g} s")
        print(f"{'way':<6} {'requests/s':>10} {'step ms':>8} {'CPU ms/token':>13}  of off in the same round, 95 %")
        for way in servers:
            results = rounds[way]
            middle = {
                name: statistics.median(getattr(result, name) for result in results)
                for name in ("requests_s", "step_ms", "cpu_ms")
            }
            figures = f"{middle['requests_s']:>10.1f} {middle['step_ms']:>8.2f} {middle['cpu_ms']:>13.3f}"
            print(f"{way:<6} {figures}  {beside(results, rounds['off']) if way != 'off' else ''}")
        print(f"{len(collector.spans)} spans came to the collector")
    print(f"a request that is not sampled: {unsampled_us():.1f} us")


if __name__ == "__main__":
    main()
