"""``python -m abuse.pauses``: each role stopped (SIGSTOP) for 3, 8 and 30 seconds under load, and let go again.

The pocket model's recorded answers are asked for all the while (:mod:`chaos.load`). Clients come again as SDKs do:
after 429 and 503 when Retry-After says, and soon where a connection broke before anything came; what has begun
has to go on. Exit code 1: an answer was lost, doubled or changed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from chaos.faults import Done, Faults
from chaos.load import Job, Load, Outcome, faults_of, jobs
from chaos.plan import Event
from chaos.report import report, summary
from testkit.pocket.answers import MAX_TOKENS, POCKET, recorded
from testkit.processes.background import ended
from testkit.processes.cluster import Cluster, Here, Shape
from testkit.processes.servers import bench

from abuse.kit.child import share_paths
from abuse.table import as_markdown, setting, write
from loadgen.client import StreamResult, stream_completion

ROLES = ("gateway", "scheduler", "attention", "experts", "redis")
SECONDS = (3.0, 8.0, 30.0)
LEASE_S = 6.0
_MAX_SHOWN = 20
_SHORTEST = 32
"""Tokens of an answer: with so many clients a pause finds more of them under way than can end within a lease."""
_AGAIN, _GIVEN_UP_S, _LONGEST_WAIT_S = (429, 503), 300.0, 120.0


class PatientLoad(Load):
    """Whose clients keep to Retry-After."""

    async def _one(self, session: aiohttp.ClientSession, job: Job) -> Outcome:
        refused, until = 0, time.perf_counter() + _GIVEN_UP_S
        while True:
            result = StreamResult(started=time.perf_counter())
            try:
                result = await stream_completion(session, self.url, job.body)
            except (aiohttp.ClientError, TimeoutError) as error:
                result.error = f"{type(error).__name__}: {error}"
            unbegun = result.status in (0, *_AGAIN) and not result.chunk_times
            if not unbegun or time.perf_counter() > until:
                return Outcome(job=job, result=result, refused=refused)
            refused += 1
            await asyncio.sleep(min(_LONGEST_WAIT_S, result.retry_after or 0.5) * random.uniform(1, 1.2))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="abuse.pauses", description="Stop each role under load, and let it go again.")
    parser.add_argument("--streams", type=int, default=400, help="concurrent clients (default: %(default)s)")
    parser.add_argument("--role", action="append", choices=ROLES, help="only these (repeatable)")
    parser.add_argument("--seconds", action="append", type=float, help="only these pauses (repeatable)")
    parser.add_argument("--seed", type=int, default=1, help="of the load (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the processes' logs there")
    return parser.parse_args(argv)


async def run(cluster: Cluster, options: argparse.Namespace) -> dict[str, Any]:
    """Undisturbed answers, then the same while one after the other stands still; the figures."""
    load = PatientLoad(url=cluster.server.url, streams=options.streams)
    wanted = jobs(recorded()[:240], options.seed, shortest=_SHORTEST, longest=MAX_TOKENS)
    quiet = await load.undisturbed(wanted)
    if faults := faults_of(quiet):
        raise SystemExit(f"undisturbed answers are not the recorded ones: {dict(faults)}")
    print(f"{len(quiet)} undisturbed answers equal the recorded ones", flush=True)
    over, start = asyncio.Event(), time.perf_counter()
    faults_made = Faults(cluster=cluster, log=lambda line: print(line, flush=True))
    restarting = asyncio.create_task(faults_made.restart())
    loading = asyncio.create_task(load.run(wanted, options.seed, over.is_set))
    try:
        done = await _pauses(cluster, load, options, start)
        over.set()
        outcomes = await loading
    finally:
        await ended([loading, restarting])
    for outcome in [outcome for outcome in outcomes if outcome.fault][:_MAX_SHOWN]:
        print(f"{outcome.result.started - start:7.1f} s  {outcome.fault}"[:160], flush=True)
    return report(outcomes, quiet, done, faults_made.exits, start)


async def _pauses(cluster: Cluster, load: Load, options: argparse.Namespace, start: float) -> list[Done]:
    done: list[Done] = []
    for seconds in options.seconds or SECONDS:
        for role in options.role or ROLES:
            await asyncio.sleep(3)
            name = await _member(cluster, role)
            began = time.perf_counter()
            await _stopped(cluster, name, seconds)
            event = Event(at=began - start, kind=f"stop {role} {seconds:g} s", target=name)  # type: ignore[arg-type]
            done.append(Done(event=event, target=name, began=began, ended=time.perf_counter()))
            await asyncio.to_thread(cluster.wait_whole)
            wrong = dict(faults_of(load.outcomes)) or "none"
            whole_s = time.perf_counter() - done[-1].ended
            what = f"{name} stood still for {seconds:g} s; whole after {whole_s:.1f} s; wrong: {wrong}"
            print(f"{began - start:7.1f} s  {what}", flush=True)
    await asyncio.sleep(3)
    return done


async def _member(cluster: Cluster, role: str) -> str:
    """The one of that role that has most to lose."""
    if role == "scheduler":
        return await asyncio.to_thread(cluster.leader) or cluster.of(role)[0]
    return cluster.of(role)[0]


async def _stopped(cluster: Cluster, name: str, seconds: float) -> None:
    proc = cluster.members[name].proc
    assert proc is not None
    os.kill(proc.pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        os.kill(proc.pid, signal.SIGCONT)


def table(figures: dict[str, Any]) -> list[str]:
    rows = [("pause", "at s", "longest wait ms", "before it ms")]
    rows += [
        (e["kind"], f"{e['at_s']:.0f}", f"{e['longest_gap_ms']:.0f}", f"{e['before_ms']:.0f}")
        for e in figures["events"]
    ]
    return as_markdown(rows)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    share_paths()
    with tempfile.TemporaryDirectory(prefix="expertmesh-pauses-") as folder:
        logs = options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        with bench(logs.resolve()) as stage:
            shape = Shape(attention=2, experts=2, groups=1, schedulers=2, lease_s=LEASE_S)
            cluster = Cluster(stage, lambda name: Here(name=name), POCKET / "model", shape)
            cluster.start()
            figures = asyncio.run(run(cluster, options))
    wrong = [f"{figures[kind]} {kind}" for kind in ("lost", "doubled", "changed") if figures[kind]]
    print(
        "\n".join([*table(figures), *summary(figures)[:3], f"FAILED: {'; '.join(wrong)}" if wrong else "passed"]),
        flush=True,
    )
    if options.json is not None:
        write(options.json, setting({}) | figures)
    return 1 if wrong else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what it started ends with it
    sys.exit(main())
