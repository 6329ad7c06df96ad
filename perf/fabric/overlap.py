"""Step time with and without ping-pong, experts in a process of their own over tcp; about a minute on a CPU.

    OMP_NUM_THREADS=1 PYTHONPATH=.:tests .venv/bin/python perf/fabric/overlap.py

The pocket model decodes. ``us per row`` is what the expert process takes for a row and slot at least, asleep: a slower
machine or network, while this machine's cores do all the rest. 0 is its own loopback and cores. The ways take turns.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from testkit.fabric.tcp import linked, table_of

from perf.kit.expert_processes import Holding, OfModel, expert_processes
from services.attention.step.engine import Engine, EngineOptions
from services.attention.step.overlap import Mode, OverlapPolicy
from services.fabric.tcp.link import TcpLink
from services.messages import GenerateRequest, SamplingParams
from services.model.dense import DenseModel
from services.model.load_spec import load_spec
from services.model.progress import NoProgress
from services.model.spec import ModelSpec
from services.model.weights import load_dense
from services.routing import even_groups

MODEL = Path(__file__).resolve().parents[2] / "examples/pocket-moe/model"
MODES: tuple[Mode, ...] = ("off", "on", "auto")
WARM_UP, ROUNDS = 5, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=60, help="of each way in each round")
    parser.add_argument("--sequences", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--row-us", type=float, nargs="+", default=[0, 25, 100])
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'us per row':>10} {'sequences':>9} | " + " | ".join(f"{mode:^22}" for mode in MODES) + " | off / on")
    print(f"{'':20} | " + " | ".join(f"{'step ms':>8} {'wait ms':>7} {'split':>5}" for _ in MODES) + " |")
    for row_us in args.row_us:
        with link_to(row_us * 1e-6) as (spec, link):
            for sequences in args.sequences:
                print(row(spec, link, row_us, sequences, args.steps), flush=True)


def row(spec: ModelSpec, link: TcpLink, row_us: float, sequences: int, steps: int) -> str:
    engines = {mode: engine_of(spec, link, mode, sequences, WARM_UP + ROUNDS * steps) for mode in MODES}
    times: dict[Mode, list[float]] = {mode: [] for mode in MODES}
    waits: dict[Mode, float] = dict.fromkeys(MODES, 0.0)
    splits: dict[Mode, int] = dict.fromkeys(MODES, 0)
    for _ in range(ROUNDS):
        for mode, engine in engines.items():
            before = engine.stats()
            times[mode] += [timed(engine.step) for _ in range(steps)]
            waits[mode] += engine.stats().exchange_wait_seconds - before.exchange_wait_seconds
            splits[mode] += engine.stats().overlapped_steps - before.overlapped_steps
    count = ROUNDS * steps
    cells = [
        f"{1e3 * statistics.median(times[mode]):8.2f} {1e3 * waits[mode] / count:7.2f} {splits[mode] / count:5.0%}"
        for mode in MODES
    ]
    gain = statistics.median(times["off"]) / statistics.median(times["on"])
    return f"{row_us:>10g} {sequences:>9} | " + " | ".join(cells) + f" | {gain:8.2f}"


@contextmanager
def link_to(row_s: float) -> Iterator[tuple[ModelSpec, TcpLink]]:
    spec = load_spec(MODEL)
    groups = even_groups(list(spec.moe_layers), spec.num_experts, 1)
    made_of = OfModel(folder=MODEL, row_s=row_s)
    holding = Holding(group=0, experts=groups[0].experts, made_of=made_of, hidden=spec.hidden_size)
    with expert_processes([holding]) as running:
        table = table_of(running[0].seat, groups=groups, experts=spec.num_experts)
        with linked(table, hidden=spec.hidden_size, call_s=60.0) as link:
            yield spec, link


def engine_of(spec: ModelSpec, link: TcpLink, mode: Mode, sequences: int, steps: int) -> Engine[Any]:
    """An engine with ``sequences`` that decode for ``steps``."""
    dense = load_dense(MODEL, spec, dtype=torch.float32, device=torch.device("cpu"), progress=NoProgress())
    options = EngineOptions(max_num_seqs=sequences, max_num_batched_tokens=sequences * 32, kv_blocks=64 * sequences)
    overlap = OverlapPolicy(mode, tokens_per_row=spec.hidden_size)
    engine: Engine[Any] = Engine(
        model=DenseModel(spec, dense), link=link, options=options, clock=lambda: 0, overlap=overlap
    )
    draw = random.Random(0)
    for number in range(sequences):
        prompt = [draw.randrange(3, spec.vocab_size) for _ in range(24)]
        sampling = SamplingParams(max_tokens=steps + 2, temperature=0.0, ignore_eos=True)
        request = GenerateRequest(
            id=str(number),
            attempt=1,
            token_ids=prompt,
            prompt_len=len(prompt),
            sampling=sampling,
            deadline_ms=2**62,
            priority=5,
            tenant="",
            reply_to="",
        )
        engine.add(request)
    for _ in range(WARM_UP):
        engine.step()
    return engine


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
