"""Kills one of several replicas in mid-stream, again and again: how long does any client wait?"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence

from testkit.processes.background import ended
from testkit.processes.cluster import READY_S, Cluster

from chaos.faults import Faults
from chaos.load import Job, Load, Outcome
from chaos.plan import Event

AWAY_S = 4.0
"""The dead come back only when what their death did has been seen: starting a process takes a core for seconds."""
_RECOVERY_S = 3.5


async def kill_replicas(
    cluster: Cluster, load: Load, wanted: Sequence[Job], faults: Faults, options: argparse.Namespace
) -> list[Outcome]:
    """Kill -9 of a random expert worker ``options.kills`` times, each when the deployment is whole again."""
    rng, start = random.Random(options.seed), time.perf_counter()
    over = asyncio.Event()
    loading = asyncio.create_task(load.run(wanted, options.seed, over.is_set))
    try:
        for _ in range(options.kills):
            await asyncio.to_thread(cluster.wait_whole, READY_S)
            await asyncio.sleep(_RECOVERY_S + rng.random())
            target = rng.choice(cluster.of("experts"))
            await faults.make(Event(at=time.perf_counter() - start, kind="kill experts", target=target))
            await asyncio.sleep(AWAY_S)
        over.set()
        return await loading
    finally:
        await ended([loading])
