"""H3, H4, M4 and kin: requests that are in order, in numbers that are not."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from abuse.attack import Attack, Bounds, Target
from abuse.attacks.heads import Connections
from abuse.kit.stage import Shape
from abuse.kit.tokens import HOLD

_RATED = (("mallory", (("requests_per_minute", 1), ("burst", 1))),)


def _copies(prompts: int, length: int, n: int) -> Any:
    async def run(target: Target) -> None:
        prompt: Any = [[5000 + i] * length for i in range(prompts)]
        body = {"prompt": prompt if prompts > 1 else prompt[0], "n": n, "max_tokens": 1}
        await target.post("/v1/completions", body, timeout_s=80)

    return run


async def small_prompts(target: Target) -> None:
    """1,024 sequences in a request, and 30 of these at once."""
    body = {"prompt": [[100 + i, 7, 7] for i in range(1024)], "max_tokens": 1}
    await asyncio.gather(*(target.post("/v1/completions", body) for _ in range(30)))


async def keys_past_the_rate(target: Target) -> None:
    """3,000 requests with a key of their own, of somebody who may send one a minute: nothing of them may stay."""
    places = asyncio.Semaphore(50)

    async def one(number: int) -> None:
        async with places:
            await target.post(
                "/v1/completions", {"prompt": [100], "max_tokens": 1}, headers={"Idempotency-Key": f"k{number}"}
            )

    await asyncio.gather(*(one(number) for number in range(3000)))
    target.found["refused"] = target.answers.kinds["429 rate_limited"]


def _held(target: Target, prompt: list[int]) -> bytes:
    """A request for a stream that gets no token."""
    body = {"prompt": [HOLD, *prompt], "stream": True, "max_tokens": 50}
    return target.dialer().request("/v1/completions", body)


async def cancelled(target: Target) -> None:
    """2,000 streams opened, and left all at once; 500 in the middle of their body."""
    asked = _held(target, [7])
    for _ in range(2):
        async with Connections(target) as connections:
            await connections.add(1000, [asked])
            await connections.add(250, [asked[:-20]])
    await asyncio.sleep(2)


async def left_in_redis(target: Target) -> None:
    """100 prompts of 50,000 tokens, each another one, opened and left: what Redis keeps of them goes with them."""
    async with Connections(target) as connections:
        for number in range(100):
            await connections.add(1, [_held(target, [5000 + number] * 50_000)])
        await asyncio.sleep(3)
    await asyncio.sleep(4)


async def thousands(target: Target) -> None:
    """4,000 streams of one tenant that get no token."""
    async with Connections(target) as connections:
        await connections.add(4000, [_held(target, [7])])
        await asyncio.sleep(5)
        left = connections.left()
        target.check(left >= 3900, f"only {left} of 4,000 streams are open")
        target.found["MiB then"] = round(target.stage.rss_mib())
    await asyncio.sleep(2)


async def urgent(target: Target) -> None:
    """A flood that calls itself more urgent than anybody: refused, or another tenant is served all the same."""
    flood = {"prompt": [100] * 20, "max_tokens": 10, "ignore_eos": True, "priority": 0}
    stop = time.monotonic() + 12

    async def press() -> None:
        while time.monotonic() < stop:
            answer = await target.post("/v1/completions", flood)
            if answer.status != 200:
                await asyncio.sleep(0.5)

    pressing = [asyncio.create_task(press()) for _ in range(200)]
    await asyncio.sleep(2)
    waits = []
    while time.monotonic() < stop - 2:
        began = time.monotonic()
        answer = await target.post("/v1/completions", {"prompt": [9] * 20, "max_tokens": 3}, tenant="bob")
        waits.append(time.monotonic() - began)
        target.check(answer.status == 200, f"bob got {answer.kind}")
    await asyncio.gather(*pressing)
    target.found["bob waited"] = f"{max(waits):.1f} s"
    target.check(max(waits) < 5, f"another tenant waited {max(waits):.1f} s")


_BIG = Bounds(peak=600, within=100)
ATTACKS = [
    Attack(name="prompts: 5 x 100,000 tokens, n=128", finding="H3", run=_copies(5, 100_000, 128), bounds=_BIG),
    Attack(name="prompts: 100,000 tokens, n=128", finding="H3", run=_copies(1, 100_000, 128), bounds=_BIG),
    # Others' first tokens wait for its prompts on the one worker: that is the device's time, see docs/security.md.
    Attack(
        name="prompts: 30,000 tokens, n=128",
        finding="H3",
        run=_copies(1, 30_000, 128),
        bounds=Bounds(peak=600, within=100, first=20, served=1),
    ),
    Attack(
        name="prompts: 30 x 1,024 small ones", finding="own", run=small_prompts, bounds=Bounds(refusals=1000, served=1)
    ),
    Attack(
        name="Idempotency-Keys: 3,000 past the rate",
        finding="H4",
        run=keys_past_the_rate,
        bounds=Bounds(redis_kept=1.0),
        shape=Shape(keys=_RATED),
        alone=True,
    ),
    Attack(name="streams: 2,500 opened and left", finding="own", run=cancelled, bounds=Bounds(refusals=1000)),
    Attack(
        name="prompts: 100 long ones left",
        finding="own",
        run=left_in_redis,
        bounds=Bounds(redis_kept=4, redis_peak=200, refusals=1000),
    ),
    Attack(
        name="streams: 4,000 of one tenant",
        finding="own",
        run=thousands,
        bounds=Bounds(refusals=1000, within=90),
        shape=Shape(short=False, seats=8192, gateway=(("max_queued_requests", 6000),)),
    ),
    Attack(
        name="priority: a flood at 0",
        finding="M4",
        run=urgent,
        shape=Shape(seats=24, short=False),
        alone=True,
    ),
]
