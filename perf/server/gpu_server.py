"""A whole server between GPUs: recorded answers over REST while replicas are killed, leave and join. Prints as it goes.

    PYTHONPATH=.:kernels:tests python3 perf/server/gpu_server.py [--gpus 4] [--attention 2] [--experts 6] [--groups 1]
        [--kills 20] [--settle] [--limit 150] [--out DIR]     (--device cpu --shared host --lane tcp: on any machine)

One process per role, as a user starts them: Redis, gateway, scheduler, attention workers on GPUs of their own, expert
workers on the rest in turn. An attention worker uses one seat of a group at a time, by its number: other seats of that
GPU wait without work, and one death is followed by the next before a process can start. With ``--colocated N`` there
are N attention workers with seats of their own instead, on a GPU each, which nobody disturbs unless ``--kills``. Exit
code 1: an answer was lost or changed, or no step went through shared memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from chaos.faults import Done
from chaos.load import Load, Outcome, faults_of, jobs
from chaos.plan import Event
from chaos.report import gaps_of, longest_of_each_overlap, longest_per_event, quantiles
from testkit.pocket.answers import POCKET, recorded
from testkit.processes.cluster import Cluster, Shape, places
from testkit.processes.servers import Bench, bench

SHARED_S, LEAVE_S, EFFECT_S, CALM_S, DRAIN_S = 60.0, 30.0, 1.0, 2.0, 12.0
LONG_S = 0.06
LAST_S = 40.0
"""Time before the limit that what follows the kills needs."""


@dataclass(kw_only=True)
class Run:
    """One cluster under load, and what was done to it."""

    cluster: Cluster
    options: argparse.Namespace
    began: float = field(default_factory=time.perf_counter)
    done: list[Done] = field(default_factory=list)
    windows: list[tuple[str, float, float]] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        return float(self.options.until) - time.monotonic()

    def say(self, text: str, **figures: object) -> None:
        shown = ", ".join(f"{name} {value}" for name, value in figures.items())
        print(f"{time.perf_counter() - self.began:7.1f} s  {text}{': ' if shown else ''}{shown}", flush=True)

    async def go(self) -> bool:
        await asyncio.to_thread(self.cluster.start)
        self.say("every worker is there")
        await self._shared(len(self.cluster.of("experts") or self._attending))
        load = Load(url=self.cluster.server.url, streams=self.options.streams)
        wanted = jobs(recorded(), 1, shortest=16, longest=48)
        cold = await load.undisturbed(wanted)
        self._report("first answers, kernels compiled on the way", cold)
        quiet = await load.undisturbed(wanted)
        self._report("undisturbed", quiet)
        over, start = asyncio.Event(), time.perf_counter()
        loading = asyncio.create_task(load.run(wanted, 1, over.is_set))
        await asyncio.sleep(CALM_S)
        try:
            await self._disturb()
        finally:
            over.set()
            outcomes = await loading
        self._report("disturbed", outcomes)
        return self._judge([*cold, *quiet, *outcomes], outcomes, start)

    async def _disturb(self) -> None:
        """Kills of whoever serves longest, as fast as others can take its place; with all there a leave and a join."""
        workers = self.cluster.of("experts") or self._attending
        for kill in range(self.options.kills):
            if self.left_s < (DRAIN_S if self.options.only_kills else LAST_S):
                break
            await self._kill("kill experts", workers[kill % len(workers)])
            if self.options.settle and self.left_s > LAST_S / 2:
                await asyncio.to_thread(self.cluster.wait_whole, self.left_s - LAST_S / 2)
            await self._shared(len(workers) if self.options.settle else min(2 * self.options.groups, len(workers)))
        if self.options.colocated:
            await self._window("calm", CALM_S * 5)
        if self.options.only_kills or self.options.colocated:
            return
        if self.left_s > LAST_S / 2:
            await asyncio.to_thread(self.cluster.wait_whole, max(1.0, self.left_s - LAST_S / 2))
            await self._shared(len(workers))
            await self._replace(workers[-1])
        if self.left_s > LAST_S / 3:
            await self._kill("kill attention", self.cluster.of("attention")[0])

    async def _kill(self, kind: str, name: str) -> None:
        at = time.perf_counter()
        self._note(kind, name, at)
        await asyncio.to_thread(self.cluster.kill9, name)
        await asyncio.to_thread(self.cluster.start_one, name)
        await asyncio.sleep(EFFECT_S + random.random() / 4)

    async def _replace(self, name: str) -> None:
        """End ``name`` by SIGTERM and start another worker; measure latencies before, during and after."""
        await self._window("calm", CALM_S)
        at, proc = time.perf_counter(), self.cluster.members[name].proc
        assert proc is not None
        self.cluster.terminate(name)
        self._note("leave experts", name, at)
        code = await asyncio.to_thread(proc.popen.wait, LEAVE_S)
        self.say(f"{name} left", exit=code, seconds=round(time.perf_counter() - at, 2))
        self.windows.append(("a leave", at, time.perf_counter()))
        at = time.perf_counter()
        await asyncio.to_thread(self.cluster.start_one, name)
        await asyncio.to_thread(self.cluster.wait_whole, max(1.0, self.left_s - LAST_S / 4))
        await self._shared(len(self.cluster.of("experts")))
        self.windows.append(("a join", at, time.perf_counter()))
        self.say(f"{name} is back", seconds=round(time.perf_counter() - at, 1))
        await self._window("after the join", CALM_S)

    async def _window(self, what: str, seconds: float) -> None:
        at = time.perf_counter()
        await asyncio.sleep(seconds)
        self.windows.append((what, at, time.perf_counter()))

    def _note(self, kind: str, name: str, at: float) -> None:
        self.say(f"{kind} {name}")
        self.done.append(Done(event=Event(at=at, kind=kind, target=name), target=name, began=at, ended=at))

    async def _shared(self, seats: int) -> None:
        """Wait until each attention worker shares memory with ``seats`` seats."""
        began = time.perf_counter()
        until = began + min(SHARED_S, max(1.0, self.left_s - 10))
        wanted = seats if self.options.shared != "off" else 0
        if self.options.colocated and self.options.gpus == 1:  # each with its own seat alone
            wanted = min(wanted, 1)
        while min(found := await asyncio.to_thread(self._count, "shared_seats")) < wanted:
            if time.perf_counter() > until:
                break
            await asyncio.sleep(0.1)
        self.say("memory is shared", seats=found, wanted=seats, waited_s=round(time.perf_counter() - began, 1))

    @property
    def _attending(self) -> list[str]:
        return self.cluster.of("attention") or self.cluster.of("colocated")

    def _report(self, what: str, outcomes: list[Outcome]) -> None:
        first, between = gaps_of(outcomes, 0.0)
        figures = {
            "answers": len(outcomes), "wrong": dict(faults_of(outcomes)),
            "inter_token_ms": quantiles([end - begin for begin, end in between]),
            "first_token_ms": quantiles([end - begin for begin, end in first]),
            "shared_steps": self._count("shared_steps_total"), "again": self._count("repeated_steps_total"),
            "steps": self._count("engine_steps_total"), "by_graph": self._count("graph_steps_total"),
            "ahead": self._count("steps_ahead_total"), "seats_busy_s": self._busy(),
        }  # fmt: skip
        self.results[what] = figures
        self.say(what, **figures)
        for outcome in [outcome for outcome in outcomes if outcome.fault][:5]:
            self.say(str(outcome.fault))

    def _count(self, series: str) -> list[int]:
        """The counter of each attention worker since its start."""
        return [int(self.cluster.metric(name, f"expertmesh_{series}")) for name in self._attending]

    def _busy(self) -> dict[str, float]:
        """Busy seconds of each seat since its start, those in steps by shared memory, too."""
        holding = self.cluster.of("experts") or self.cluster.of("colocated")
        return {name: round(self.cluster.metric(name, "expertmesh_experts_busy_seconds_total"), 2) for name in holding}

    def _judge(self, everything: list[Outcome], outcomes: list[Outcome], start: float) -> bool:
        _, between = gaps_of(outcomes, 0.0)
        events = longest_per_event(self.done, between, 0.0, EFFECT_S)
        for event in events:
            event["at_s"] = round(event["at_s"] - start, 2)
            self.say("longest gap", **event)
        kills = sorted(event["longest_gap_ms"] for event in events if event["kind"] == "kill experts")
        self.say("longest gaps after kills of a replica, ms", kills=kills)
        for begin, end in longest_of_each_overlap(between, LONG_S):
            clock = datetime.fromtimestamp(time.time() - time.perf_counter() + begin, UTC)  # as in the logs
            self.say(
                "a long gap",
                at_s=round(begin - start, 2),
                clock=f"{clock:%T.%f}"[:-3],
                ms=round(1e3 * (end - begin), 1),
            )
        for kind in sorted({kind for kind, _, _ in self.windows}):
            spans = [(begin, end) for of, begin, end in self.windows if of == kind]
            inside = [b - a for a, b in between if any(begin <= a and b <= end for begin, end in spans)]
            self.results[kind] = {"tokens": len(inside)} | quantiles(inside)
            self.say(f"inter-token latency, {kind}, ms", **self.results[kind])
        self.results |= {"events": events, "kills_ms": kills, "faults": dict(faults_of(everything))}
        counted = [self.results[what]["shared_steps"] for what in ("undisturbed", "disturbed")]
        shared = self.options.shared == "off" or any(map(any, counted))
        good = not faults_of(everything) and shared
        self.say("verdict", good=good, answers=len(everything), faults=dict(faults_of(everything)), shared=shared)
        return good


def special(options: argparse.Namespace, name: str) -> dict[str, object]:
    """Settings of one worker: each has the next GPU, and links are as asked for."""
    role, _, number = name.partition("-")
    if role not in ("attention", "experts", "colocated"):
        return {}
    gpu = int(number)
    if role == "experts":
        gpu = options.attention + gpu % max(1, options.gpus - options.attention)
    link = {"fabric_shared": options.shared}
    if role != "colocated":
        link["fabric_lane"] = options.lane
    batch: dict[str, object] = {}
    if role != "experts":
        batch = {"max_num_seqs": options.streams, "max_num_batched_tokens": 512}
        batch |= {"enforce_eager": options.eager}
    device = options.device if options.device == "cpu" else f"{options.device}:{gpu}"
    return {"device": device, **link, **batch}


def give_up(stage: Bench, out: Path | None) -> None:
    print("TIME IS UP", flush=True)
    keep_logs(stage, out, show=True)
    os._exit(3)  # roles end with this process


def keep_logs(stage: Bench, out: Path | None, *, show: bool) -> None:
    logs = [(f"--- {proc.name} (pid {proc.pid}, exit {proc.popen.poll()})\n", proc.log()) for proc in stage.procs]
    if out is not None:
        (out / "logs.txt").write_text("".join(head + text[-300_000:] for head, text in logs))
    for head, text in logs:
        if show or "Traceback" in text:
            print(head, text[-2500:], flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", type=int, default=2)
    parser.add_argument("--experts", type=int, default=6, help="more than GPUs: those that wait take places at once")
    parser.add_argument("--colocated", type=int, default=0, help="so many with both instead")
    parser.add_argument("--gpus", type=int, default=4, help="the first ones are the attention workers'")
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--only-kills", action="store_true", help="nobody leaves, and no attention worker dies")
    parser.add_argument("--settle", action="store_true", help="the next kill comes when all are there again")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--limit", type=float, default=150, help="seconds after which all ends")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shared", default="auto")
    parser.add_argument("--lane", default="auto")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs, and no step ahead of another")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.until = time.monotonic() + options.limit
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    separate = 0 if options.colocated else 1
    shape = Shape(
        attention=separate * options.attention, experts=separate * options.experts, groups=options.groups,
        colocated=options.colocated, schedulers=1, lease_s=6.0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, bench(Path(folder)) as stage, places(False) as place:
        timer = threading.Timer(options.limit, give_up, (stage, options.out))
        timer.daemon = True
        timer.start()
        cluster = Cluster(stage, place, POCKET / "model", shape, lambda name: special(options, name))
        run = Run(cluster=cluster, options=options)
        good = False
        try:
            good = asyncio.run(run.go())
        finally:
            keep_logs(stage, options.out, show=not good)
            if options.out:
                (options.out / "gpu_server.json").write_text(json.dumps(run.results, indent=1, default=str))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
