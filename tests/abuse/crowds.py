"""``python -m abuse.crowds``: thousands who do nothing. Streams without a token, connections without a request, readers
that stopped; each crowd by itself and all at once, next to honest streams, with probes answered in time throughout."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from chaos.report import conclude
from testkit.processes.servers import metric_sum

from abuse.attack import Bounds, Target, judge, look
from abuse.attacks.heads import Connections
from abuse.attacks.readers import unread
from abuse.kit.cage import descriptors
from abuse.kit.stage import Shape, Stage, on_stage
from abuse.kit.tokens import BURST, HOLD
from abuse.table import as_json, as_markdown, setting
from services.config.settings import Settings

_HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
Join = Callable[[Target, contextlib.AsyncExitStack], Awaitable[None]]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="abuse.crowds", description="Thousands of clients that do nothing.")
    parser.add_argument("--idle", type=int, default=5000, help="streams without a token (default: %(default)s)")
    parser.add_argument(
        "--half-open", type=int, default=3000, help="connections with half a head (default: %(default)s)"
    )
    parser.add_argument("--unread", type=int, default=200, help="readers that stop (default: %(default)s)")
    parser.add_argument("--pace", type=int, default=500, help="so many come in a second (default: %(default)s)")
    parser.add_argument(
        "--hold", type=float, default=10.0, metavar="S", help="how long they stay (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    return parser.parse_args(argv)


@dataclass(frozen=True, slots=True)
class Expected:
    """How many of a crowd are there: streams that the gateway serves, descriptors that it has at the most."""

    streams: int
    files: int

    def missed(self, there: dict[str, Any], before: dict[str, Any], files: float) -> list[str]:
        """What there is less of than nearly all."""
        found = {"streams": there.get("streams", 0) - before.get("streams", 0), "descriptors": files - before["files"]}
        wanted = {"streams": self.streams, "descriptors": self.files}
        return [
            f"{found[name]:g} {name} more, not {wanted[name]}" for name in found if found[name] < 0.98 * wanted[name]
        ]


def expected(options: argparse.Namespace) -> list[Expected]:
    """Of each of :func:`crowds`."""
    single = [Expected(options.idle, options.idle), Expected(0, options.half_open), Expected(0, options.unread)]
    return [*single, Expected(options.idle, options.idle + options.half_open + options.unread)]


def crowds(options: argparse.Namespace) -> dict[str, list[Join]]:
    """By name; the last one is all of them."""

    async def come(connections: Connections, count: int, pieces: list[bytes]) -> None:
        """Not all at once: a storm of connections is an attack of its own."""
        for start in range(0, count, options.pace):
            began = time.monotonic()
            await connections.add(min(options.pace, count - start), pieces)
            await asyncio.sleep(max(0.0, began + 1 - time.monotonic()))

    async def idle(target: Target, stack: contextlib.AsyncExitStack) -> None:
        asked = target.dialer().request("/v1/completions", {"prompt": [HOLD, 9], "max_tokens": 50, "stream": True})
        await come(await stack.enter_async_context(Connections(target)), options.idle, [asked])

    async def half_open(target: Target, stack: contextlib.AsyncExitStack) -> None:
        await come(await stack.enter_async_context(Connections(target)), options.half_open, [_HALF])

    async def stopped(target: Target, stack: contextlib.AsyncExitStack) -> None:
        body = {"prompt": [BURST, 9], "n": 2, "logprobs": 5, "max_tokens": 320, "stream": True, "ignore_eos": True}
        for _ in range(0, options.unread, 20):  # by and by: what is to be seen is that they stay
            await unread(target, stack, 20, body)
            await asyncio.sleep(0.3)

    single: dict[str, list[Join]] = {
        f"{options.idle} idle streams": [idle],
        f"{options.half_open} half-open connections": [half_open],
        f"{options.unread} readers that stop": [stopped],
    }
    return single | {"all of them": [idle, half_open, stopped]}


async def gather(stage: Stage, joins: Sequence[Join], hold_s: float) -> dict[str, Any]:
    """A crowd comes, stays and goes; what it took."""
    target, began = Target(stage=stage), time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        for join in joins:
            await join(target, stack)
        came_s = time.monotonic() - began
        await asyncio.sleep(hold_s)
        there = await asyncio.to_thread(now, stage)
    await asyncio.sleep(5)
    return {"came_s": round(came_s, 1), "there": there, "after": await asyncio.to_thread(now, stage)}


def now(stage: Stage) -> dict[str, Any]:
    """Memory in MiB, descriptors, streams."""
    pid = stage.procs["gateway"].pid
    cage, found = stage.cages["gateway"], {"rss": round(stage.rss_mib()), "files": descriptors(pid)}
    usage, sockets = cage.usage(), cage.sockets()
    found |= {"cgroup": usage >> 20} if usage is not None else {}
    found |= {"sockets": sockets >> 20} if sockets is not None else {}
    with contextlib.suppress(httpx.HTTPError):
        page = httpx.get(f"{stage.url}/metrics", timeout=10).text
        found["streams"] = int(metric_sum(page, "expertmesh_gateway_requests_in_flight"))
    with stage.store() as store:
        found["redis"] = round(store.info("memory")["used_memory"] / 2**20, 1)
    return found


def room() -> tuple[tuple[str, object], ...]:
    """Options by which a gateway takes in so many, where it bounds them."""
    wanted = {"max_queued_requests": 20_000, "max_connections": 10_000}
    return tuple((name, value) for name, value in wanted.items() if name in Settings.model_fields)


def run(stage: Stage, options: argparse.Namespace) -> list[dict[str, Any]]:
    assert stage.watch is not None
    found, bounds = [], Bounds(peak=800, kept=400, redis_kept=100)
    for (name, joins), wanted in zip(crowds(options).items(), expected(options), strict=True):
        since, before = stage.watch.ask("mark"), now(stage)
        figures = asyncio.run(gather(stage, joins, options.hold))
        seen = look(stage, since)
        figures |= {"name": name, "before": before, "peak": seen["rss_peak"], "gap": seen["honest"]["longest"]}
        figures |= {what: seen[what] for what in ("health", "ping", "probes")} | {"broken": judge(bounds, seen)}
        figures["broken"] += wanted.missed(figures["there"], before, seen["files"])
        figures["broken"] += [f"{role} ended" for role in stage.procs if role not in stage.alive()]
        print(
            f"{name}: {figures['there']}, /health {seen['health']:.2f} s; {figures['broken'] or 'no harm'}", flush=True
        )
        found.append(figures)
        if len(stage.alive()) < len(stage.procs):
            break
    return found


def table(found: Sequence[dict[str, Any]]) -> list[str]:
    rows = [("crowd", "came within", "before", "there", "5 s after", "peak MiB", "slowest probe", "longest gap")]
    for one in found:
        held = [
            ", ".join(f"{key} {value}" for key, value in one[when].items()) for when in ("before", "there", "after")
        ]
        slowest = (f"{one['peak']:.0f}", f"{one['health']:.2f} s", f"{one['gap']:.2f} s")
        rows.append((one["name"], f"{one['came_s']} s", *held, *slowest))
    return as_markdown(rows)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    shape = Shape(seats=16_384, long_tokens=36_000, gateway=room())
    with on_stage(shape) as stage:
        found = run(stage, options)
        limits = stage.limits()
    broken = [f"{one['name']}: {what}" for one in found for what in one["broken"]]
    content = {"setting": setting(limits), "crowds": found, "broken": broken}
    return conclude(table(found), broken, {options.json: as_json(content)})


if __name__ == "__main__":
    sys.exit(main())
