"""Decode steps on a GPU, read at once and with lookahead: how long the GPU waits for the host between two steps.

    PYTHONPATH=.:kernels:tests python3 perf/server/lookahead_gpu.py --out DIR    (one GPU, some 3 minutes)
    ... --experts disaggregated --layers 4    (two GPUs: experts on the second one, over shared memory)

First it checks, in float32 and with ends that nobody knows ahead, that tokens are the same both ways; then it times
256 sequences in bfloat16, for models of some depths in Qwen3-30B-A3B's shapes with few experts. Random weights.
Columns, medians in microseconds, ``idle`` also the 80th percentile:

    step    from one step's tokens to the next one's
    idle    on the GPU's clock, from the end of a step's last copy to the first kernel of the next step
    host    what the engine's thread does in a step without waiting: plan, inputs, launches, draws, bookkeeping
    waits   for the GPU

Needs torch, triton, numpy and msgspec. Prints as it goes, ends itself after ``--limit`` s.
Exit code 1 if tokens differ. ``--device cpu`` tries it out, with nothing to see.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from perf.kit.stand_ins import fill_in

fill_in()  # before the project's imports

import torch  # noqa: E402
from testkit.gpu.decode_bench import Parts, random_dense, random_experts, request  # noqa: E402
from testkit.gpu.fabric import Way, to_workers  # noqa: E402
from testkit.gpu.workers import GpuPool  # noqa: E402

from services.attention.step.cuda_graphs import CudaCapture  # noqa: E402
from services.attention.step.engine import Engine  # noqa: E402
from services.fabric.shared_memory.link import SharedMemoryLink  # noqa: E402
from services.model.experts import ExpertShard  # noqa: E402
from services.model.spec import LayerSpec, ModelSpec, RopeSpec, RouterSpec  # noqa: E402

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9},
    "top_p": {"temperature": 0.9, "top_p": 0.9},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument(
        "--graphs", nargs="+", default=["off", "on"], choices=["off", "on"], help="decode by CUDA graph"
    )
    parser.add_argument("--experts", default="local", choices=["local", "disaggregated"])
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--limit", type=int, default=400, help="seconds")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.limit, exit=True)
    device = torch.device(args.device)
    print(
        f"torch {torch.__version__} on {torch.cuda.get_device_name() if device.type == 'cuda' else 'cpu'}", flush=True
    )
    wrong = check(device)
    print(
        f"{'layers':>6} {'draws':>8} {'graph':>5} {'ahead':>5} | "
        f"{'step':>7} {'idle':>7} {'p80':>7} {'host':>7} {'waits':>7}",
        flush=True,
    )
    rows: list[dict[str, Any]] = []
    for layers in args.layers:
        parts = random_parts(shapes(layers, device), device, torch.bfloat16)
        with disaggregated(parts, args.sequences) if args.experts == "disaggregated" else nullcontext() as link:
            for kind, graphs in product(args.kinds, args.graphs):
                pair = [
                    timed(parts, kind, args.sequences, args.steps, graphs=graphs == "on", lookahead=ahead, link=link)
                    for ahead in (False, True)
                ]
                wrong += differ(pair[0].pop("tokens"), pair[1].pop("tokens"))
                rows += [{"layers": layers, "draws": kind, "graphs": graphs, **row} for row in pair]
                for row in rows[-2:]:
                    print(line(row), flush=True)
                if wrong:
                    print("tokens differ", flush=True)
        if link is not None:
            assert link.shared_steps, "no step went through shared memory"
            print(f"{link.shared_steps} steps through shared memory, {link.repeated_steps} run again", flush=True)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "lookahead.json").write_text(json.dumps(rows, indent=1))
    return int(wrong > 0)


@contextmanager
def disaggregated(parts: Parts, rows: int) -> Iterator[SharedMemoryLink]:
    """A link to a process that has the experts on the next GPU."""
    spec, pool = parts.model.spec, GpuPool(2)
    layers = random_experts(spec, parts.model.device, torch.bfloat16)
    way = Way(shared=True, summed=True, lane=False)  # as GPUs of one node do by default
    try:
        with to_workers(pool, way, [1], spec.num_experts, layers, rows=rows) as opened:
            yield opened.link
    finally:
        pool.close()


def differ(one: dict[str, list[int]], other: dict[str, list[int]]) -> bool:
    """Whether tokens that both have differ; with lookahead one more step was read."""
    return any(a != b for name in one for a, b in zip(one[name], other[name], strict=False))


def line(row: dict[str, Any]) -> str:
    numbers = " ".join(f"{1e6 * row[name]:>7.0f}" for name in ("step", "idle", "idle_p80", "host", "waits"))
    return (
        f"{row['layers']:>6} {row['draws']:>8} {row['graphs']:>5} {'on' if row['lookahead'] else 'off':>5} | {numbers}"
    )


def random_parts(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Parts:
    experts = random_experts(spec, device, dtype)
    return Parts(random_dense(spec, device, dtype), ExpertShard(experts, num_experts=spec.num_experts))


def engine_of(parts: Parts, *, graphs: bool = False, **options: Any) -> Engine[Any]:
    device = parts.model.device
    engine = parts.engine(CudaCapture(device) if graphs and device.type == "cuda" else None, **options)
    engine.prepare()
    return engine


def shapes(layers: int, device: torch.device) -> ModelSpec:
    """Qwen3-30B-A3B's, with 16 of its experts; small ones on a CPU."""
    small = device.type == "cpu"
    return ModelSpec(
        family="qwen3_moe", dtype="bfloat16", vocab_size=2000 if small else 151_936, hidden_size=64 if small else 2048,
        num_heads=4 if small else 32, num_kv_heads=2 if small else 4, head_dim=16 if small else 128,
        max_position=4096, rms_eps=1e-6, rope=RopeSpec(theta=1e6), layers=(LayerSpec(kind="moe"),) * layers,
        qkv_bias=False, o_bias=False, qk_norm="head", clip_qkv=None, num_experts=16, top_k=4 if small else 8,
        expert_ffn=32 if small else 768, dense_ffn=0, shared_ffn=0, router=RouterSpec(renormalise=True),
        tie_embeddings=False, bos_token_id=None, eos_token_ids=(),
    )  # fmt: skip


def check(device: torch.device) -> int:
    """Stops, penalties, few KV blocks, requests that come and are cancelled on the way. In float32."""
    spec = shapes(2, torch.device("cpu"))
    parts = random_parts(spec, device, torch.float32)
    answers, ahead = [], 0
    for lookahead in (False, True):
        engine = engine_of(
            parts,
            max_num_seqs=32,
            max_num_batched_tokens=256,
            kv_blocks=160,
            block_size=4,
            lookahead="all" if lookahead else "off",
        )
        answers.append(crowd(engine, spec.vocab_size))
        ahead = engine.stats().steps_ahead
    equal = answers[0] == answers[1]
    total = sum(len(tokens) for tokens in answers[0].values())
    print(f"check: {len(answers[0])} requests, {total} tokens, {ahead} steps ahead: {'equal' if equal else 'DIFFER'}")
    for name in [name for name in answers[0] if answers[0][name] != answers[1][name]][:5]:
        print(f"  {name}: {answers[0][name]}\n  {' ' * len(name)}  {answers[1][name]}", flush=True)
    return int(not equal or not ahead)


def crowd(engine: Engine[Any], vocab: int) -> dict[str, list[Any]]:
    draw, found = random.Random(5), dict[str, list[Any]]()
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.8, "top_k": 20, "logprobs": None},
        {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"temperature": 1.2, "min_tokens": 6, "logit_bias": {7: 3.0}},
    ]
    waiting = [
        request(
            f"r{number}",
            [draw.randrange(vocab) for _ in range(draw.randrange(1, 30))],
            draw.randrange(1, 40),
            stop_token_ids=tuple(draw.randrange(vocab) for _ in range(vocab // 20)),
            seed=number,
            ignore_eos=False,
            **draw.choice(kinds),
        )
        for number in range(96)
    ]
    cancelled_after = {f"r{number}": draw.randrange(1, 8) for number in range(0, 96, 7)}
    while waiting or engine.has_work:
        for _ in range(min(len(waiting), draw.choice((0, 0, 0, 2, 9)))):
            engine.add(waiting.pop())
        for event in engine.step():
            mine = found.setdefault(event.request_id, [])
            mine.append((event.token_id, event.finish))
            if len(mine) == cancelled_after.get(event.request_id) and event.finish is None:
                engine.cancel(event.request_id, 1)
    return found


@dataclass
class Gaps:
    """Events on the device between steps, and the host's times."""

    device: torch.device
    ends: list[Any] = field(default_factory=list)
    begins: list[Any] = field(default_factory=list)
    waited_s: float = 0.0

    def attach(self, engine: Engine[Any]) -> None:
        """Mark that a step begins on the device when the host begins it on its link."""
        stepper: Any = engine._steps
        link: Any = engine._runner.link
        begin = link.begin_step

        def begun(*args: Any) -> None:
            begin(*args)
            self.begins.append(self.event())

        link.begin_step = begun
        stepper._mark = self.mark

    def event(self) -> Any:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def mark(self, _device: torch.device) -> Gaps:
        self.ends.append(self.event())
        return _Wait(self, self.ends[-1])  # type: ignore[return-value]

    def idle(self) -> list[float]:
        """Seconds between each step's end and the next one's begin, of the steps so far."""
        if self.device.type != "cuda":
            return [0.0] * (len(self.ends) - 1)
        pairs = zip(self.ends, self.begins[1:], strict=False)
        return [end.elapsed_time(begin) / 1000 for end, begin in pairs]


@dataclass
class _Wait:
    gaps: Gaps
    event: Any

    def wait(self) -> None:
        began = time.perf_counter()
        if self.event is not None:
            self.event.synchronize()
        self.gaps.waited_s += time.perf_counter() - began


def timed(
    parts: Parts,
    kind: str,
    sequences: int,
    steps: int,
    *,
    graphs: bool,
    lookahead: bool,
    link: SharedMemoryLink | None = None,
) -> dict[str, Any]:
    draw, vocab = random.Random(1), parts.model.spec.vocab_size
    engine = engine_of(
        parts, max_num_seqs=sequences, max_num_batched_tokens=8192, kv_blocks=sequences * ((64 + steps + 40) // 16 + 2),
        lookahead="all" if lookahead else "off", graphs=graphs, link=link,
    )  # fmt: skip
    for number in range(sequences):
        prompt = [draw.randrange(vocab) for _ in range(draw.randrange(16, 65))]
        engine.add(request(f"r{number}", prompt, steps + 30, seed=number, **KINDS[kind]))
    tokens: dict[str, list[int]] = {request.request.id: [] for request in engine._batch._held.values()}

    def step() -> None:
        for event in engine.step():
            assert event.token_id is not None
            tokens[event.request_id].append(event.token_id)

    while engine.stats().decode_tokens < sequences:
        step()
    for _ in range(20):
        step()
    gaps = Gaps(parts.model.device)

    def finish() -> None:
        """No step is under way any more."""
        engine._steps._lookahead = "off"
        while engine._steps.in_flight:
            step()

    finish()  # from a clean start: its marks are not ours
    engine._steps._lookahead = "all" if lookahead else "off"
    gaps.attach(engine)
    times, hosts, waits = list[float](), list[float](), list[float]()
    for _ in range(steps):
        waited_s, began = gaps.waited_s, time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
        waits.append(gaps.waited_s - waited_s)
        hosts.append(times[-1] - waits[-1])
    if parts.model.device.type == "cuda":
        torch.cuda.synchronize()
    idle = gaps.idle()[5:]
    finish()  # the link is the next engine's
    return {
        "lookahead": lookahead, "sequences": sequences, "step": statistics.median(times), "tokens": tokens,
        "idle": statistics.median(idle), "idle_p80": statistics.quantiles(idle, n=5)[-1],
        "host": statistics.median(hosts), "waits": statistics.median(waits), "steps_ahead": engine.stats().steps_ahead,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
