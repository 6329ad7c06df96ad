"""``python -m abuse.soak``: all attacks that a client can make, one after the other, again and again, next to honest
streams of two other tenants. Exit code 1: a stream ended or changed; p99 between tokens, a probe, memory or anything
that an attack by itself is held to was over its bound, where the gateway's memory has what the warm-up left on top.

Memory is measured as the median of five seconds: the gateway's VmRSS and Redis' ``used_memory``, before the first
attack and after the last one, once answers kept for a retry have ended. The warm-up before it has each client do once
what he may do: streams by the thousand, prompts of a megabyte, scores, and crowds as large as the bounds allow.
What CPython's allocator keeps of such crowds is there then, :data:`KEPT_MIB` at most (``cold`` in the figures: next to
the honest streams alone); what grows afterwards is a leak.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from chaos.report import conclude

from abuse.attack import Attack, Record, Target, execute, look
from abuse.attacks import ATTACKS
from abuse.attacks.readers import stall_option
from abuse.kit.stage import HONEST, Shape, Stage, on_stage
from abuse.kit.tokens import BURST
from abuse.table import as_json, as_markdown, setting, summary

MAX_S, GROWTH, REDIS_SLACK_MIB = 1.0, 0.10, 2.0
"""Redis may have a little more than a tenth above its start, which is 1.3 MiB: a connection's buffers are 20 KB."""
KEEP_S, MEASURE_S = 60, 5.0
"""Answers are kept for a retry for a minute, not for the default hour, so that their release can be seen."""
QUIET_S = KEEP_S + 40.0
"""Kept answers have ended then, and the gateway has looked for memory to give back, which it does each 30 s."""
KEPT_MIB = 150
"""Six warm-ups left 85 to 126 MiB: how much depends on where the last objects of a crowd happen to lie."""
_CROWDS = ("connections: 2,000 full heads", "streams: 4,000 of one tenant", "readers: 400 lists of tokens")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="abuse.soak", description="All attacks again and again next to honest streams."
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="of attacks (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=32, help="honest ones (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=10.0, help="their tokens a second (default: %(default)s)")
    parser.add_argument("--only", action="append", metavar="WORD", help="attacks with that in their names (repeatable)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    return parser.parse_args(argv)


def chosen(words: Sequence[str] | None) -> list[Attack]:
    """Those that a client can make."""
    return [
        attack
        for attack in ATTACKS
        if not attack.alone and (not words or any(word in f"{attack.finding} {attack.name}" for word in words))
    ]


async def warm_up(target: Target) -> None:
    """What clients may do, once."""
    say = {"max_tokens": 20, "ignore_eos": True}
    await asyncio.gather(
        *(
            target.post("/v1/completions", {"prompt": [9] * 50, "stream": True} | say, tenant=tenant)
            for _ in range(1000)
            for tenant in HONEST
        )
    )
    text = "the quick brown fox " * 4_000
    await asyncio.gather(*(target.post("/v1/completions", {"prompt": text} | say, tenant="bob") for _ in range(8)))
    for _ in range(2):
        await target.post("/tokenize", {"prompt": text * 12}, tenant="bob")
    known = {attack.name: attack for attack in ATTACKS}
    for name in _CROWDS:
        async with asyncio.timeout(known[name].bounds.within):
            await known[name].run(target)
    assert not target.wrong, target.wrong
    scores = {"prompt": [BURST, *[9] * 500], "echo": True, "logprobs": 5, "n": 8, "max_tokens": 200}
    await asyncio.gather(*(target.post("/v1/completions", scores, tenant="bob") for _ in range(4)))


def memory(stage: Stage) -> dict[str, float]:
    """MiB, the median of :data:`MEASURE_S`."""
    assert stage.watch is not None
    rss, used = [], []
    end = time.monotonic() + MEASURE_S
    with stage.store() as store:
        while time.monotonic() < end:
            rss.append(stage.rss_mib())
            used.append(store.info("memory")["used_memory"] / 2**20)
            time.sleep(0.1)
    return {"gateway": round(median(rss), 1), "redis": round(median(used), 2)}


def rounds(stage: Stage, attacks: Sequence[Attack], seconds: float, kept_mib: float) -> Iterator[Record]:
    """Runs of attacks until the time is over, the first round in any case as far as processes live. ``kept_mib``: what
    the gateway holds beyond what a new one does."""
    end = time.monotonic() + seconds
    for number, attack in enumerate(itertools.cycle(attacks)):
        if number >= len(attacks) and time.monotonic() > end:
            return
        bounds = replace(attack.bounds, peak=attack.bounds.peak + kept_mib)
        record = execute(replace(attack, bounds=bounds), stage)
        yield record
        if len(stage.alive()) < len(stage.procs):
            return


def run(stage: Stage, options: argparse.Namespace) -> dict[str, Any]:
    """The figures."""
    cold = memory(stage)
    asyncio.run(warm_up(Target(stage=stage)))
    time.sleep(QUIET_S)
    start, began = memory(stage), time.monotonic()
    records = []
    kept_mib = max(0.0, start["gateway"] - cold["gateway"])
    for record in rounds(stage, chosen(options.only), 60 * options.minutes, kept_mib):
        records.append(record)
        say = "; ".join(record.broken) or "no harm"
        print(
            f"{time.monotonic() - began:7.1f} s  {record.finding} {record.name}: {summary(record)}; {say}", flush=True
        )
    if len(stage.alive()) == len(stage.procs):
        time.sleep(QUIET_S)
    seen, end = look(stage, began), memory(stage)
    return {
        "setting": setting(stage.limits()) | {"streams": options.streams},
        "seconds": round(time.monotonic() - began),
        "attacks": len(records),
        "honest": seen["honest"],
        "probes": {"slowest": seen["health"], "failed": len(seen["failed"])},
        "memory": {
            "cold": cold,
            "start": start,
            "end": end,
            "peak": seen["rss_peak"],
            "redis_peak": seen["redis_peak"],
        },
        "ended": sorted(set(stage.procs) - set(stage.alive())),
        "runs": [{"name": r.name, "seen": summary(r), "broken": r.broken} for r in records],
    }


def verdict(figures: dict[str, Any]) -> list[str]:
    """Why the soak failed; empty if it did not."""
    honest, start, end = figures["honest"], figures["memory"]["start"], figures["memory"]["end"]
    broken = [f"{role} ended" for role in figures["ended"]]
    if (kept := start["gateway"] - figures["memory"]["cold"]["gateway"]) > KEPT_MIB:
        broken.append(f"the gateway kept {kept:.0f} MiB of the warm-up")
    broken += [f"{len(honest['faults'])} honest streams ended or changed"] if honest["faults"] else []
    harm = [f"{one['name']}: {what}" for one in figures["runs"] for what in one["broken"]]
    broken += [f"{len(harm)} bounds of single attacks broke, such as {harm[0]}"] if harm else []
    for name, value in (("p99 between tokens", honest["p99"]), ("the slowest probe", figures["probes"]["slowest"])):
        if value is None or value > MAX_S:
            broken.append(f"{name} took {value} s")
    broken += [f"{figures['probes']['failed']} probes failed"] if figures["probes"]["failed"] else []
    allowed = {"gateway": start["gateway"] * GROWTH, "redis": max(start["redis"] * GROWTH, REDIS_SLACK_MIB)}
    for role, most in allowed.items():
        if end[role] > start[role] + most:
            broken.append(f"{role} had {start[role]} MiB at the start and has {end[role]} at the end")
    return broken


def table(figures: dict[str, Any]) -> list[str]:
    """Each attack once, at its worst, and the whole."""
    honest, kept = figures["honest"], figures["memory"]
    worst: dict[str, dict[str, Any]] = {}
    for one in figures["runs"]:
        if one["name"] not in worst or len(one["broken"]) > len(worst[one["name"]]["broken"]):
            worst[one["name"]] = one
    rows = [("attack", "runs", "harm", "seen")]
    for name, one in worst.items():
        runs = sum(each["name"] == name for each in figures["runs"])
        harm = sum(each["name"] == name and bool(each["broken"]) for each in figures["runs"])
        rows.append((name, str(runs), str(harm or ""), one["seen"]))
    gaps = {name: f"{honest[name]:.3f}" for name in ("p50", "p99", "longest") if honest[name] is not None}
    return [
        *as_markdown(rows),
        f"{figures['attacks']} attacks in {figures['seconds']} s next to {honest['streams']} honest streams:",
        f"{honest['tokens']} tokens, seconds between them {gaps}; {len(honest['faults'])} streams ended or changed, "
        f"{len(honest['refused'])} requests asked to come again, first token after {honest['first']:.2f} s at most",
        f"/health took {figures['probes']['slowest']:.2f} s at most, {figures['probes']['failed']} probes failed",
        f"memory, MiB: {kept['cold']} with the honest streams alone, {kept['start']} at the start, "
        f"{kept['end']} at the end; the gateway's peak {kept['peak']:.0f}",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    long_tokens = min(100_000, int(options.rate * (60 * options.minutes + 900)))
    stall = stall_option()
    shape = Shape(
        streams=options.streams,
        rate=options.rate,
        long_tokens=long_tokens,
        keep_s=KEEP_S,
        seats=max(attack.shape.seats for attack in ATTACKS),  # what one tenant holds without end must leave some
        gateway=((stall, 5),) if stall else (),
    )
    with on_stage(shape) as stage:
        figures = run(stage, options)
    reasons = verdict(figures)
    return conclude(table(figures), reasons, {options.json: as_json(figures | {"broken": reasons})})


if __name__ == "__main__":
    sys.exit(main())
