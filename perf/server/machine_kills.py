"""`expertmesh workers` under load while its workers are killed one by one: how long clients wait. Prints as it goes.

    PYTHONPATH=.:kernels:tests python3 perf/server/machine_kills.py [--workers 3] [--kills 5] [--lease 6] [--shared X]

Workers of attention and experts, each with all experts, on the GPUs that there are in turn; 64 REST streams of the
pocket model. Exit code 1: an answer was lost or changed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from chaos.load import Load, Outcome, faults_of, jobs
from chaos.report import gaps_of, quantiles
from testkit.pocket.answers import recorded
from testkit.processes.one_machine import Deployment, Machine
from testkit.processes.servers import Bench, bench

STREAMS, CALM_S, EFFECT_S = 64, 3.0, 2.0


async def go(stage: Bench, options: argparse.Namespace) -> bool:
    began = time.perf_counter()
    deployment = Deployment(stage, groups=1, lease_s=options.lease)
    machine = deployment.machine(
        layout="colocated", workers=options.workers, expert_groups=1, fabric_shared=options.shared
    )
    print(f"{options.workers} workers are ready after {time.perf_counter() - began:.1f} s", flush=True)
    load, wanted = Load(url=machine.url, streams=STREAMS), jobs(recorded(), 1, shortest=16, longest=48)
    await load.undisturbed(wanted)
    over = asyncio.Event()
    loading = asyncio.create_task(load.run(wanted, 1, over.is_set))
    await asyncio.sleep(CALM_S)
    try:
        marks = [await kill(machine) for _ in range(options.kills)]
    finally:
        over.set()
    outcomes = await loading
    report(outcomes, marks)
    series = ("worker_starts_total", "repeated_steps_total", "shared_steps_total", "experts_busy_seconds_total")
    print({name: round(machine.metric(f"expertmesh_{name}"), 2) for name in series}, flush=True)
    return machine.proc.stop() == 0 and not faults_of(outcomes)


async def kill(machine: Machine) -> float:
    """Kill the worker that serves longest, and wait until all are ready. Returns the time, by the outcomes' clock."""
    at = time.perf_counter()
    machine.of_role("colocated")[0].kill()
    await asyncio.sleep(CALM_S)
    await asyncio.to_thread(machine.wait_ready)
    await asyncio.sleep(EFFECT_S)
    return at


def report(outcomes: list[Outcome], marks: list[float]) -> None:
    _, between = gaps_of(outcomes, 0.0)
    print(f"{len(outcomes)} answers, faults {dict(faults_of(outcomes))}, ms between tokens:", end=" ")
    print(quantiles([end - begin for begin, end in between]))
    for at in marks:
        gaps = [end - begin for begin, end in between if begin <= at + EFFECT_S and end >= at]
        print(f"killed: longest gap {1e3 * max(gaps, default=0.0):.0f} ms", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--lease", type=float, default=6.0)
    parser.add_argument("--shared", default="auto", help="host on CPUs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, bench(Path(folder)) as stage:
        return 0 if asyncio.run(go(stage, options)) else 1


if __name__ == "__main__":
    sys.exit(main())
