"""Steps by CUDA graph on real GPUs: whether they are right, and what they cost against eager ones.

    PYTHONPATH=.:kernels:tests python3 perf/server/decode_graphs.py --out DIR                  (one GPU, some 4 minutes)
    PYTHONPATH=.:kernels:tests python3 perf/server/decode_graphs.py --parts kernel,pocket      (some of it)

    kernel   decode attention against its reference on CUDA: shapes, types, windows; in one graph while lengths change
    pocket   the pocket model in float32: greedy tokens by graph, eagerly and as recorded; step times of both
    disaggregated  the pocket model with experts on other GPUs through shared memory (two GPUs or more), while one of
             two replicas is killed, a third joins, the other is killed; not among the default parts
    tune     tiles of the kernel and programs per SM; not among the default parts
    prompts  Qwen3-30B-A3B's shapes: a layer's time by graph and eagerly with rows of a prompt in the step, by the past
             that they have; not among the default parts
    layers   Qwen3-30B-A3B's shapes, random weights: a layer's time by graph and eagerly, attention's GB/s, kernels

Needs torch, triton, numpy and msgspec. Prints as it goes, writes results.json to DIR, ends itself after ``--limit``
seconds. Exit code 1 if a part failed. On a CPU (``--device cpu``) it tries itself out, eagerly.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
import time
import traceback
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

from perf.kit.stand_ins import fill_in

MISSING = fill_in()

import torch  # noqa: E402
from testkit.gpu import decode_bench as kit  # noqa: E402
from testkit.models.tolerances import tolerance  # noqa: E402
from torch import Tensor  # noqa: E402

from moe_kernels import backend  # noqa: E402
from moe_kernels.paged_decode.op import paged_decode  # noqa: E402
from perf.server.decode_disaggregated import Disaggregated  # noqa: E402
from services.attention.step import cuda_graphs as graphs  # noqa: E402
from services.attention.step.cuda_graphs import CudaCapture  # noqa: E402
from services.attention.step.forward import forward  # noqa: E402
from services.model.inputs import DecodeRows, SequenceRows, StepInputs  # noqa: E402

POCKET = Path(__file__).resolve().parents[2] / "examples/pocket-moe"


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.out = Path(options.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.results: list[dict[str, Any]] = []
        self.wrong = 0
        self._cases: dict[tuple[int, int], list[tuple[Tensor, ...]]] = {}

    def note(self, part: str, **found: Any) -> None:
        self.results.append({"part": part, **found})
        shown = " ".join(
            f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in found.items()
        )
        print(f"{part:>8} {shown}", flush=True)
        (self.out / "results.json").write_text(json.dumps(self.results, indent=1, default=str))

    def must(self, holds: bool, part: str, what: str) -> None:
        if not holds:
            self.wrong += 1
            self.note(part, WRONG=what)

    def _capture(self) -> CudaCapture | None:
        return CudaCapture(self.device) if self.device.type == "cuda" else None

    # kernel

    def kernel(self) -> None:
        heads = [(8, 1, 128), (32, 4, 128), (4, 4, 64), (16, 2, 96), (6, 2, 80), (64, 1, 256), (2, 1, 32), (40, 8, 128)]
        checked, worst = 0, 0.0
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        sizes = [(shape, 16) for shape in heads] + [(heads[1], 5), (heads[4], 5)]
        for (shape, block_size), dtype, window in product(sizes, dtypes, (None, 100)):
            for lengths in ([1], [0, 17, 300, 1], [2500, 3, 0, 129, 128, 40, 1000, 0, 2], [700] * 40):
                ratio = self._against_twin(lengths, shape, block_size, dtype, window)
                what = f"{shape} blocks of {block_size} {dtype} window {window} lengths {lengths[:9]}: {ratio:.2f}"
                self.must(ratio <= 1, "kernel", what)
                worst, checked = max(worst, ratio), checked + 1
        self.note("kernel", checked=checked, worst_of_tolerance=worst)
        if self.device.type == "cuda":
            self._one_graph_for_all_lengths()

    def _case(
        self, lengths: list[int], shape: tuple[int, int, int], block_size: int, dtype: torch.dtype, blocks: int = 0
    ) -> tuple[Tensor, ...]:
        heads, kv_heads, head_dim = shape
        width = max(blocks, *(-(-length // block_size) for length in lengths), 1)
        generator = torch.Generator(self.device).manual_seed(len(lengths))
        pool = len(lengths) * width + 1
        draw = {"generator": generator, "device": self.device}
        k, v = (torch.randn(pool, block_size, kv_heads, head_dim, **draw).to(dtype) for _ in range(2))
        q = torch.randn(len(lengths), heads + kv_heads, head_dim, **draw).to(dtype)[:, :heads]
        table = torch.randperm(pool - 1, **draw).view(len(lengths), width).int()
        kv_len = torch.tensor(lengths, dtype=torch.int32, device=self.device)
        used = torch.arange(width, device=self.device) * block_size < kv_len[:, None]
        return q, k, v, table.masked_fill(~used, 1 << 30), kv_len

    def _against_twin(
        self, lengths: list[int], shape: tuple[int, int, int], block_size: int, dtype: torch.dtype, window: int | None
    ) -> float:
        """Greatest difference, in tolerances."""
        case = self._case(lengths, shape, block_size, dtype)
        found = paged_decode(*case, window=window)
        with backend.forced("torch"):
            wanted = paged_decode(case[0].float(), *case[1:], window=window)
        if not bool(found.isfinite().all()):
            return float("inf")
        difference = float((found.float() - wanted).abs().max())
        return difference / max(tolerance(wanted, dtype), 1e-30)

    def _one_graph_for_all_lengths(self) -> None:
        shape, size = (32, 4, 128), 16
        q, k, v, table, kv_len = self._case([4000] * 16, shape, size, torch.bfloat16)
        out: list[Tensor] = []
        replay = CudaCapture(self.device)(lambda: out.__setitem__(slice(None), [paged_decode(q, k, v, table, kv_len)]))
        for step, lengths in enumerate(([0] * 16, [4000] * 16, [1, 0, 130, 4000] * 4, list(range(16)))):
            kv_len.copy_(torch.tensor(lengths, dtype=torch.int32))
            table.copy_(table.roll(1, 0))
            replay()
            same = torch.equal(out[0], paged_decode(q, k, v, table, kv_len))
            self.must(same, "kernel", f"replay {step} differs from the call")
        self.note("kernel", graph_replays=4)

    # pocket

    def pocket(self) -> None:
        parts = kit.load(POCKET / "model", self.device, torch.float32)
        sizes = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "kv_blocks": 8192, "max_model_len": 512}
        eager, by_graph = parts.engine(None, **sizes), parts.engine(self._capture(), **sizes)
        began = time.perf_counter()
        by_graph.prepare()
        self.note("pocket", captured=by_graph.stats().graphs, prepare_s=time.perf_counter() - began)
        records = [json.loads(line) for line in (POCKET / "records/greedy.jsonl").read_text().splitlines()]
        for count in self.options.counts:
            some = records[:count]
            asked = [kit.request(one["id"], one["prompt_ids"], 48, ignore_eos=False) for one in some]
            ran = {name: kit.run(engine, asked) for name, engine in (("eager", eager), ("graphs", by_graph))}
            differ = sum(ran["eager"].tokens[one["id"]] != ran["graphs"].tokens[one["id"]] for one in some)
            unlike = {
                name: sum(_said(found.tokens[one["id"]]) != _said(one["output_ids"]) for one in some)
                for name, found in ran.items()
            }
            self.note(
                "pocket", sequences=len(some), differ=differ, unlike_record=unlike, replayed=ran["graphs"].graph_steps
            )
            self.must(not differ and not any(unlike.values()), "pocket", f"tokens of {len(some)} sequences")
        for count in self.options.counts:
            found = {}
            for name, engine in (("eager", eager), ("graphs", by_graph)):
                requests = kit.random_requests(count, 100, 40, parts.model.spec.vocab_size, seed=count)
                found[name] = kit.run(engine, requests).median_ms
            self.note("pocket", sequences=count, step_ms_eager=found["eager"], step_ms_graphs=found["graphs"])

    # disaggregated

    def disaggregated(self) -> None:
        gpus = torch.cuda.device_count() if self.device.type == "cuda" else 0
        found = Disaggregated(self.out, gpus, self.options.limit - 10).run()
        windows = found.pop("windows")
        self.note("disaggregated", **found)
        for text, window in windows.items():
            self.note("disaggregated", window=text, **window)
        self.must(
            not found["wrong_count"] and found["answers"] > 0, "disaggregated", "answers are not the recorded ones"
        )
        self.must(found["graphs_before"] == found["graphs_after"], "disaggregated", "graphs were captured again")
        self.must(found["replayed"] > 0, "disaggregated", "no step was replayed")

    # tune

    def tune(self) -> None:
        from moe_kernels.paged_decode import kernel

        context, before, least = self.options.context, kernel.tiles_for, kernel._PROGRAMS_PER_SM
        sizes = ((64, 4), (32, 4), (64, 8), (128, 8), (32, 2))
        for (length, warps), stages, programs in product(sizes, (3, 6, 8), (4, 8)):
            tiles = {"BLOCK_L": length, "num_warps": warps, "num_stages": stages}
            kernel.tiles_for = lambda *_, tiles=tiles: tiles
            kernel._PROGRAMS_PER_SM = programs
            try:
                found = [self._decode_us(count, context) for count in (1, 8, 32, 128, 256)]
            except Exception as error:  # noqa: BLE001 - too much shared memory, say
                found = [f"{type(error).__name__}: {str(error)[:60]}"]
            shown = " ".join(f"{us:.1f}" if isinstance(us, float) else us for us in found)
            self.note("tune", L=length, warps=warps, stages=stages, programs=programs, us=shown)
        kernel.tiles_for, kernel._PROGRAMS_PER_SM = before, least

    def _decode_us(self, count: int, context: int) -> float:
        """A call of Qwen3-30B-A3B's shape, over eight caches in turn."""
        key = count, context
        if key not in self._cases:
            self._cases |= {key: [self._case([context] * count, (32, 4, 128), 16, torch.bfloat16) for _ in range(8)]}
        cases = self._cases[key]
        work = CudaCapture(self.device)(lambda: [paged_decode(*case) for case in cases] and None)
        return self._us(work) / len(cases)

    # prompts

    def prompts(self) -> None:
        """Rows of a prompt, with pasts of several lengths, in steps with decoding sequences."""
        decodes, pasts, lengths = 32, (0, 1000, 4000, 16_000), (16, 64, 128, 256, 480)
        parts = self._qwen("prompts")
        engine = parts.engine(
            self._capture(), max_num_seqs=64, max_num_batched_tokens=2048, kv_blocks=4096, max_model_len=17_000
        )
        engine.prepare()
        graphs.MAX_READ_BYTES = 1 << 60
        model, kv, layers = engine._model, engine._kv, parts.model.spec.num_layers
        for past, length in product(pasts, lengths):
            inputs = self._with_prompt(decodes, past, length, kv.block_size)
            eager_us = self._us(lambda inputs=inputs: forward(model, engine._runner.link, kv, (inputs,))) / layers
            graph_us = -1.0
            if engine._graphs is not None:
                assert engine._graphs.replayed((inputs,)) is not None
                graph_us = self._us(lambda inputs=inputs: engine._graphs.replayed((inputs,))) / layers
            read = (length * past + length * (length + 1) // 2) * 2 * model.spec.kv_size * 2
            self.note(
                "prompts", decodes=decodes, past=past, rows=length, read_mib=read / 2**20, layer_us_eager=eager_us,
                layer_us_graph=graph_us,
            )  # fmt: skip

    def _with_prompt(self, decodes: int, past: int, length: int, size: int) -> StepInputs:
        first = self._inputs(decodes, 100, 8, size)
        blocks = range(8 * decodes, 8 * decodes + (past + length) // size + 1)

        def more(values_T: Tensor, values: list[int]) -> Tensor:
            return torch.cat((values_T, torch.tensor(values, device=self.device)))

        positions = list(range(past, past + length))
        return StepInputs(
            token_ids_T=more(first.token_ids_T, [7 + position % 1000 for position in positions]),
            positions_T=more(first.positions_T, positions),
            slots_T=more(first.slots_T, [blocks[position // size] * size + position % size for position in positions]),
            sequences=(SequenceRows(start=decodes, length=length, kv_len=past + length, blocks=blocks),),
            logits_rows_R=first.logits_rows_R,
            decodes=first.decodes,
        )

    # layers

    def _qwen(self, part: str) -> kit.Parts:
        spec = kit.qwen3_30b(self.options.layers)
        began = time.perf_counter()
        experts = kit.random_experts(spec, self.device, torch.bfloat16)
        model = kit.random_dense(spec, self.device, torch.bfloat16)
        self.note(part, layers=spec.num_layers, made_s=time.perf_counter() - began, copy_gb_s=self._copy_gb_s())
        return kit.Parts(model, kit.ExpertShard(experts, num_experts=spec.num_experts))

    def layers(self) -> None:
        options = self.options
        parts = self._qwen("layers")
        largest = max(options.counts)
        engine = parts.engine(
            self._capture(), max_num_seqs=largest, max_num_batched_tokens=8192, prefix_cache=False,
            kv_blocks=largest * (options.context // 16 + 8), max_model_len=options.context + 4096,
        )  # fmt: skip
        began = time.perf_counter()
        engine.prepare()
        reserved = torch.cuda.memory_reserved() / 2**30 if self.device.type == "cuda" else 0.0
        self.note(
            "layers", captured=engine.stats().graphs, prepare_s=time.perf_counter() - began, reserved_gib=reserved
        )
        for count in options.counts:
            prefill = count * options.context // 8192  # steps in which the first already decode
            requests = kit.random_requests(
                count, options.context, 24 + prefill, parts.model.spec.vocab_size, seed=count
            )
            found = kit.run(engine, requests)
            self._layer(engine, count, found)

    def _layer(self, engine: Any, count: int, found: kit.Run) -> None:
        """Times ``count`` sequences: the engine's steps, then the forward pass both ways, and attention alone."""
        model, kv, context = engine._model, engine._kv, self.options.context
        layers, size = model.spec.num_layers, kv.block_size
        blocks = -(-(context + 8) // size)
        inputs = self._inputs(count, context, blocks, size)
        eager_us = self._us(lambda: forward(model, engine._runner.link, kv, (inputs,))) / layers
        graph_us = -1.0
        if engine._graphs is not None:
            assert engine._graphs.replayed((inputs,)) is not None
            graph_us = self._us(lambda: engine._graphs.replayed((inputs,))) / layers
        moved = 2 * count * context * model.spec.kv_size * kv.layer(0)[0].element_size()
        attention_us = self._attention_us(model, kv, inputs)
        self.note(
            "layers", sequences=count, context=context, engine_step_ms=found.median_ms, replayed=found.graph_steps,
            layer_us_eager=eager_us, layer_us_graph=graph_us, attention_us=attention_us,
            attention_gb_s=moved / attention_us / 1e3,
        )  # fmt: skip
        if engine._graphs is not None and count in (1, 32, 256):
            self._kernels(lambda: engine._graphs.replayed((inputs,)), count)

    def _inputs(self, count: int, context: int, blocks: int, size: int) -> StepInputs:
        import numpy as np

        def of(values: Any) -> Tensor:
            return torch.as_tensor(values, dtype=torch.int64).to(self.device)

        table = np.arange(count * blocks, dtype=np.int64).reshape(count, blocks)
        position = context - 1
        return StepInputs(
            token_ids_T=of(range(7, 7 + count)), positions_T=of([position] * count),
            slots_T=of(table[:, position // size] * size + position % size), sequences=(), logits_rows_R=of([]),
            decodes=DecodeRows(kv_len_B=np.full(count, context, dtype=np.int64), blocks_BM=table),
        )  # fmt: skip

    def _attention_us(self, model: Any, kv: Any, inputs: StepInputs) -> float:
        """Microseconds of one call, over the caches of all layers in turn, so that none is in the L2."""
        assert inputs.decodes is not None
        spec, decodes = model.spec, inputs.decodes
        table = torch.from_numpy(decodes.blocks_BM).int().to(self.device)
        kv_len = torch.from_numpy(decodes.kv_len_B).int().to(self.device)
        q = torch.randn(len(decodes), spec.num_heads, spec.head_dim, device=self.device).to(model.dtype)

        def calls() -> None:
            for layer in range(spec.num_layers):
                paged_decode(q, *kv.layer(layer), table, kv_len)

        work = CudaCapture(self.device)(calls) if self.device.type == "cuda" else calls
        return self._us(work) / spec.num_layers

    @torch.inference_mode()
    def _us(self, work: Callable[[], Any], times: int = 20) -> float:
        for _ in range(3):
            work()
        if self.device.type != "cuda":
            return 1.0
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        first.record()
        for _ in range(times):
            work()
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last)) * 1e3 / times

    def _copy_gb_s(self) -> float:
        source = torch.zeros(
            (1 << 31) if self.device.type == "cuda" else 1 << 20, dtype=torch.uint8, device=self.device
        )
        target = torch.empty_like(source)
        return 2 * source.numel() / self._us(lambda: target.copy_(source)) / 1e3

    def _kernels(self, work: Callable[[], Any], count: int) -> None:
        with (
            torch.inference_mode(),
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled,
        ):
            for _ in range(3):
                work()
            torch.cuda.synchronize()
        found = sorted(profiled.key_averages(), key=lambda entry: -entry.device_time_total)
        total = sum(entry.device_time_total for entry in found) / 3 / self.options.layers
        print(f"         kernels of a layer at {count}: {total:.0f} us, the longest:")
        for entry in found[:14]:
            each = entry.count / 3 / self.options.layers
            print(f"         {entry.device_time:8.1f} us x {each:5.2f}  {entry.key[:90]}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", default="decode-graphs")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--parts", default="kernel,pocket,layers")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--limit", type=float, default=540, help="seconds after which this ends itself")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.limit, exit=True)
    bench = Bench(options)
    bench.note("start", torch=torch.__version__, stand_ins=MISSING, device=_name(bench.device))
    failed = []
    for part in options.parts.split(","):
        began = time.perf_counter()
        try:
            with torch.inference_mode():
                getattr(bench, part)()
        except Exception as error:  # noqa: BLE001 - the next part may still show something
            failed.append(part)
            traceback.print_exc(file=sys.stdout)
            bench.note(part, error=f"{type(error).__name__}: {error}")
        bench.note(part, took_s=time.perf_counter() - began)
    bench.note("end", wrong=bench.wrong, failed=failed)
    return 1 if bench.wrong or failed else 0


def _said(token_ids: list[int]) -> list[int]:
    """``token_ids`` without the token that ends an answer, which is 0."""
    return [token_id for token_id in token_ids[:48] if token_id]


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


if __name__ == "__main__":
    sys.exit(main())
