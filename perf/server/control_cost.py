"""What the host does for a step of decoding sequences in addition to the model: plan, inputs, loop, draws, bookkeeping.

    OMP_NUM_THREADS=1 PYTHONPATH=.:tests .venv/bin/python perf/server/control_cost.py

Model and experts cost nothing (testkit/models/control.py), so the step is all control. Times are in microseconds,
medians. The parts are of the thread's own CPU clock, so other processes of the machine do not count:

    plan       what to compute: expiry, blocks to grow into, admissions
    inputs     token ids, positions and slots as tensors
    attention  the model's plan of the step's attention: block tables, masks
    layers     the loop over layers, with calls of a model and a link that do nothing
    draw       what the sampler does on the host for a vocabulary of 64, and reading what it drew
    complete   tokens appended, ends, blocks named, events
    rest       the remainder of the step

Then the same on a simulated device, a clock by which a step takes ``--step-ms`` from its first kernel on: ``idle`` is
how long it has nothing to do between two steps, read at once and with lookahead: the control cost on the critical path.

``--changing N``: every N steps a sequence is cancelled and another one takes its place.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
from pathlib import Path

import torch

from perf.kit.control import PARTS, ControlBench, SimulatedDevice
from services.model.load_spec import load_spec

MODEL = Path(__file__).resolve().parents[2] / "examples/pocket-moe/model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--prompt", type=int, default=512, help="tokens that the longest has before it decodes")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--changing", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--step-ms", type=float, default=5.0, help="of the simulated device")
    parser.add_argument("--profile", action="store_true", help="also print where the time goes, function by function")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'sequences':>9} {'step':>7} {'p20':>7} {'p80':>7} | " + " ".join(f"{part:>9}" for part in PARTS))
    benches = []
    for sequences in args.sequences:
        bench = ControlBench(
            load_spec(MODEL), sequences, steps=args.steps, prompt=args.prompt, temperature=args.temperature
        )
        benches.append(bench)
        profile = cProfile.Profile() if args.profile else None
        steps = bench.run(args.steps, changing=args.changing, profile=profile)
        times = [sum(step.values()) for step in steps]
        quintiles = statistics.quantiles(times, n=5)
        parts = [statistics.median(step[part] for step in steps) for part in PARTS]
        totals = [statistics.median(times), quintiles[0], quintiles[-1]]
        print(f"{sequences:>9} " + " ".join(f"{1e6 * total:>7.0f}" for total in totals), end=" | ")
        print(" ".join(f"{1e6 * part:>9.0f}" for part in parts), flush=True)
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    print(f"\n{'sequences':>9} {'lookahead':>9} | {'idle':>7} {'p20':>7} {'p80':>7} {'ahead':>7}")
    for bench in benches:
        for lookahead in (False, True):
            bench.engine._steps._lookahead = "all" if lookahead else "off"
            before = bench.engine.stats()
            idle = bench.idle(args.steps // 2, SimulatedDevice(args.step_ms / 1000))
            after = bench.engine.stats()
            quintiles = statistics.quantiles(idle, n=5)
            times = " ".join(f"{1e6 * value:>7.0f}" for value in (statistics.median(idle), quintiles[0], quintiles[-1]))
            share = (after.steps_ahead - before.steps_ahead) / (after.steps - before.steps)
            print(f"{after.running:>9} {'on' if lookahead else 'off':>9} | {times} {share:>7.0%}", flush=True)


if __name__ == "__main__":
    main()
