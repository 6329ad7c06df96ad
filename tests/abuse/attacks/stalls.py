"""H1: a gateway that stood still for longer than its lease, and lives, has its streams go on where they were."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

from abuse.attack import Attack, Bounds, Target

_MORE_S = 3.0


def _stop(role: str, seconds: float) -> Callable[[Target], Any]:
    async def run(target: Target) -> None:
        pid = target.stage.procs[role].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(_MORE_S + 1)

    return run


def _bounds(seconds: float) -> Bounds:
    """What it missed is made up for soon after."""
    whole = seconds + _MORE_S
    return Bounds(gap=whole, health=whole, within=whole + 15, refusals=20)


ATTACKS = [
    Attack(name=f"gateway stopped for {s:g} s", finding="H1", run=_stop("gateway", s), bounds=_bounds(s), alone=True)
    for s in (3.0, 8.0, 30.0)
]
