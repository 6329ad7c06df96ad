"""``python -m abuse.pauses``: each role stopped (SIGSTOP) for 3, 8 and 30 seconds under load, and let go again.

The pocket model's recorded answers are asked for all the while (:mod:`chaos.load`). Clients come again as SDKs do:
after 429 and 503 when Retry-After says, and soon where a connection broke before anything came; what has begun
has to go on. Exit code 1: an answer was lost, doubled or changed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chaos.faults import Done, Faults
from chaos.load import TRY_AGAIN, Load, faults_of, jobs
from chaos.plan import Event
from chaos.report import conclude, report, summary
from testkit.pocket.answers import MAX_TOKENS, POCKET, recorded
from testkit.processes.background import ended
from testkit.processes.cluster import Cluster, Shape, deployed
from testkit.processes.servers import stopped

from abuse.kit.child import share_paths
from abuse.table import as_json, as_markdown, setting
from loadgen.client import StreamResult

ROLES = ("gateway", "scheduler", "attention", "experts", "redis")
SECONDS = (3.0, 8.0, 30.0)
LEASE_S = 6.0
_MAX_SHOWN = 20
_SHORTEST = 32
"""Tokens of an answer: with so many clients a pause finds more of them under way than can end within a lease."""
_LONGEST_WAIT_S = 120.0


class PatientLoad(Load):
    """Whose clients keep to Retry-After."""

    def pause_s(self, result: StreamResult) -> float | None:
        if result.status not in (0, *TRY_AGAIN) or result.chunk_times:
            return None
        return min(_LONGEST_WAIT_S, result.retry_after or 0.5) * random.uniform(1, 1.2)


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
            with stopped(cluster.members[name].running.pid):
                await asyncio.sleep(seconds)
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
    shape = Shape(attention=2, experts=2, groups=1, schedulers=2, lease_s=LEASE_S)
    with deployed(POCKET / "model", shape, options.logs) as cluster:
        figures = asyncio.run(run(cluster, options))
    wrong = [f"{figures[kind]} {kind}" for kind in ("lost", "doubled", "changed") if figures[kind]]
    lines = [*table(figures), *summary(figures)[:3]]
    return conclude(lines, wrong, {options.json: as_json(setting({}) | figures)})


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what it started ends with it
    sys.exit(main())
