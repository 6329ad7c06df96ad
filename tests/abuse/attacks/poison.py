"""M5, L6: a request that kills whichever worker computes it, next to others that have no token yet."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from abuse.attack import Attack, Bounds, Target
from abuse.kit.stage import Shape
from abuse.kit.tokens import POISON

_INNOCENT_TOKENS = 20_000
LEASE_S = 2.0


async def keep_worker(target: Target) -> None:
    """Until cancelled: starts the attention worker again, as Kubernetes would."""
    stage = target.stage
    while True:
        proc = stage.procs["attention"]
        if proc.popen.poll() is not None:
            stage.asked_to_end.add(proc.pid)
            target.found["deaths"] = target.found.get("deaths", 0) + 1
            await asyncio.to_thread(stage.start_worker)
        await asyncio.sleep(0.1)


async def poisoned(target: Target) -> None:
    """Three of alice and bob whose prompts take a while, one of mallory: theirs are answered."""
    keeping = asyncio.create_task(keep_worker(target))
    escapes = target.tokens_of("\x1b[31mred\x07\nid  forged")  # an operator will look at it

    async def innocent(number: int) -> None:
        body = {"prompt": [500 + number] * _INNOCENT_TOKENS, "max_tokens": 5, "ignore_eos": True}
        answer = await target.post("/v1/completions", body, tenant=("alice", "bob")[number % 2], timeout_s=80)
        target.check(answer.kind == "200", f"an innocent request got {answer.kind}")

    innocents = [asyncio.create_task(innocent(number)) for number in range(3)]
    await asyncio.sleep(0.2)
    await target.post("/v1/completions", {"prompt": [POISON, *escapes], "max_tokens": 5}, timeout_s=80)
    await asyncio.gather(*innocents)
    keeping.cancel()
    await asyncio.to_thread(_look_at_dead_letters, target)


def _look_at_dead_letters(target: Target) -> None:
    """L6: as an operator does, in a terminal."""
    listed = _queue(target, "list").splitlines()
    target.found["dead letters"] = len([line for line in listed if "failures" in line])
    for line in listed:
        shown = _queue(target, "show", line.split()[0], "--model", str(target.stage.model))
        target.check("\x1b" not in shown and "\x07" not in shown, "`queue show` prints terminal escapes of a prompt")
        target.check("\nid  forged" not in shown, "`queue show` prints a prompt's lines as its own")


def _queue(target: Target, *args: str) -> str:
    command = [sys.executable, "-m", "services", "queue", *args, "--redis-url", target.stage.redis_url]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout


ATTACKS = [
    Attack(
        name="poison: three innocents next to it",
        finding="M5",
        run=poisoned,
        bounds=Bounds(within=90),
        shape=Shape(streams=0, lease_s=LEASE_S, prefill=2_000),
        alone=True,
    ),
]
