"""How a decode step's time grows: with requests that wait, with sequences that run, and with what is behind them.

    python -m perf.cpu.growth MODEL_FOLDER [--waiting 0 100 1000 10000] [--running 1 4 16 64 256]
        [--context 32 128 512 896] [--steps 60] [--options '--device cpu']

One engine in this process for each of the three, without a server. The sequences of a batch have got their prompts
before the steps that are timed. Medians of the steps, and the ratio to the first row. Needs no GPU; on one, the engine
has its graphs and steps ahead.
"""

from __future__ import annotations

import argparse
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from services.attention.setup.build import build
from services.attention.step.engine import Engine
from services.config import load_settings
from services.messages import GenerateRequest, SamplingParams

BATCH, PAST, WARM_UP = 32, 32, 5
"""Running sequences and tokens of past where another thing grows, and steps that are not timed."""
PROMPT_ROWS = 4096
"""Rows of prompts in a step, before those that are timed."""


def sized_engine(options: argparse.Namespace, *, running: int, context: int) -> Engine[Any]:
    """Return an engine with room for ``running`` sequences of ``context`` tokens and the steps that are timed."""
    tokens = running * (context + options.steps + 8 * WARM_UP)
    words = ["--model", str(options.model), "--max-num-seqs", str(running), "--no-prefix-cache"]
    words += ["--kv-blocks", str(tokens // 16 + 2 * running), "--max-num-batched-tokens", str(PROMPT_ROWS + running)]
    words += shlex.split(options.options)
    engine = build(load_settings(words), lambda: time.time_ns() // 1_000_000, worker="growth").engine
    engine.prepare()
    return engine


def requests(rng: random.Random, count: int, prompt: int, answer: int) -> Iterable[GenerateRequest]:
    """Yield requests of random tokens."""
    for number in range(count):
        tokens = [rng.randrange(3, 250) for _ in range(prompt)]
        yield GenerateRequest(
            id=f"{rng.random()}-{number}",
            attempt=1,
            token_ids=tokens,
            prompt_len=prompt,
            sampling=SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True),
            deadline_ms=2**62,
            priority=5,
            tenant="growth",
            reply_to="",
        )


def step_ms(options: argparse.Namespace, *, running: int, context: int, waiting: int = 0) -> float:
    """Return the median milliseconds of a step of ``running`` decodes."""
    engine, rng = sized_engine(options, running=running, context=context), random.Random(1)
    answer = options.steps + 4 * WARM_UP + -(-running * context // PROMPT_ROWS)  # long enough for all to run at once
    for request in requests(rng, running, context, answer):
        engine.add(request)
    while engine.stats().prefill_tokens < running * context and engine.has_work:
        engine.step()
    for request in requests(rng, waiting, PAST, answer):
        engine.add(request)
    for _ in range(WARM_UP):
        engine.step()
    took = []
    for _ in range(options.steps):
        began = time.perf_counter()
        engine.step()
        took.append(time.perf_counter() - began)
    assert engine.stats().running == running, "a sequence was refused, or had to make room"
    return 1e3 * statistics.median(took)


def table(title: str, sizes: Sequence[int], measure: Callable[[int], float]) -> None:
    """Print a row for each size as soon as it was measured."""
    print(f"| {title} | ms a step | of the first |\n| --- | --- | --- |")
    first = None
    for size in sizes:
        took = measure(size)
        first = first or took
        print(f"| {size:,} | {took:.2f} | {took / first:.2f} |", flush=True)
    print()


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m perf.cpu.growth", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of the checkpoint")
    parser.add_argument("--waiting", type=int, nargs="*", default=[0, 100, 1_000, 10_000])
    parser.add_argument("--running", type=int, nargs="*", default=[1, 4, 16, 64, 256])
    parser.add_argument("--context", type=int, nargs="*", default=[32, 128, 512, 896])
    parser.add_argument("--steps", type=int, default=60, help="that are timed (default: %(default)s)")
    parser.add_argument("--options", default="", help="more options of expertmesh serve")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments().parse_args(argv)
    batch = f"beside {BATCH} that run"
    table(f"waiting, {batch}", options.waiting, lambda n: step_ms(options, running=BATCH, context=PAST, waiting=n))
    table("running", options.running, lambda n: step_ms(options, running=n, context=PAST))
    table(f"tokens of past, {BATCH} run", options.context, lambda n: step_ms(options, running=BATCH, context=n))
    return 0


if __name__ == "__main__":
    sys.exit(main())
