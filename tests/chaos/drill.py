"""``python -m chaos.drill``: faults of a bad night, one after the other, on a deployment that Prometheus watches by the
shipped rules. Says which alerts fired after how long, and draws the dashboards of each fault into a folder.

Exit code 1: an alert that a fault is known for did not fire in time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from testkit.fabric import slow
from testkit.kube.prometheus import Prometheus
from testkit.pocket.answers import POCKET
from testkit.processes.cluster import Cluster, Here, Shape
from testkit.processes.servers import bench, free_port, stopped
from testkit.waiting import until

from chaos.tenants import Tenant, key_file

SHAPE = Shape(attention=2, experts=4, groups=4, schedulers=2)
SLOW = "experts-3"
"""The worker whose rows take long once :class:`SlowRows` says so: a seat of a group with large or popular experts."""
CALM_S = 45.0
"""Between two faults, at least: alerts of the one before have ended."""
CALM_LIMIT_S = 300.0
COUNTED_S = 2.5
"""After an answer, until expert workers' pages have its rows."""
_LOOK_S = 1.0
_SITE = """
import os, sys
from pathlib import Path
sys.path.insert(0, os.path.dirname(__file__))
from services.model.experts import ExpertShard
import slow
fast, file = ExpertShard.forward, Path(os.environ["SLOW_ROW_FILE"])
def forward(shard, layer, x, ids, weights):
    row_s = float(file.read_text() or 0)
    return slow.slow(fast.__get__(shard), row_s=row_s)(layer, x, ids, weights)
ExpertShard.forward = forward
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowRows:
    """Experts of one process take as long for each row as a file says; Python runs ``sitecustomize`` as it starts."""

    folder: Path

    @classmethod
    def made(cls, folder: Path) -> SlowRows:
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(_SITE)
        (folder / "slow.py").write_text(Path(slow.__file__).read_text())
        rows = cls(folder=folder)
        rows.take(0.0)
        return rows

    def take(self, seconds: float) -> None:
        part = self.folder / "seconds.part"
        part.write_text(str(seconds))
        part.replace(self.folder / "seconds")

    def environment(self) -> list[str]:
        return ["env", f"PYTHONPATH={self.folder}:{':'.join(sys.path)}", f"SLOW_ROW_FILE={self.folder / 'seconds'}"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Wrapped(Here):
    """This machine, with words before each command."""

    words: tuple[str, ...] = ()

    def command(self, args: Sequence[str]) -> list[str]:
        return [*self.words, *args]


@dataclass(kw_only=True, slots=True)
class Night:
    """The deployment, its clients and what watches it."""

    cluster: Cluster
    rows: SlowRows
    steady: Tenant
    flood: Tenant
    prometheus: Prometheus
    began: float = field(default_factory=time.time)

    def say(self, line: str) -> None:
        print(f"{time.time() - self.began:7.1f} s  {line}", flush=True)

    def alerts(self) -> dict[str, str]:
        """States (pending, firing) by the names of the alerts that are not quiet."""
        found: dict[str, str] = {}
        response = httpx.get(f"{self.prometheus.url}/api/v1/alerts", timeout=10).raise_for_status()
        for alert in response.json()["data"]["alerts"]:
            name = alert["labels"]["alertname"]
            found[name] = "firing" if "firing" in (alert["state"], found.get(name)) else alert["state"]
        return found

    def rows_by_shard(self) -> dict[str, float]:
        """Rows that each expert worker has computed, by its name."""
        return {name: self.cluster.metric(name, "expertmesh_experts_rows_total") for name in self.cluster.of("experts")}


Fault = Callable[[Night], "contextlib.AbstractAsyncContextManager[None]"]


@contextlib.asynccontextmanager
async def shard_killed(night: Night) -> AsyncIterator[None]:
    """The only worker of a shard group is killed and does not come back."""
    night.cluster.kill9("experts-1")
    try:
        yield
    finally:
        night.cluster.start_one("experts-1")
        await asyncio.to_thread(night.cluster.wait_whole)


@contextlib.asynccontextmanager
async def leader_stopped(night: Night) -> AsyncIterator[None]:
    """Both schedulers stand still: their processes are there and do nothing."""
    with contextlib.ExitStack() as stack:
        for name in night.cluster.of("scheduler"):
            stack.enter_context(stopped(night.cluster.members[name].running.pid))
        yield
    await asyncio.to_thread(night.cluster.wait_whole)


@contextlib.asynccontextmanager
async def tenant_floods(night: Night) -> AsyncIterator[None]:
    """One tenant sends far more than the workers can take; the other one goes on as before."""
    async with night.flood.sending(streams=400, prompt_tokens=(64, 256), output_tokens=(64, 200)):
        yield


@contextlib.asynccontextmanager
async def cache_filled(night: Night) -> AsyncIterator[None]:
    """Long answers fill the KV cache, so that sequences wait for blocks or lose theirs."""
    async with night.flood.sending(streams=48, prompt_tokens=(300, 500), output_tokens=(300, 480)):
        yield


@contextlib.asynccontextmanager
async def expert_hot(night: Night) -> AsyncIterator[None]:
    """Prompts whose rows go to few experts, as far as a search over tokens finds them."""
    tokens = await asyncio.to_thread(hot_tokens, night)
    async with night.flood.sending(streams=12, prompt_tokens=(200, 400), output_tokens=(1, 1), tokens=tokens):
        yield


@contextlib.asynccontextmanager
async def shard_slow(night: Night) -> AsyncIterator[None]:
    """A shard group needs more time for its rows than the others, and has the most replicas that it may have."""
    night.rows.take(0.004)
    try:
        async with night.flood.sending(streams=24, prompt_tokens=(16, 64), output_tokens=(32, 64)):
            yield
    finally:
        night.rows.take(0.0)


def hot_tokens(night: Night, tried: int = 30, kept: int = 4) -> list[int]:
    """Tokens whose repetition sends the largest share of rows to one shard group: always the same group."""
    shares: dict[int, dict[str, float]] = {}
    for token in range(20, 20 + tried * 7, 7):
        before = night.rows_by_shard()
        night.flood.send_once([token] * 200, 1)
        time.sleep(COUNTED_S)
        gained = {name: rows - before[name] for name, rows in night.rows_by_shard().items()}
        total = sum(gained.values()) or 1.0
        shares[token] = {name: rows / total for name, rows in gained.items()}
    hottest = max(night.cluster.of("experts"), key=lambda name: max(share[name] for share in shares.values()))
    ranked = sorted(shares, key=lambda token: -shares[token][hottest])[:kept]
    night.say(f"tokens {ranked} send {[round(shares[each][hottest], 2) for each in ranked]} of rows to {hottest}")
    return ranked


@dataclass(frozen=True, kw_only=True, slots=True)
class Drill:
    """``awaited``: alerts that must fire within ``limit_s``; without any, the fault is watched for so long."""

    name: str
    fault: Fault
    awaited: tuple[str, ...]
    limit_s: float


DRILLS = (
    Drill(name="shard-killed", fault=shard_killed, awaited=("ExpertmeshShardWithoutSeat",), limit_s=240),
    Drill(name="leader-stopped", fault=leader_stopped, awaited=("ExpertmeshMetricsAway",), limit_s=240),
    Drill(name="tenant-floods", fault=tenant_floods, awaited=("ExpertmeshQueueOld",), limit_s=420),
    Drill(name="expert-hot", fault=expert_hot, awaited=(), limit_s=300),
    Drill(name="kv-cache-filled", fault=cache_filled, awaited=("ExpertmeshKvCacheFull",), limit_s=1080),
    Drill(name="shard-slow", fault=shard_slow, awaited=("ExpertmeshHotShard",), limit_s=1080),
)


async def hold(night: Night, drill: Drill, pictures: Path | None) -> dict[str, Any]:
    """Make the fault, wait for its alerts, and end it. Returns what happened, in seconds since the fault."""
    quiet = set(night.alerts())
    night.say(f"{drill.name}: {' '.join((drill.fault.__doc__ or '').split())}")
    began = time.time()
    pending: dict[str, float] = {}
    firing: dict[str, float] = {}
    async with drill.fault(night):
        while time.time() - began < drill.limit_s:
            await asyncio.sleep(_LOOK_S)
            for name, state in night.alerts().items():
                if name in quiet:
                    continue
                for seen in (pending,) if state == "pending" else (pending, firing):
                    if name not in seen:
                        seen[name] = round(time.time() - began, 1)
                        night.say(f"  {name} is {state}")
            if drill.awaited and set(drill.awaited) <= set(firing):
                break
        lasted_s = time.time() - began
    ended_at = time.time()
    night.say(f"{drill.name} is over")
    await _calm(night, drill.awaited)
    if pictures is not None:
        await asyncio.to_thread(_draw, night, drill.name, pictures, began - 60, time.time())
    return {
        "fault": drill.name,
        "what": " ".join((drill.fault.__doc__ or "").split()),
        "began": began,
        "lasted_s": round(lasted_s, 1),
        "whole_after_s": round(ended_at - began, 1),
        "quiet_after_s": round(time.time() - ended_at, 1),
        "pending_s": pending,
        "firing_s": firing,
        "missed": sorted(set(drill.awaited) - set(firing)),
    }


async def _calm(night: Night, awaited: Sequence[str]) -> None:
    """Return when those of ``awaited`` have ended. Others may look back upon ten minutes."""
    await asyncio.sleep(CALM_S)
    until_s = time.time() + CALM_LIMIT_S
    while time.time() < until_s and set(awaited) & set(night.alerts()):
        await asyncio.sleep(_LOOK_S)


def _draw(night: Night, name: str, folder: Path, began: float, finished: float) -> None:
    words = ["--prometheus", night.prometheus.url, "--from", f"{began:.0f}", "--to", f"{finished:.0f}"]
    command = [sys.executable, "-m", "services", "dashboards", *words, "--out", str(folder / name)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=300)


@contextlib.contextmanager
def watched(cluster: Cluster, folder: Path) -> Iterator[Prometheus]:
    """Prometheus with the shipped rules, and the pages of all members as one release."""
    targets = [f"127.0.0.1:{port}" for member in cluster.members.values() for port in member.ports.values()]
    web, port = free_port(), free_port()
    words = ["--port", str(web), "--prometheus-port", str(port), "--data", str(folder / "prometheus")]
    command = [sys.executable, "-m", "services", "observe", *words, "--release", "drill", "--target", *targets]
    with (folder / "observe.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        until(lambda: _answers(f"{url}/-/ready"), "Prometheus is ready", limit_s=60, every_s=0.2)
        yield Prometheus(url=url)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url, timeout=2).status_code == 200
    return False


async def run(night: Night, drills: Sequence[Drill], pictures: Path | None) -> list[dict[str, Any]]:
    """All ``drills`` in turn, beside the steady tenant's requests."""
    steady = night.steady.sending(streams=3, prompt_tokens=(8, 64), output_tokens=(8, 32))
    async with steady:
        await asyncio.sleep(CALM_S)
        return [await hold(night, drill, pictures) for drill in drills]


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    drills = [drill for drill in DRILLS if drill.name in (options.only or [each.name for each in DRILLS])]
    with tempfile.TemporaryDirectory(prefix="expertmesh-drill-") as name, bench(Path(name).resolve()) as stage:
        folder = Path(name).resolve()
        tenants = {tenant: f"sk-{secrets.token_hex(12)}" for tenant in ("steady", "flood")}
        keys = key_file(folder / "keys.yaml", tenants)
        rows = SlowRows.made(folder / "slow")
        of_role: dict[str, dict[str, object]] = {
            "gateway": {"auth": "required", "api_keys_file": keys},
            "scheduler": {"autoscale": "on", "max_replicas": 1},
            "attention": {"kv_blocks": 256},
        }
        wrapped = Wrapped(name=SLOW, words=tuple(rows.environment()))
        place = lambda member: wrapped if member == SLOW else Here(name=member)  # noqa: E731
        special = lambda member: of_role.get(member.partition("-")[0], {})  # noqa: E731
        cluster = Cluster(stage, place, POCKET / "model", SHAPE, special)
        cluster.start()
        url = cluster.server.url
        with watched(cluster, folder) as prometheus:
            night = Night(
                cluster=cluster,
                rows=rows,
                steady=Tenant(url=url, key=tenants["steady"], seed=1),
                flood=Tenant(url=url, key=tenants["flood"], seed=2),
                prometheus=prometheus,
            )
            found = asyncio.run(run(night, drills, options.pictures))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    for each in found:
        print(f"{each['fault']:16} {each['firing_s']} quiet {each['quiet_after_s']} s after its end")
    missed = [each["fault"] for each in found if each["missed"]]
    print(f"alerts did not fire: {missed}" if missed else "each alert that was due fired")
    return 1 if missed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="chaos.drill", description="Which alerts fire at which fault, and when.")
    names = [drill.name for drill in DRILLS]
    parser.add_argument("--only", nargs="+", choices=names, help="these faults (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what happened there")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="draw the dashboards of each fault there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
