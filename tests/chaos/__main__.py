"""``python -m chaos``; ``make chaos`` calls it. Exit code 1: the history of what clients saw breaks a rule of
:mod:`chaos.checker`: say, a request was lost, a token doubled, an answer changed, or clients were refused for long."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from testkit.pocket.answers import POCKET, recorded
from testkit.processes.background import ended
from testkit.processes.cluster import Cluster, Shape, deployed
from testkit.processes.iproute import delay_obstacle, obstacle

from bench.pictures import missing
from chaos.checker import Bounds, check
from chaos.clients import KeyedLoad
from chaos.faults import Faults
from chaos.history import History
from chaos.kills import AWAY_S, kill_replicas
from chaos.load import Job, Load, Outcome, faults_of, jobs
from chaos.picture import timeline
from chaos.plan import KINDS, NEED_CABLES, Kind, planned
from chaos.report import conclude, report, summary

PROGRESS_S = 10.0
MEMBERS = ("attention", "experts", "groups", "gateways")
"""Options that say how many there are."""
SILENCE_LEASES = 5
"""A client that hears nothing for so long goes to another gateway."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="chaos", description="Kill and cut a deployment under load.")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: %(default)s)")
    parser.add_argument("--every", type=float, default=10.0, metavar="S", help="between events (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the plan and the load (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=128, help="concurrent clients (default: %(default)s)")
    parser.add_argument(
        "--longest", type=int, default=16, metavar="N", help="tokens of an answer (default: %(default)s)"
    )
    parser.add_argument("--least-requests", type=int, metavar="N", help="fewer is a failure (default: 500 a minute)")
    parser.add_argument("--attention", type=int, default=2, metavar="N", help="workers (default: %(default)s)")
    parser.add_argument("--experts", type=int, default=4, metavar="N", help="workers (default: %(default)s)")
    parser.add_argument("--groups", type=int, default=2, metavar="N", help="shard groups (default: %(default)s)")
    parser.add_argument(
        "--lease", type=float, default=3.0, metavar="S", help="how long a silent one is believed (default: %(default)s)"
    )
    parser.add_argument("--gateways", type=int, default=2, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--kinds", type=_kinds, default=KINDS, metavar="A,B", help=f"kinds of events (default: {','.join(KINDS)})"
    )
    parser.add_argument(
        "--refused-share", type=float, default=0.25, metavar="X", help="of requests, at most (default: %(default)s)"
    )
    parser.add_argument(
        "--refused-leases",
        type=float,
        default=5.0,
        metavar="X",
        help="one client in a row, at most (default: %(default)s)",
    )
    parser.add_argument(
        "--gap-leases", type=float, default=5.0, metavar="X", help="beyond faults, at most (default: %(default)s)"
    )
    parser.add_argument(
        "--kills", type=int, metavar="N", help="kill an expert worker N times instead, whole in between"
    )
    parser.add_argument("--most-gap", type=float, metavar="S", help="a longer gap after a kill is a failure")
    parser.add_argument("--here", action="store_true", help="plain processes even where namespaces are possible")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--history", type=Path, metavar="FILE", help="keep what clients saw there, as JSON lines")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the timeline there")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the processes' logs there")
    options = parser.parse_args(argv)
    if options.svg and (sentence := missing()):
        parser.error(sentence)
    return options


def _kinds(text: str) -> list[Kind]:
    known = {str(kind): kind for kind in KINDS}
    if unknown := [name for name in text.split(",") if name not in known]:
        raise argparse.ArgumentTypeError(f"no such kinds: {', '.join(unknown)}; there are {', '.join(KINDS)}")
    return [known[name] for name in text.split(",")]


class Clock:
    """Lines on stdout with the seconds since :meth:`begin`."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    def begin(self) -> None:
        self.start = time.perf_counter()

    def say(self, line: str) -> None:
        print(f"{time.perf_counter() - self.start:7.1f} s  {line}", flush=True)


async def run(cluster: Cluster, history: History, options: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    """Undisturbed answers, then the same under fire; the figures."""
    calm = Load(url=cluster.server.url, streams=options.streams)
    wanted = jobs(recorded(), options.seed, longest=options.longest)
    quiet = await calm.undisturbed(wanted)
    if faults := faults_of(quiet):
        raise SystemExit(f"undisturbed answers are not the recorded ones: {dict(faults)}")
    clock.say(f"{len(quiet)} undisturbed answers equal the recorded ones")
    urls = [server.url for server in cluster.servers]
    load = KeyedLoad(url=urls[0], urls=urls, streams=options.streams, history=history, texts=calm.texts)
    load.silence_s = SILENCE_LEASES * options.lease
    load.expect(quiet)
    faults_made = Faults(cluster=cluster, log=clock.say, history=history)
    if options.kills:
        faults_made.backoff_s = AWAY_S
    clock.begin()
    background = [asyncio.create_task(faults_made.restart()), asyncio.create_task(_progress(load, clock))]
    try:
        if options.kills:
            outcomes = await kill_replicas(cluster, load, wanted, faults_made, options)
        else:
            outcomes = await _under_fire(cluster, load, wanted, faults_made, options, clock)
        await asyncio.to_thread(cluster.wait_whole)
    finally:
        await ended(background)
    effect_s = AWAY_S if options.kills else math.inf
    figures = report(outcomes, quiet, faults_made.done, faults_made.exits, clock.start, effect_s)
    found, allowed = check(history.lines()), bounds(options)
    for outcome in outcomes:
        if outcome.fault:
            clock.say(outcome.fault)
    return _setting(options) | figures | {"history": found.figures(allowed), "too_bad": found.over(allowed)}


def bounds(options: argparse.Namespace) -> Bounds:
    return Bounds(
        refused_share=options.refused_share,
        refused_s=options.refused_leases * options.lease,
        gap_s=options.gap_leases * options.lease,
    )


async def _under_fire(
    cluster: Cluster, load: Load, wanted: list[Job], faults: Faults, options: argparse.Namespace, clock: Clock
) -> list[Outcome]:
    seconds = 60 * options.minutes
    cabled = cluster.members["redis"].cable is not None
    kinds = [kind for kind in options.kinds if cabled or kind not in NEED_CABLES]
    if left_out := [kind for kind in options.kinds if kind not in kinds]:
        clock.say(f"NOT MADE, because that takes hosts of their own: {', '.join(left_out)}")
    roles = {member.role for member in cluster.members.values()}
    members = {role: cluster.of(role) for role in sorted(roles)}
    events = planned(options.seed, seconds=seconds, every_s=options.every, kinds=kinds, members=members)
    if unplanned := [kind for kind in kinds if kind not in {event.kind for event in events}]:
        clock.say(f"NOT MADE, because the run is short: {', '.join(unplanned)}")
    following = asyncio.create_task(faults.follow(events, clock.start))
    try:
        outcomes = await load.run(wanted, options.seed, lambda: time.perf_counter() > clock.start + seconds)
        await following
    finally:
        await ended([following])
    return outcomes


async def _progress(load: Load, clock: Clock) -> None:
    while True:
        await asyncio.sleep(PROGRESS_S)
        faults = faults_of(load.outcomes)
        clock.say(f"{len(load.outcomes)} answers, {load.in_flight} under way, wrong: {dict(faults) or 'none'}")


def _setting(options: argparse.Namespace) -> dict[str, Any]:
    names = ("seed", "minutes", "every", "streams", "longest", *MEMBERS, "lease", "kills")
    return {"setting": {name: getattr(options, name) for name in names}}


def verdict(figures: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """Why the run failed; empty if it did not."""
    reasons = [f"{figures[kind]} {kind}" for kind in ("lost", "doubled", "changed") if figures[kind]]
    reasons += figures["too_bad"]
    usual = 0 if options.kills else int(500 * options.minutes)
    least = usual if options.least_requests is None else options.least_requests
    if figures["requests"] < least:
        reasons.append(f"{figures['requests']} requests are fewer than {least}")
    reasons += [f"{found['name']} ended by itself with {found['code']}" for found in figures["ended_by_themselves"]]
    longest = max((event["longest_gap_ms"] for event in figures["events"]), default=0.0) / 1e3
    if options.most_gap is not None and longest > options.most_gap:
        reasons.append(f"a gap of {longest:.3f} s is longer than {options.most_gap:g} s")
    return reasons


def hosts(options: argparse.Namespace) -> bool:
    """Whether members get hosts of their own; says why not."""
    reason = "--here" if options.here else obstacle() or delay_obstacle()
    if reason is not None:
        print(f"plain processes on one host, so NO CABLE IS CUT, DELAYED OR LOSSY: {reason}", flush=True)
    return reason is None


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    shape = Shape(lease_s=options.lease, **{name: getattr(options, name) for name in MEMBERS})
    clock = Clock()
    with deployed(POCKET / "model", shape, options.logs, network=hosts(options)) as cluster:
        clock.say("everything is up")
        with History(options.history or cluster.stage.folder / "history.jsonl") as history:
            figures = asyncio.run(run(cluster, history, options, clock))
    files = {options.json: json.dumps(figures), options.svg: timeline(figures)}
    return conclude(summary(figures), verdict(figures, options), files)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what it started ends with it
    sys.exit(main())
