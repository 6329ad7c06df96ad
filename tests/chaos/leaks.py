"""``python -m chaos.leaks``; ``make leaks`` calls it. A deployment answers clients for an hour, those among them that
leave, send rubbish or ask again. Exit code 1: what a process holds grew with the number of requests, or was not given
back when they ended."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import signal
import statistics
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import psutil
import redis
from testkit.pocket.answers import POCKET, recorded
from testkit.processes.background import ended
from testkit.processes.cluster import Cluster, Shape, deployed

from chaos.load import Job, Load, Outcome, faults_of, jobs
from chaos.report import conclude

MIB = 2**20
MEMORY_MIB, MEMORY_SHARE = 4.0, 0.03
"""Growth of memory from the second quarter of a run to the last that counts as none: allocators keep what is free."""
FEW = {"descriptors": 8, "threads": 1, "keys": 8}
"""More of these after the load, at rest, than before it, that count as none: pools keep a connection or two."""
WARM_UP_S = 20.0
"""Of the same load, before the first look: pools of connections and threads reach their size."""
REST_LIMIT_S = 120.0
"""Until the records of ended requests are forgotten: five leases, and what sweeps them."""
Amounts = dict[str, float]


@dataclass(kw_only=True, slots=True)
class Series:
    """What one process held under the load, at even times; ``before`` and ``after`` it, at rest."""

    before: Amounts
    after: Amounts = field(default_factory=dict)
    samples: list[Amounts] = field(default_factory=list)

    def growth(self) -> list[str]:
        """Return a sentence for each amount that grew under the load, or stayed after it."""
        quarter = len(self.samples) // 4
        memory = [held["memory"] for held in self.samples]
        first, last = statistics.median(memory[quarter : 2 * quarter]), statistics.median(memory[-quarter:])
        found = []
        if last - first > MEMORY_MIB + MEMORY_SHARE * first:
            found.append(f"memory grew from {first:.1f} to {last:.1f} MiB")
        for name, few in FEW.items():
            if name in self.before and self.after[name] > self.before[name] + few:
                found.append(f"{self.after[name]:.0f} {name} stayed of {self.before[name]:.0f} before")
        return found


def held_by(pid: int) -> Amounts:
    """Memory in MiB, descriptors and threads of a process and its children."""
    process = psutil.Process(pid)
    family = [process, *process.children(recursive=True)]
    return {
        "memory": sum(each.memory_info().rss for each in family) / MIB,
        "descriptors": sum(each.num_fds() for each in family),
        "threads": sum(each.num_threads() for each in family),
    }


def look(cluster: Cluster) -> dict[str, Amounts]:
    """What each process of the deployment holds now; of Redis the memory that it uses and its keys,
    but for those of idempotency, which stay for a day."""
    found = {}
    for name, member in cluster.members.items():
        found[name] = held_by(member.running.pid)
    with redis.Redis.from_url(cluster.redis_url) as client:
        facts: Any = client.info("memory")
        keys = [key for key in client.scan_iter(count=1000) if b":idem:" not in key]
        found["redis"] |= {"memory": facts["used_memory"] / MIB, "keys": len(keys)}
    return found


@dataclass(kw_only=True, slots=True)
class Rude:
    """Clients that do not behave; each turn is another of ``KINDS``. ``wrong``: answers that are not what they ask."""

    KINDS: ClassVar = ("leaves_at_once", "leaves_early", "sends_rubbish", "is_lost", "wants_two", "asks_again")
    url: str
    job: Job
    turns: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    async def run(self) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
            for kind in itertools.cycle(self.KINDS):
                try:
                    await getattr(self, kind)(session)
                except (aiohttp.ClientError, TimeoutError) as error:
                    self.wrong.append(f"{kind}: {type(error).__name__}: {error}")
                self.turns[kind] = self.turns.get(kind, 0) + 1

    def _ask(self, session: aiohttp.ClientSession, body: Any, **headers: str) -> Any:
        return session.post(f"{self.url}/v1/completions", json=body, headers=headers)

    def _expect(self, what: str, found: object, wanted: object) -> None:
        if found != wanted:
            self.wrong.append(f"{what}: {found} instead of {wanted}")

    async def leaves_at_once(self, _: aiohttp.ClientSession) -> None:
        host, _, port = self.url.removeprefix("http://").partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps(self.job.body | {"stream": True}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        writer.write(head.encode() + b"\r\n\r\n" + body)
        await writer.drain()
        writer.transport.abort()

    async def leaves_early(self, session: aiohttp.ClientSession) -> None:
        async with self._ask(session, self.job.body | {"stream": True, "max_tokens": 200}) as answer:
            self._expect("leaves early", answer.status, 200)
            await answer.content.readline()
            answer.close()

    async def sends_rubbish(self, session: aiohttp.ClientSession) -> None:
        async with self._ask(session, {"model": "pocket", "prompt": {"no": "text"}}) as answer:
            self._expect("rubbish", answer.status, 400)
            await answer.read()

    async def is_lost(self, session: aiohttp.ClientSession) -> None:
        async with session.get(f"{self.url}/v1/{uuid.uuid4().hex}") as answer:
            self._expect("an unknown path", answer.status, 404)
            await answer.read()

    async def wants_two(self, session: aiohttp.ClientSession) -> None:
        async with self._ask(session, self.job.body | {"n": 2, "stream": True, "temperature": 1}) as answer:
            self._expect("two choices", answer.status, 200)
            self._expect("the end of two choices", (await answer.read()).rstrip().endswith(b"[DONE]"), True)

    async def asks_again(self, session: aiohttp.ClientSession) -> None:
        key = {"Idempotency-Key": uuid.uuid4().hex}
        texts = []
        for _ in range(2):
            async with self._ask(session, self.job.body, **key) as answer:
                self._expect("a request with a key", answer.status, 200)
                texts.append((await answer.json())["choices"][0]["text"])
        self._expect("the second answer", texts[1], texts[0])


async def run(cluster: Cluster, options: argparse.Namespace) -> dict[str, Any]:
    """The load between two rests; what grew, and the figures."""
    await _under_load(cluster, options, WARM_UP_S, {})
    await rest(cluster)
    series = {name: Series(before=held) for name, held in look(cluster).items()}
    outcomes, rude = await _under_load(cluster, options, 60 * options.minutes, series)
    await rest(cluster)
    for name, held in look(cluster).items():
        series[name].after = held
    grown = {name: found for name, each in series.items() if (found := each.growth())}
    processes = {
        name: {"before": each.before, "last": each.samples[-1], "after": each.after} for name, each in series.items()
    }
    return {
        "minutes": options.minutes, "requests": len(outcomes), "faults": dict(faults_of(outcomes)),
        "rude": rude.turns, "wrong": rude.wrong[:20], "processes": processes, "grown": grown,
    }  # fmt: skip


async def _under_load(
    cluster: Cluster, options: argparse.Namespace, seconds: float, series: Mapping[str, Series]
) -> tuple[list[Outcome], Rude]:
    """Answer both kinds of clients for a time; ``series`` gets what their processes hold meanwhile."""
    load = Load(url=cluster.server.url, streams=options.streams)
    wanted = jobs(recorded(), options.seed, longest=16)
    rude = Rude(url=cluster.server.url, job=wanted[0])
    began = time.perf_counter()
    background = [asyncio.create_task(rude.run()), asyncio.create_task(_sample(cluster, series, load, began, options))]
    try:
        return await load.run(wanted, options.seed, lambda: time.perf_counter() > began + seconds), rude
    finally:
        await ended(background)


async def rest(cluster: Cluster) -> None:
    """Waits until Redis forgets no more keys: those of ended requests live for some leases."""
    keys, since, until = -1.0, time.perf_counter(), time.perf_counter() + REST_LIMIT_S
    while time.perf_counter() < min(since + 6 * cluster.shape.lease_s, until):
        if (now := look(cluster)["redis"]["keys"]) != keys:
            keys, since = now, time.perf_counter()
        await asyncio.sleep(1.0)


async def _sample(
    cluster: Cluster, series: Mapping[str, Series], load: Load, began: float, options: argparse.Namespace
) -> None:
    every_s = max(1.0, 60 * options.minutes / 400)
    for count in itertools.count(1):
        await asyncio.sleep(every_s)
        found = await asyncio.to_thread(look, cluster)
        for name, each in series.items():
            each.samples.append(found[name])
        if count % 20 == 0:
            memory = ", ".join(f"{name} {held['memory']:.1f}" for name, held in found.items())
            at = time.perf_counter() - began
            print(f"{at:7.1f} s  {len(load.outcomes)} answers; MiB: {memory}", flush=True)


def summary(figures: Mapping[str, Any]) -> list[str]:
    lines = [f"{figures['requests']} requests in {figures['minutes']:g} minutes, and {figures['rude']}"]
    columns = ("memory", "descriptors", "threads", "keys")
    for name, each in figures["processes"].items():
        amounts = [
            f"{column} {each['before'][column]:.0f}, {each['last'][column]:.0f}, {each['after'][column]:.0f}"
            for column in columns
            if column in each["before"]
        ]
        lines.append(f"{name}: {'; '.join(amounts)}")
    return [*lines, "before, at the end, and at rest afterwards; memory in MiB"]


def verdict(figures: Mapping[str, Any]) -> list[str]:
    """Return why the run failed; nothing if it did not."""
    reasons = [f"{name}: {what}" for name, found in figures["grown"].items() for what in found]
    reasons += [f"{count} answers {kind}" for kind, count in figures["faults"].items()]
    reasons += figures["wrong"]
    if len(figures["rude"]) < len(Rude.KINDS):
        reasons.append(f"of the clients that do not behave only these had a turn: {', '.join(figures['rude'])}")
    return reasons


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="chaos.leaks", description="Watch what a deployment holds under load.")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=16, help="concurrent clients (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the load (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args(argv)
    with deployed(POCKET / "model", Shape(attention=1, experts=2, groups=2, schedulers=1)) as cluster:
        figures = asyncio.run(run(cluster, options))
    return conclude(summary(figures), verdict(figures), {options.json: json.dumps(figures)})


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what it started ends with it
    sys.exit(main())
