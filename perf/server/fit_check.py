"""Whether an engine without settings fits its GPU: its plan, what is free in use, and starts that must be refused.

    PYTHONPATH=.:kernels:tests python3 -m perf.server.fit_check --out DIR [--shapes olmoe] [--parts default,refusals]

The real start of an attention worker (services/attention/setup/build.py) with random weights of real shapes. Parts:

    default    no settings: the plan, beside what is used after the start, with the CUDA graphs, and at the peak of a
               load of long prompts and a full batch
    budgets    the plan by --max-num-batched-tokens 512, 2048, 8192, 16384
    refusals   settings that ask for too much, or too little: each must end in a typed error that says what to change
    crowded    another process holds most of the GPU; then most of it but what a small cache needs
    pair       two workers that divide the GPU, started at a time and under load

Needs one GPU, torch, triton, and what services.config imports (perf/server/gpu_env.sh). Prints as it goes and writes
fit.json to DIR. Exit code 1: memory ran out, a plan was exceeded, or a start was not refused. On a CPU
(``--device cpu``) it tries itself out with a small model; only ``default`` has anything to show there.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import logging
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from perf.kit.stand_ins import fill_in

fill_in()  # before the project's imports

import torch  # noqa: E402
from testkit.gpu.decode_bench import Parts, random_requests, run  # noqa: E402

from perf.server.offline import MODELS, parts_of  # noqa: E402
from services.attention.setup import build as setup  # noqa: E402
from services.attention.setup.build import Built, build  # noqa: E402
from services.config import Settings  # noqa: E402
from services.errors import StartupError  # noqa: E402
from services.model.spec import LayerSpec, ModelSpec  # noqa: E402

GIB = 1 << 30
HOLDER = """
import sys, torch
held = torch.empty(int(float(sys.argv[1]) * 2**30), dtype=torch.uint8, device="cuda")
print("holds", flush=True)
sys.stdin.read()
"""


def tiny() -> ModelSpec:
    """A model for trying this out on a CPU."""
    return replace(
        MODELS["qwen3-30b"](), vocab_size=512, hidden_size=64, num_heads=2, num_kv_heads=2, head_dim=32,
        max_position=512, layers=(LayerSpec(kind="moe"),) * 2, num_experts=4, top_k=2, expert_ffn=32,
    )  # fmt: skip


SHAPES = {
    "olmoe": lambda: replace(MODELS["olmoe"](), max_position=4096),
    "qwen3": MODELS["qwen3-30b"],
    "tiny": tiny,
}


class Check:
    """Starts workers of one model, whose weights are made once."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.spec = options, SHAPES[options.shapes]()
        self.device = torch.device(options.device)
        self.out = Path(options.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.results: list[dict[str, Any]] = []
        self.wrong = 0
        self._parts: Parts | None = None

    def note(self, part: str, **found: Any) -> None:
        self.results.append({"part": part, **found})
        shown = " ".join(
            f"{name}={value:.2f}" if isinstance(value, float) else f"{name}={value}" for name, value in found.items()
        )
        print(f"{part:>9} {shown}", flush=True)
        (self.out / "fit.json").write_text(json.dumps(self.results, indent=1))

    def must(self, holds: bool, part: str, what: str) -> None:
        if not holds:
            self.wrong += 1
            self.note(part, WRONG=what)

    def start(self, use: Callable[[Built[Any]], None] = lambda _: None, **values: Any) -> None:
        """Start a worker with these settings, ``use`` it, and give its memory back.

        Raises:
            StartupError: the worker refuses.
        """
        settings = Settings(model=self.out, device=self.options.device, dtype="bfloat16", **values)
        stand_ins = {
            "load_spec": lambda _: self.spec,
            "with_weights": lambda spec, _: spec,
            "load_model": lambda *_: self.parts().model,
            "_local_link": lambda *_: self.parts().link(),
        }
        try:
            with patch.multiple(setup, **stand_ins):
                use(build(settings, lambda: 0, worker="fit-check"))
        finally:
            self.release()

    def parts(self) -> Parts:
        """The weights, made once."""
        self._parts = self._parts or parts_of(self.spec, self.device)
        return self._parts

    def release(self) -> None:
        """Give back what a worker that is gone held."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def refused(self, part: str, says: str, **values: Any) -> None:
        """Start a worker that has to end in a typed error whose message has ``says`` in it."""
        message = ""
        try:
            self.start(lambda built: self.note(part, **values, plan=built.plan.line()), **values)
        except StartupError as error:
            message = error.message
            self.note(part, **values, refused=type(error).__name__, message=message)
        self.release()  # what the error's frames held
        self.must(says in message, part, f"{values}: no error with {says!r}")

    def used(self) -> float:
        """GiB of the GPU, by all."""
        if self.device.type != "cuda":
            return 0.0
        free, total = torch.cuda.mem_get_info(self.device)
        return (total - free) / GIB

    # default

    def default(self) -> None:
        began = time.perf_counter()

        def use(built: Built[Any]) -> None:
            self.note("default", start_s=time.perf_counter() - began)
            self._under_load("default", built)

        self.start(use, **self._given())

    def _given(self) -> dict[str, Any]:
        return {} if self.options.budget is None else {"max_num_batched_tokens": self.options.budget}

    def _under_load(self, part: str, built: Built[Any]) -> None:
        """Note what is used after the start, with graphs and at the peak, which no plan may be less than."""
        engine, plan = built.engine, built.plan
        self.note(part, plan=plan.line())
        after_start = self.used()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        engine.prepare()
        with_graphs = self.used()
        longest = min(plan.room.max_model_len - 8, 4000)
        many = min(2 * plan.size.max_num_seqs, plan.room.kv_tokens // 64)
        for count, length, tokens in ((min(16, plan.size.max_num_seqs), longest, 4), (many, 24, 40)):
            found = run(engine, random_requests(count, length, tokens, self.spec.vocab_size, seed=count))
            self.note(part, requests=count, prompt=length, decode_ms=found.median_ms, by_graph=found.graph_steps)
        stats = engine.stats()
        self.must(not any(stats.step_failures.values()), part, f"steps failed: {stats.step_failures}")
        at_end = self.used()
        self.note(
            part, used_after_start_gib=after_start, graphs_gib=with_graphs - after_start, used_after_load_gib=at_end,
            sequences=plan.size.max_num_seqs, kv_tokens=plan.room.kv_tokens,
            preemptions=stats.preemptions,
        )  # fmt: skip
        if plan.measured is None:
            return
        memory, demand = plan.measured.memory, plan.measured.demand
        planned = (memory.own + memory.others + demand.total + plan.kv_bytes) / GIB
        steps_gib = (torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_allocated(self.device)) / GIB
        self.note(
            part, planned_gib=planned, planned_activations_gib=demand.activations / GIB, activations_gib=steps_gib,
            planned_graphs_gib=demand.graphs / GIB, free_gib=memory.total / GIB - at_end,
        )  # fmt: skip
        self.must(at_end <= planned + 0.5, part, f"{at_end:.1f} GiB are used, and {planned:.1f} were planned")

    # budgets

    def budgets(self) -> None:
        for tokens in (512, 2048, 8192, 16_384):
            began = time.perf_counter()

            def use(built: Built[Any], began: float = began) -> None:
                self.note("budgets", plan=built.plan.line(), start_s=time.perf_counter() - began)

            self.start(use, max_num_batched_tokens=tokens)

    # refusals

    def refusals(self) -> None:
        """The largest share is bounded by what is free; all others have to be refused."""
        total = torch.cuda.get_device_properties(self.device).total_memory / GIB
        self.start(lambda built: self._under_load("refusals", built), gpu_memory_utilization=1.0)
        self.refused("refusals", "Give --gpu-memory-utilization 0.", gpu_memory_utilization=0.02)
        self.refused("refusals", "Lower --kv-memory-gib to at most", kv_memory_gib=round(total, 1))
        self.refused("refusals", "Give --max-num-batched-tokens", max_num_batched_tokens=1 << 20)
        longest = self.spec.max_position
        self.refused("refusals", f"--max-model-len {longest + 1} exceeds", max_model_len=longest + 1)
        self.refused("refusals", "Give --kv-memory-gib", kv_memory_gib=0.1, max_model_len=longest)

    # crowded

    def crowded(self) -> None:
        self.start(kv_memory_gib=1.0)  # the weights are there from then on
        free = torch.cuda.mem_get_info(self.device)[0] / GIB
        with holding(free - 2):
            self.refused("crowded", "Other processes hold")
        weights = torch.cuda.memory_allocated(self.device) / GIB
        with holding(free - weights - 4):
            self.start(lambda built: self._under_load("crowded", built), max_num_batched_tokens=512)

    # pair

    def pair(self) -> None:
        """Two processes, each with half; this one keeps nothing but its context on the GPU."""
        self._parts = None
        self.release()
        words = [
            sys.executable,
            "-m",
            "perf.server.fit_check",
            "--parts",
            "half",
            "--shapes",
            self.options.shapes,
            "--device",
            "cuda:0",
        ]
        halves = [subprocess.Popen([*words, "--out", str(self.out / f"half-{number}")]) for number in range(2)]
        codes = [half.wait() for half in halves]
        self.must(not any(codes), "pair", f"exit codes {codes}")
        for number in range(2):
            rows = json.loads((self.out / f"half-{number}" / "fit.json").read_text())
            self.results += [row | {"half": number} for row in rows]

    def half(self) -> None:
        def use(built: Built[Any]) -> None:
            self.note("half", plan=built.plan.line())
            built.engine.prepare()
            run(built.engine, random_requests(64, 2000, 64, self.spec.vocab_size))
            failures = built.engine.stats().step_failures
            self.must(not any(failures.values()), "half", f"steps failed: {failures}")
            self.note("half", used_by_both_gib=self.used())

        self.start(use, gpu_workers=2)


@contextmanager
def holding(gib: float) -> Iterator[None]:
    """Another process holds so much of the GPU."""
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(gib)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "holds\n"
        yield
    finally:
        other.communicate()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", default="fit-check")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--shapes", choices=SHAPES, default="olmoe")
    parser.add_argument("--parts", default="default,budgets,refusals,crowded,pair")
    parser.add_argument("--budget", type=int, help="--max-num-batched-tokens of the part default")
    parser.add_argument("--limit", type=float, default=570, help="seconds after which this ends itself")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.limit, exit=True)
    logging.basicConfig(level=logging.INFO, format="          %(levelname)s %(message)s", stream=sys.stdout)
    check = Check(options)
    for part in options.parts.split(","):
        began = time.perf_counter()
        try:
            getattr(check, part)()
        except Exception as error:  # noqa: BLE001 - the next part may still show something
            traceback.print_exc(file=sys.stdout)
            check.must(False, part, f"{type(error).__name__}: {error}")
        check.note(part, took_s=time.perf_counter() - began)
    print("WRONG" if check.wrong else "all as planned", flush=True)
    return 1 if check.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
