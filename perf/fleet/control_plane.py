"""The control plane with thousands of expert workers: seats, tables, Redis, scheduler; without models or a cluster.

    OMP_NUM_THREADS=1 PYTHONPATH=.:tests .venv/bin/python -m perf.fleet.control_plane --experts 2000 --groups 64

A real redis-server, two scheduler processes, and in a few processes real expert workers that have nothing to load
(testkit/fleet/experts.py), attention workers without an engine, and gateways (testkit/fleet/front.py). Reported, as a
table and with ``--json FILE``:

    start        all workers begin at once: until every reader has a table of all of them
    join, leave  of one worker, and of 5 %; until every reader has a table with, or without, them
    death        of 5 % at once; a lease and the heartbeat before it have to pass first
    steady       nothing changes
    ...          and of each phase the scheduler's and Redis' CPU as shares of a core, commands, bytes, placement turns
    queue        milliseconds from a request's admission to a worker's inbox, in each of these phases
    table, scrape, series   their sizes; series are those of the roles' own registries, times the processes of a role

CPU shares count the process' own time, so other processes of the machine do not change them, but delay all else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import redis
from testkit.processes.servers import free_port
from testkit.queue.redis_server import running_redis

from perf.fleet.experts import FleetShape
from perf.fleet.processes import Remote, Scheduler, front, members
from perf.fleet.series import Series, series_of
from services.queue.embedded import find_redis_server
from services.routing import decode_table, encode_table

REDIS_FIGURES = ("total_commands_processed", "total_net_input_bytes", "total_net_output_bytes")


class Fleet:
    """Everything that runs, and what was measured of it."""

    def __init__(self, args: argparse.Namespace, shape: FleetShape, schedulers: list[Scheduler], pid: int) -> None:
        self.args, self.shape, self.schedulers = args, shape, schedulers
        self.store = redis.Redis.from_url(shape.url)
        self.redis = psutil.Process(pid)
        self.parts = [Remote(members, shape, f"experts{part}") for part in range(args.processes)]
        self.front, self.traffic = Remote(front, shape), Remote(front, shape)
        self.seats = 0
        self.found: dict[str, dict[str, Any]] = {}

    @property
    def leader(self) -> Scheduler:
        return max(self.schedulers, key=lambda scheduler: scheduler.value("scheduler_leader"))

    @contextmanager
    def watched(self, phase: str) -> Iterator[dict[str, Any]]:
        """What Redis and the leader spend in the block, and the requests' waiting meanwhile."""
        figures: dict[str, Any] = {}
        self.traffic("queued")
        leader = self.leader
        before, began = self._spent(leader), time.monotonic()
        yield figures
        wall, after = time.monotonic() - began, self._spent(leader)
        spent = {name: after[name] - before[name] for name in after}
        turns = spent.pop("turns")
        figures |= {"wall_s": round(wall, 2)}
        figures |= {name: round(value / wall, 3) for name, value in spent.items() if name != "turn_s"}
        figures |= {"turns_per_s": round(turns / wall, 2), "turn_ms": round(1e3 * spent["turn_s"] / max(turns, 1), 2)}
        queued = sorted(self.traffic("queued"))
        if queued:
            figures["queue_ms"] = {
                "p50": round(1e3 * statistics.median(queued), 1),
                "p99": round(1e3 * queued[int(len(queued) * 0.99)], 1),
                "most": round(1e3 * queued[-1], 1),
                "requests": len(queued),
            }
        self.found[phase] = figures
        print(phase, json.dumps(figures), flush=True)

    def _spent(self, leader: Scheduler) -> dict[str, float]:
        info: Any = self.store.info()
        cpu = [sum(process.cpu_times()[:2]) for process in (leader.stats, self.redis)]
        found = {"scheduler_cpu": cpu[0], "redis_cpu": cpu[1]}
        found |= {name.removeprefix("total_") + "_per_s": info[name] for name in REDIS_FIGURES}
        found |= {"turns": leader.value("placement_turn_seconds_count")}
        return found | {"turn_s": leader.value("placement_turn_seconds_sum")}

    def _sent(self, what: str, count: int) -> tuple[float, set[str]]:
        """Send ``what`` to ``count`` workers of all parts. Returns when the first one had it, and their names."""
        shares = [count // len(self.parts) + (part < count % len(self.parts)) for part in range(len(self.parts))]
        for part, share in zip(self.parts, shares, strict=True):
            part.send(what, share)
        answers = [part.answer() for part in self.parts]
        return min(when for when, _ in answers), {name for _, names in answers for name in names or ()}

    def change(self, phase: str, what: str, count: int, times: int = 1, within_s: float = 120.0) -> None:
        found = []
        with self.watched(phase) as figures:
            for _ in range(times):
                when, names = self._sent(what, count)
                self.seats += count if what == "start" else -count
                absent, present = (set(), names) if what == "start" else (names, set())
                if count == self.args.experts:
                    present = set()
                reached = self.front("until", self.seats, absent, present, within_s)
                if isinstance(reached, str):
                    figures["failed"] = reached
                    break
                found.append((reached[0] - when, reached[1] - when))
            if found:
                for position, name in enumerate(("first_reader_s", "all_readers_s")):
                    times_s = [times[position] for times in found]
                    figures[name] = [round(statistics.median(times_s), 2), round(max(times_s), 2)]

    def steady(self, phase: str, seconds: float) -> None:
        with self.watched(phase):
            time.sleep(seconds)

    def sizes(self) -> None:
        _, table = self.front("tables")
        packed = encode_table(table)
        self.found["table"] = {
            "epoch": table.epoch,
            "seats": len(table.seats),
            "bytes": len(packed),
            "encode_ms": round(1e3 * _median_s(lambda: encode_table(table)), 2),
            "decode_ms": round(1e3 * _median_s(lambda: decode_table(packed)), 2),
        }
        info: Any = self.store.info()
        self.found["memory"] = {
            "redis_mb": round(info["used_memory"] / 1e6, 1),
            "redis_clients": info["connected_clients"],
            "scheduler_mb": round(self.leader.stats.memory_info().rss / 1e6, 1),
        }
        args = self.args
        counts = {"attention": args.attention, "experts": args.experts, "gateway": args.gateways, "scheduler": 2}
        for name, by_layer in (("series", False), ("series with --layer-series", True)):
            page = self.leader.page()
            per_role = series_of(page, layers=args.layers, num_experts=args.num_experts, by_layer=by_layer)
            self.found[name] = _series(per_role, counts)
        for name in ("table", "memory", "series", "series with --layer-series"):
            print(name, json.dumps(self.found[name]), flush=True)

    def close(self) -> None:
        for part in (*self.parts, self.front, self.traffic):
            part.close()


def _series(per_role: dict[str, Series], counts: dict[str, int]) -> dict[str, Any]:
    total = sum(per_role[role].count * number for role, number in counts.items())
    found = {role: {"series": per_role[role].count, "scrape_bytes": per_role[role].size} for role in counts}
    return {"total": total, **found}


def _median_s(work: Any) -> float:
    times = []
    for _ in range(20):
        began = time.thread_time()
        work()
        times.append(time.thread_time() - began)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--experts", type=int, default=2000)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--attention", type=int, default=64)
    parser.add_argument("--gateways", type=int, default=8)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--num-experts", type=int, default=128)
    parser.add_argument("--lease", type=float, default=6.0)
    parser.add_argument("--requests-per-s", type=float, default=20.0)
    parser.add_argument("--rows-per-s", type=float, default=100.0, help="that every seat counts for each expert")
    parser.add_argument("--rebalance-after", type=float, default=60.0)
    parser.add_argument("--unpinned", action="store_true", help="workers name no group: the scheduler chooses")
    parser.add_argument("--processes", type=int, default=2, help="that the expert workers share")
    parser.add_argument("--steady-s", type=float, default=20.0)
    parser.add_argument("--times", type=int, default=5, help="single joins and leaves")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with ExitStack() as stack:
        port = free_port()
        server = stack.enter_context(running_redis(str(find_redis_server()), "--port", str(port)))
        url = f"redis://127.0.0.1:{port}/0"
        assert server._process is not None
        shape = FleetShape(
            url=url,
            namespace="expertmesh",
            lease_s=args.lease,
            layers=args.layers,
            num_experts=args.num_experts,
            groups=args.groups,
            pinned=not args.unpinned,
            rows_per_s=args.rows_per_s,
        )
        folder = Path(tempfile.mkdtemp(prefix="fleet"))
        print(f"logs in {folder}", flush=True)
        options = ["--lease", str(args.lease), "--expert-groups", str(args.groups)]
        options += ["--rebalance-after", str(args.rebalance_after)]
        schedulers = [Scheduler(url, options, folder / f"scheduler-{number}.log") for number in range(2)]
        for scheduler in schedulers:
            stack.callback(scheduler.close)
        time.sleep(5)
        fleet = Fleet(args, shape, schedulers, server._process.pid)
        stack.callback(fleet.close)
        _measure(fleet, args)
        if args.json:
            args.json.write_text(
                json.dumps({"arguments": {k: str(v) for k, v in vars(args).items()}, **fleet.found}, indent=1)
            )


def _measure(fleet: Fleet, args: argparse.Namespace) -> None:
    fleet.front("follow", args.attention)
    fleet.traffic("serve", args.attention, args.gateways, args.requests_per_s)
    time.sleep(3)
    with fleet.watched("idle"):
        time.sleep(3)
    few = max(1, args.experts // 20)
    fleet.change("start", "start", args.experts, within_s=400)
    fleet.steady("steady", args.steady_s)
    fleet.change("join", "start", 1, args.times)
    fleet.change("leave", "leave", 1, args.times)
    fleet.change("join 5 %", "start", few)
    fleet.change("leave 5 %", "leave", few)
    fleet.change("death 5 %", "kill", few)
    fleet.sizes()
    for part in fleet.parts:
        if failed := part("failed", 0)[1]:
            print("failed:", failed)
    for part in (fleet.front, fleet.traffic):
        if failed := part("failed"):
            print("failed:", failed)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
