"""H1: a gateway that stood still for longer than its lease, and lives, has its streams go on where they were."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from testkit.processes.servers import stopped

from abuse.attack import Attack, Bounds, Target
from abuse.kit.tokens import BURST

_MORE_S = 3.0


def _stop(role: str, seconds: float) -> Callable[[Target], Any]:
    async def run(target: Target) -> None:
        with stopped(target.stage.procs[role].pid):
            await asyncio.sleep(seconds)
        await asyncio.sleep(_MORE_S + 1)

    return run


async def during_a_flood(target: Target) -> None:
    """While nobody reads the results, one tenant's come as fast as a worker can: Redis keeps them within a bound."""
    body = {"prompt": [BURST, 9], "n": 16, "logprobs": 20, "max_tokens": 8000, "ignore_eos": True, "stream": True}
    flood = [asyncio.create_task(target.dialer().post("/v1/completions", body | {"seed": i})) for i in range(8)]
    await asyncio.sleep(2)
    await _stop("gateway", 12)(target)
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    await asyncio.sleep(2)


def _bounds(seconds: float) -> Bounds:
    """What it missed is made up for soon after."""
    whole = seconds + _MORE_S
    return Bounds(gap=whole, health=whole, within=whole + 15, refusals=20)


ATTACKS = [
    Attack(name=f"gateway stopped for {s:g} s", finding="H1", run=_stop("gateway", s), bounds=_bounds(s), alone=True)
    for s in (3.0, 8.0, 30.0)
]
ATTACKS.append(
    Attack(
        name="gateway stopped during a flood",
        finding="own",
        run=during_a_flood,
        bounds=Bounds(gap=20, health=16, within=60, refusals=20, redis_peak=300, redis_kept=200, peak=700),
        alone=True,
    )
)
