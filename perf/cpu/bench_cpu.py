"""What the way through REST and Redis costs: the same engine driven in-process and through the whole server.

``python -m perf.cpu.bench_cpu`` makes a checkpoint whose decode step takes 15 to 25 ms at 32 streams here, then
alternates rounds of both sides on the same cores and prints throughput, their ratio, and the CPU time of every hop.
The in-process side runs in a process of its own, with the same settings and without a server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from loadgen.client import StreamResult, stream_completion
from loadgen.connections import Session
from loadgen.served import Served, served
from perf.cpu.bench_model import write_checkpoint
from services.demo.tokenizer import VOCAB_SIZE

if TYPE_CHECKING:  # the client side does not load torch
    from services.attention.engine_thread import SteppedEngine
    from services.messages import GenerateRequest

STREAMS = 32
PROMPT_TOKENS = 32
STEP_RANGE_MS = (15.0, 25.0)
STEP_TARGET_MS = 20.0
BASE_LAYERS = 4
WARM_UP_TOKENS = 8
SERVER_ENV = {"EXPERTMESH_SERVED_MODEL_NAME": "bench", "EXPERTMESH_LOG_LEVEL": "warning"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One side's round: generated tokens, wall seconds, and CPU seconds by process."""

    tokens: int
    wall_s: float
    cpu_s: dict[str, float]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s


def prompts(count: int, seed: int) -> list[list[int]]:
    """``count`` prompts of ``PROMPT_TOKENS`` random token ids, none of them special; one ``seed``, one answer."""
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def engine_flags(model: Path) -> list[str]:
    """Options of both sides: a batch of ``STREAMS``, and no prefix cache to make one round easier than another."""
    return [
        "--model",
        str(model),
        "--dtype",
        "float32",
        "--max-num-seqs",
        str(STREAMS),
        "--kv-blocks",
        "1024",
        "--no-prefix-cache",
    ]


def drive_in_process(model: Path, max_tokens: int, per_stream: int) -> dict[str, float]:
    """Run ``STREAMS`` sequences at a time through the engine alone; tokens, wall seconds and the median step in ms."""
    from services.attention.setup.build import build
    from services.config import load_settings
    from services.messages import GenerateRequest, SamplingParams

    def requests(count: int, new_tokens: int, seed: int) -> list[GenerateRequest]:
        return [
            GenerateRequest(
                id=f"{seed}-{i}",
                attempt=1,
                token_ids=prompt,
                prompt_len=len(prompt),
                sampling=SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True),
                deadline_ms=2**62,
                priority=5,
                tenant="bench",
                reply_to="",
            )
            for i, prompt in enumerate(prompts(count, seed))
        ]

    engine = build(load_settings(engine_flags(model)), lambda: time.time_ns() // 1_000_000, worker="bench").engine
    _run_engine(engine, requests(STREAMS, WARM_UP_TOKENS, seed=99))
    start = time.perf_counter()
    tokens, steps_s = _run_engine(engine, requests(STREAMS * per_stream, max_tokens, seed=1))
    return {"tokens": tokens, "wall_s": time.perf_counter() - start, "step_ms": statistics.median(steps_s) * 1e3}


def _run_engine(engine: SteppedEngine, requests: list[GenerateRequest]) -> tuple[int, list[float]]:
    """Generated tokens and seconds of every step until all ``requests`` ended, ``STREAMS`` of them at a time."""
    waiting = requests[::-1]
    for _ in range(STREAMS):
        engine.add(waiting.pop())
    tokens, steps_s = 0, []
    while engine.has_work:
        step_start = time.perf_counter()
        events = engine.step()
        steps_s.append(time.perf_counter() - step_start)
        tokens += sum(event.token_id is not None for event in events)
        for event in events:
            if event.finish and waiting:
                engine.add(waiting.pop())
    return tokens, steps_s


def in_process(model: Path, max_tokens: int, per_stream: int) -> dict[str, float]:
    """:func:`drive_in_process` in a fresh process, so that neither side inherits the other's threads or heap."""
    command = [sys.executable, "-m", "perf.cpu.bench_cpu", "--drive", str(model), str(max_tokens), str(per_stream)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, float] = json.loads(out.strip().splitlines()[-1])
    return result


def calibrated_checkpoint(folder: Path) -> tuple[Path, float]:
    """A checkpoint with as many layers as make the in-process step last about ``STEP_TARGET_MS``."""
    layers = BASE_LAYERS
    for _ in range(4):
        model = write_checkpoint(folder, layers)
        step_ms = in_process(model, max_tokens=48, per_stream=1)["step_ms"]
        print(f"calibrating: {layers} layers, {step_ms:.1f} ms per step of {STREAMS} streams", flush=True)
        if STEP_RANGE_MS[0] + 1 <= step_ms <= STEP_RANGE_MS[1] - 1:
            break
        layers = max(1, round(layers * STEP_TARGET_MS / step_ms))
    return model, step_ms


def cpu_s(server: Served) -> dict[str, float]:
    """CPU seconds so far of the processes under ``server``, by hop; ``client`` is this process."""
    seconds = {"client": sum(psutil.Process().cpu_times()[:2])}
    root = psutil.Process(server.pid)
    for process in [root, *root.children(recursive=True)]:
        name = _hop(process.cmdline())
        seconds[name] = seconds.get(name, 0.0) + sum(process.cpu_times()[:2])
    return seconds


def _hop(cmdline: Sequence[str]) -> str:
    line = " ".join(cmdline)
    for hop in ("gateway", "scheduler", "attention"):
        if f"expertmesh {hop}" in line:
            return hop
    return "redis" if "-server" in line else "supervisor"


async def rest_round(server: Served, session: Session, max_tokens: int, per_stream: int, seed: int) -> Round:
    """``STREAMS`` clients, each with ``per_stream`` requests one after the other."""
    waiting = prompts(STREAMS * per_stream, seed)
    body = {"model": "bench", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}

    async def user() -> list[StreamResult]:
        results = []
        while waiting:
            results.append(await stream_completion(session, server.url, body | {"prompt": waiting.pop()}))
        return results

    before, start = cpu_s(server), time.perf_counter()
    results = [
        result for user_results in await asyncio.gather(*(user() for _ in range(STREAMS))) for result in user_results
    ]
    wall_s = time.perf_counter() - start
    after = cpu_s(server)
    failed = [result.error for result in results if result.error or result.completion_tokens != max_tokens]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed, the first with: {failed[0]}")
    cpu = {hop: after[hop] - before.get(hop, 0.0) for hop in after}
    return Round(tokens=sum(result.completion_tokens for result in results), wall_s=wall_s, cpu_s=cpu)


async def _through(server: Served, max_tokens: int, per_stream: int) -> Round:
    async with Session() as session:
        await rest_round(server, session, WARM_UP_TOKENS, 1, seed=99)  # connections, first allocations
        return await rest_round(server, session, max_tokens, per_stream, seed=1)


def compare(model: Path, rounds: int, max_tokens: int, per_stream: int, port: int) -> tuple[list[Round], list[Round]]:
    """Interleaved rounds, in-process and REST; the server is stopped while the engine runs alone."""
    alone, rest = [], []
    for i in range(rounds):
        result = in_process(model, max_tokens, per_stream)
        alone.append(Round(tokens=int(result["tokens"]), wall_s=result["wall_s"], cpu_s={}))
        print(
            f"round {i + 1}: in-process {alone[-1].tokens_per_s:8.1f} tok/s (step {result['step_ms']:.1f} ms)",
            flush=True,
        )
        with served(engine_flags(model), port=port, env=SERVER_ENV) as server:
            rest.append(asyncio.run(_through(server, max_tokens, per_stream)))
        print(f"round {i + 1}: REST+Redis {rest[-1].tokens_per_s:8.1f} tok/s", flush=True)
    return alone, rest


def report(step_ms: float, alone: Sequence[Round], rest: Sequence[Round]) -> float:
    """Print the comparison; the ratio of the medians."""
    base = statistics.median(r.tokens_per_s for r in alone)
    through = statistics.median(r.tokens_per_s for r in rest)
    ratio = through / base
    print(f"\nstep {step_ms:.1f} ms, {STREAMS} streams, {len(rest)} rounds, medians")
    print(f"  engine in-process   {base:8.1f} tok/s")
    print(f"  through REST+Redis  {through:8.1f} tok/s   ratio {ratio:.3f}")
    print("  CPU by hop          us/token   share")
    tokens = sum(r.tokens for r in rest)
    hops = {hop: sum(r.cpu_s.get(hop, 0.0) for r in rest) for hop in rest[0].cpu_s}
    for hop, seconds in sorted(hops.items(), key=lambda item: -item[1]):
        print(f"    {hop:<16} {seconds / tokens * 1e6:10.1f}   {seconds / sum(hops.values()):5.1%}")
    return ratio


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.cpu.bench_cpu", description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--per-stream", type=int, default=2, help="requests each stream sends, one after the other")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench-cpu"))
    parser.add_argument("--goal", type=float, default=0.85, help="exit 1 below this ratio")
    parser.add_argument("--drive", nargs=3, metavar=("MODEL", "MAX_TOKENS", "PER_STREAM"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.drive:
        model, max_tokens, per_stream = args.drive
        print(json.dumps(drive_in_process(Path(model), int(max_tokens), int(per_stream))))
        return 0
    model, step_ms = calibrated_checkpoint(args.cache)
    ratio = report(step_ms, *compare(model, args.rounds, args.max_tokens, args.per_stream, args.port))
    return 0 if ratio >= args.goal else 1


if __name__ == "__main__":
    sys.exit(main())
