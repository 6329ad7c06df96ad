"""The engine by itself on one GPU, over random weights of real shapes: decode, prefill, ExpertFlow's mix, by budgets.

    PYTHONPATH=.:kernels:tests python3 -m perf.server.offline [olmoe qwen3-30b gpt-oss-20b]
        [--parts decode,prefill,mix,long] [--budgets 512 8192] [--seqs 512] [--requests 2560] [--json FILE]

    decode   ms of a step by batch, 128 tokens of past
    prefill  tokens a second of prompts alone
    mix      ExpertFlow's mix, all requests at once: prompts of 8 to 128 tokens, answers of 1 to 128; for each budget,
             with how long steps of each kind took
    long     prompts of 8,000 tokens beside 64 streams: gaps between the streams' tokens
    kernels  where the GPU's time goes: kernels of 32 decode steps of 1, 32 and 512 rows, and of four prompts of 2,000

Needs torch, triton, numpy and msgspec. Prints as it goes.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perf.kit.stand_ins import fill_in

fill_in()

import torch  # noqa: E402
from testkit.gpu import decode_bench as kit  # noqa: E402

from services.attention.step.cuda_graphs import CudaCapture  # noqa: E402
from services.bench.loop import Ran, Step, greedy, run, stepped  # noqa: E402
from services.messages import GenerateRequest  # noqa: E402
from services.model.dense import DenseModel  # noqa: E402
from services.model.expert_format import KINDS, held  # noqa: E402
from services.model.experts import ExpertShard  # noqa: E402
from services.model.spec import LayerSpec, ModelSpec, RopeSpec, RouterSpec  # noqa: E402
from services.model.weight_source import RandomWeights  # noqa: E402
from services.model.weights import load_dense, load_experts  # noqa: E402

BATCHES = (1, 8, 32, 128, 256, 512)
PROMPTS = ((1, 2000), (16, 2000), (4, 8000), (1, 32_000))
"""How many prompts, of how many tokens."""
PAST, DRAWN = 128, 128
MAX_KERNELS = 24
"""Kernels that are listed."""
PROFILED = 32
"""Steps whose kernels are counted."""
KV_TOKENS = 300_000
Found = dict[str, Any]


def olmoe() -> ModelSpec:
    """OLMoE-1B-7B's shapes, with room for longer prompts."""
    return replace(
        kit.qwen3_30b(16), family="olmoe", vocab_size=50_304, num_heads=16, num_kv_heads=16, qk_norm="projection",
        rope=RopeSpec(theta=1e4), num_experts=64, expert_ffn=1024, router=RouterSpec(renormalise=False),
        tie_embeddings=False, rms_eps=1e-5,
    )  # fmt: skip


def mixtral() -> ModelSpec:
    """Mixtral-8x7B's shapes."""
    return replace(
        kit.qwen3_30b(32), family="mixtral", vocab_size=32_000, hidden_size=4096, num_kv_heads=8, qk_norm="none",
        num_experts=8, top_k=2, expert_ffn=14_336, tie_embeddings=False, rms_eps=1e-5,
    )  # fmt: skip


def gpt_oss_20b() -> ModelSpec:
    """gpt-oss-20b's shapes, with experts in 16 bits."""
    return replace(
        kit.qwen3_30b(24), family="gpt_oss", vocab_size=201_088, hidden_size=2880, num_heads=64, num_kv_heads=8,
        head_dim=64, rms_eps=1e-5, qkv_bias=True, o_bias=True, qk_norm="none", sinks=True, num_experts=32, top_k=4,
        expert_ffn=2880, expert_bias=True, expert_activation="swiglu_oai", tie_embeddings=False, max_position=131_072,
        layers=tuple(LayerSpec(kind="moe", window=None if layer % 2 else 128) for layer in range(24)),
        router=RouterSpec(order="choose_first", logit_bias=True),
        rope=RopeSpec(
            kind="yarn", theta=150_000.0, factor=32.0, original_max_position=4096, attention_factor=1.3466,
            truncate=False,
        ),
    )  # fmt: skip


def gpt_oss_20b_mxfp4() -> ModelSpec:
    """The same as it is published."""
    return replace(gpt_oss_20b(), experts=held(dict.fromkeys(range(24), KINDS["mxfp4"])))


MODELS = {
    "olmoe": olmoe,
    "qwen3-30b": lambda: replace(kit.qwen3_30b(48), tie_embeddings=False),
    "mixtral": mixtral,
    "gpt-oss-20b": gpt_oss_20b,
    "gpt-oss-20b-mxfp4": gpt_oss_20b_mxfp4,
}


def parts_of(spec: ModelSpec, device: torch.device) -> kit.Parts:
    drawn, folder = RandomWeights(), Path("nowhere")
    with torch.inference_mode():
        dense = load_dense(folder, spec, dtype=torch.bfloat16, device=device, source=drawn)
        experts = load_experts(folder, spec, dtype=torch.bfloat16, device=device, source=drawn)
        shard = ExpertShard(experts, num_experts=spec.num_experts, activation=spec.expert_activation)
        return kit.Parts(DenseModel(spec, dense), shard)


@dataclass
class Bench:
    """``rng`` draws the prompts' tokens."""

    name: str
    spec: ModelSpec
    parts: kit.Parts
    options: argparse.Namespace
    rng: random.Random
    engine: Any = None
    budget: int = 0
    count: int = 0

    def start(self, budget: int, seqs: int) -> None:
        """Replace the engine."""
        self.engine, self.budget = None, budget
        gc.collect()
        torch.cuda.empty_cache()
        began = time.perf_counter()
        self.engine = self.parts.engine(
            CudaCapture(torch.device("cuda:0")),
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_model_len=33_000,
            prefix_cache=False,
            kv_blocks=KV_TOKENS // 16,
            lookahead="all",
            prefill_stretch=2.0,
        )
        self.engine.prepare()
        say(
            f"{self.name} budget {budget}: {self.engine.stats().graphs} graphs in {time.perf_counter() - began:.1f} s, "
            f"{torch.cuda.memory_reserved() / 2**30:.1f} GiB"
        )

    def requests(self, sizes: Sequence[tuple[int, int]]) -> list[GenerateRequest]:
        made = []
        for prompt, drawn in sizes:
            self.count += 1
            tokens = [self.rng.randrange(10, self.spec.vocab_size - 10) for _ in range(prompt)]
            made.append(greedy(f"r{self.count}", tokens, drawn))
        return made

    def timed(self, sizes: Sequence[tuple[int, int]]) -> float:
        return self.ran(sizes).seconds

    def ran(self, sizes: Sequence[tuple[int, int]]) -> Ran:
        return run(self.engine, self.requests(sizes), sync=torch.cuda.synchronize)

    def decode(self) -> Iterator[Found]:
        for batch in BATCHES:
            if batch <= self.options.seqs:
                self.timed([(PAST, 8)] * batch)
                few = min(self.timed([(PAST, 8)] * batch) for _ in range(2))
                many = min(self.timed([(PAST, 8 + DRAWN)] * batch) for _ in range(2))
                yield {"batch": batch, "ms": (many - few) / DRAWN * 1e3}

    def prefill(self) -> Iterator[Found]:
        for count, length in PROMPTS:
            self.timed([(length, 1)] * count)
            seconds = min(self.timed([(length, 1)] * count) for _ in range(2))
            yield {"prompts": f"{count}x{length}", "s": seconds, "tokens_s": count * length / seconds}

    def mix(self) -> Iterator[Found]:
        self._mixed(128)
        yield {"seqs": self.options.seqs} | self._mixed(self.options.requests)

    def _mixed(self, count: int) -> Found:
        draw = random.Random(0)
        found = self.ran([(draw.randint(8, 128), draw.randint(1, 128)) for _ in range(count)])
        kinds: dict[str, list[Step]] = defaultdict(list)
        for step in found.steps:
            kind = ("graph" if step.graph else "eager") + (" prompts" if step.prompt_tokens else " decodes")
            kinds[kind + (" ahead" if step.ahead else "")].append(step)
        steps = {kind: _of_steps(some) for kind, some in sorted(kinds.items())}
        return {"s": found.seconds, "requests_s": count / found.seconds, "steps": steps}

    def long(self) -> Iterator[Found]:
        for prompts in (0, 3):
            gaps = sorted(self._gaps(prompts))
            yield {
                "prompts": prompts, "p50_ms": 1e3 * gaps[len(gaps) // 2], "p99_ms": 1e3 * gaps[len(gaps) * 99 // 100],
                "most_ms": 1e3 * gaps[-1],
            }  # fmt: skip

    def kernels(self) -> Iterator[Found]:
        for name, sizes in [(f"decode {rows}", [(PAST, 100)] * rows) for rows in (1, 32, 512)] + [
            ("4x2000", [(2000, 1)] * 4)
        ]:
            self.timed(sizes)
            before = self.engine.stats().prefill_tokens
            for request in self.requests(sizes):
                self.engine.add(request)
            while sizes[0][1] > 1 and self.engine.stats().prefill_tokens < before + len(sizes) * PAST:
                self.engine.step()
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                began, steps = time.perf_counter(), 0
                while self.engine.has_work and steps < PROFILED:
                    self.engine.step()
                    steps += 1
                torch.cuda.synchronize()
                seconds = time.perf_counter() - began
            while self.engine.has_work:
                self.engine.step()
            found = sorted(profile.key_averages(), key=lambda one: -one.self_device_time_total)
            busy = sum(one.self_device_time_total for one in found) / 1e6
            for one in found[:MAX_KERNELS]:
                say(f"{one.self_device_time_total / steps / 1e3:.3f} ms in {one.count / steps:.1f}: {one.key[:90]}")
            yield {
                "rows": name, "steps": steps, "ms": 1e3 * seconds / steps, "busy_ms": 1e3 * busy / steps,
                "launches": sum(one.count for one in found) / steps,
            }  # fmt: skip

    def _gaps(self, prompts: int) -> Iterator[float]:
        streams = self.requests([(PAST, 400)] * 64)
        seen: dict[str, float] = {}
        for one in streams:
            self.engine.add(one)
        names = {one.id for one in streams}
        for at, step in enumerate(stepped(self.engine), start=1):
            if prompts and at in (99, 109, 119):
                self.engine.add(self.requests([(8000, 1)])[0])
            for event in step.events:
                if event.request_id in names and event.token_id is not None:
                    if event.request_id in seen and at > 20:
                        yield step.ended_s - seen[event.request_id]
                    seen[event.request_id] = step.ended_s


def _of_steps(steps: Sequence[Step]) -> str:
    times, rows = [step.seconds for step in steps], statistics.mean(step.rows for step in steps)
    return f"{len(times)} steps {sum(times):.2f} s p50 {1e3 * statistics.median(times):.2f} ms, {rows:.0f} rows"


def say(text: str) -> None:
    print(text, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["olmoe", "qwen3-30b"], choices=MODELS)
    parser.add_argument("--parts", default="decode,prefill,mix,long")
    parser.add_argument("--budgets", type=int, nargs="+", default=[512, 8192])
    parser.add_argument("--seqs", type=int, default=512)
    parser.add_argument("--requests", type=int, default=2560)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    found: list[Found] = []
    for name in options.models:
        spec = MODELS[name]()
        bench = Bench(name, spec, parts_of(spec, torch.device("cuda:0")), options, random.Random(0))
        for budget in options.budgets:
            bench.start(budget, options.seqs)
            for part in options.parts.split(","):
                for row in getattr(bench, part)():
                    found.append({"model": name, "budget": budget, "part": part} | row)
                    say(json.dumps(found[-1]))
        del bench
        gc.collect()
        torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
