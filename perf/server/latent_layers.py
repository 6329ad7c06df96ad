"""Multi-head latent attention on a GPU: whether it is right, and what DeepSeek-V3's layers take with random weights.

    PYTHONPATH=.:kernels:tests python3 perf/server/latent_layers.py --out DIR                 (one GPU, some 6 minutes)
    PYTHONPATH=.:kernels:tests python3 perf/server/latent_layers.py --parts verify,kernel     (some of it)

    verify   a tiny DeepSeek-V3: in float32 greedy tokens by graph and eagerly are those of the oracle; in bfloat16 how
             many are
    kernel   paged_latent by heads, batch and context: us, GB/s of latents, TFLOP/s, as FlashMLA counts both
    layers   V3's shapes: a layer's time by graph and eagerly for decodes, and of a prompt's rows behind a past

Needs torch, triton, numpy and msgspec. Prints as it goes and writes results.json to DIR. Exit code 1 if a part failed.
On a CPU (``--device cpu``) it tries itself out with small sizes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from perf.kit.stand_ins import fill_in

MISSING = fill_in()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from testkit.gpu import decode_bench as kit  # noqa: E402
from torch import Tensor  # noqa: E402

from bench.latent_case import LatentCase, Latents  # noqa: E402
from services.attention.kv_cache import KVCache  # noqa: E402
from services.attention.step.cuda_graphs import CudaCapture  # noqa: E402
from services.attention.step.forward import forward  # noqa: E402
from services.model.dense import DenseModel  # noqa: E402
from services.model.experts import ExpertWeights  # noqa: E402
from services.model.inputs import DecodeRows, PagedRows, SequenceRows, StepInputs  # noqa: E402
from services.model.load_spec import load_spec  # noqa: E402
from services.model.names import (  # noqa: E402
    EMBED,
    FINAL_NORM,
    LM_HEAD,
    FfnNames,
    TensorNames,
    dense_shapes,
    expert_shapes,
    first_projections,
)
from services.model.reference import ReferenceModel  # noqa: E402
from services.model.spec import ModelSpec  # noqa: E402
from services.model.weights import DenseWeights, FfnWeights, LayerWeights  # noqa: E402

V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432,
    "num_attention_heads": 128, "num_key_value_heads": 128, "first_k_dense_replace": 1,
    "max_position_embeddings": 163_840, "eos_token_id": 1, "torch_dtype": "bfloat16",
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0,
                     "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1},
}  # fmt: skip
TINY = V3 | {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 192, "moe_intermediate_size": 96,
    "num_attention_heads": 6, "num_key_value_heads": 6, "num_hidden_layers": 3, "n_routed_experts": 16,
    "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "q_lora_rank": 72, "kv_lora_rank": 80,
    "qk_rope_head_dim": 24, "qk_nope_head_dim": 40, "v_head_dim": 48,
}  # fmt: skip
Tensors = Mapping[str, Tensor]


def spec_of(config: dict[str, Any]) -> ModelSpec:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return load_spec(Path(folder))


def drawn(shapes: Mapping[str, tuple[int, ...]], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Random weights: norms near 1, a bias near 0, others so that rows keep their size."""
    generator = torch.Generator(device).manual_seed(1)
    made = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator, device=device)
        vector = 0.1 * noise + (0.0 if "bias" in name else 1.0)
        scale = 1.0 if name == EMBED else shape[-1] ** -0.5 * (8.0 if name == LM_HEAD else 1.0)
        made[name] = (vector if len(shape) == 1 else noise * scale).to(dtype)
    return made


def dense_model(spec: ModelSpec, tensors: Tensors) -> DenseModel:
    names = TensorNames(spec.family)
    wide = tensors[EMBED].device.type == "cpu"

    def network(ffn: FfnNames) -> FfnWeights:
        return FfnWeights(gate_up_2FD=torch.cat((tensors[ffn.gate], tensors[ffn.up])), down_DF=tensors[ffn.down])

    def layer(at: int) -> LayerWeights:
        def part(name: str) -> Tensor:
            return tensors[names.layer(at, f"{name}.weight")]

        moe = spec.layers[at].kind == "moe"
        router = tensors[names.router(at)] if moe else None
        return LayerWeights(
            attention_norm_D=part("input_layernorm"), ffn_norm_D=part("post_attention_layernorm"),
            qkv_OD=torch.cat([part(f"self_attn.{name}") for name in first_projections(spec)]), qkv_bias_O=None,
            q_norm=part("self_attn.q_a_layernorm"), k_norm=part("self_attn.kv_a_layernorm"),
            q_b_OL=part("self_attn.q_b_proj"), kv_b_OC=part("self_attn.kv_b_proj"),
            o_DO=part("self_attn.o_proj"), o_bias_D=None, shared_gate_1D=None,
            ffn=network(names.shared_expert(at) if moe else names.dense_ffn(at)),
            router_ED=router.float() if router is not None and wide else router,
            router_bias_E=tensors[names.router_bias(at)].float() if moe else None,
        )  # fmt: skip

    layers = tuple(layer(at) for at in range(spec.num_layers))
    return DenseModel(
        spec,
        DenseWeights(embed_VD=tensors[EMBED], layers=layers, norm_D=tensors[FINAL_NORM], lm_head_VD=tensors[LM_HEAD]),
    )


def stacked_experts(spec: ModelSpec, tensors: Tensors) -> dict[int, ExpertWeights]:
    names = TensorNames(spec.family)
    made = {}
    for layer in spec.moe_layers:
        ffns = [names.expert(layer, expert) for expert in range(spec.num_experts)]
        made[layer] = ExpertWeights(
            expert_ids=tuple(range(spec.num_experts)),
            w_gate_up_E2FD=torch.stack([torch.cat((tensors[ffn.gate], tensors[ffn.up])) for ffn in ffns]),
            w_down_EDF=torch.stack([tensors[ffn.down] for ffn in ffns]),
        )
    return made


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, torch.device(options.device)
        self.on_gpu = self.device.type == "cuda"
        self.out = Path(options.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.results: list[dict[str, Any]] = []
        self.wrong = 0

    def note(self, part: str, **found: Any) -> None:
        self.results.append({"part": part, **found})
        shown = (
            f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in found.items()
        )
        print(f"{part:>8} {' '.join(shown)}", flush=True)
        (self.out / "results.json").write_text(json.dumps(self.results, indent=1))

    def must(self, holds: bool, part: str, what: str) -> None:
        self.wrong += not holds
        self.note(part, what=what, holds=holds)

    def capture(self) -> CudaCapture | None:
        return CudaCapture(self.device) if self.on_gpu else None

    def verify(self) -> None:
        spec = spec_of(TINY)
        shapes = dense_shapes(spec) | expert_shapes(spec)
        given = drawn(shapes, torch.device("cpu"), torch.float32)
        oracle = ReferenceModel(spec, given)
        prompts = [
            [(7 * at + 3 * place) % 500 for place in range(length)] for at, length in enumerate((3, 40, 90, 1, 300))
        ]
        requests = [kit.request(f"r{at}", prompt, 12) for at, prompt in enumerate(prompts)]
        wanted = {f"r{at}": greedy(oracle, prompt, 12) for at, prompt in enumerate(prompts)}
        for dtype in (torch.float32, torch.bfloat16):
            found = []
            for capture in (None, self.capture()):
                tensors = {name: tensor.to(self.device, dtype) for name, tensor in given.items()}
                shard = kit.ExpertShard(stacked_experts(spec, tensors), num_experts=spec.num_experts)
                engine = kit.Parts(dense_model(spec, tensors), shard).engine(
                    capture, max_num_seqs=5, max_num_batched_tokens=64, kv_blocks=64, max_model_len=400
                )
                engine.prepare()
                found.append(kit.run(engine, requests))
            for name, run in zip(("eagerly", "by graph"), found, strict=True):
                same = [one == other for key in wanted for one, other in zip(wanted[key], run.tokens[key], strict=True)]
                self.note("verify", dtype=str(dtype), steps=name, oracles_tokens=sum(same) / len(same))
                if dtype == torch.float32:
                    self.must(all(same), "verify", f"tokens {name} are the oracle's")
            if self.on_gpu:
                self.must(found[1].graph_steps > 0, "verify", "there were steps by graph")

    def kernel(self) -> None:
        kind, contexts = ("bf16", (1024, 4096, 8192, 32_768)) if self.on_gpu else ("fp32", (40,))
        for heads in (16, 64, 128):
            for context in contexts:
                for batch in (1, 16, 64, 128, 256) if self.on_gpu else (2,):
                    if batch * context > 1 << 21:
                        continue
                    case = LatentCase(Latents(name="v3", heads=heads), (context,) * batch, kind, self.options.device)
                    calls = max(4, case.copies)
                    us = self.us(self.graph(partial(in_turn, case, calls))) / calls
                    self.note(
                        "kernel", heads=heads, context=context, batch=batch, us=us, gb_s=case.read_bytes / us / 1e3,
                        tflop_s=case.flops / us / 1e6, floor=case.floor_us / us, deviation=case.deviation(case()),
                    )  # fmt: skip
                    del case

    def graph(self, work: Callable[[], Any]) -> Callable[[], Any]:
        return CudaCapture(self.device)(work) if self.on_gpu else work

    def layers(self) -> None:
        spec = spec_of((V3 if self.on_gpu else TINY) | {"num_hidden_layers": self.options.layers})
        dtype = torch.bfloat16 if self.on_gpu else torch.float32
        began = time.perf_counter()
        model = dense_model(spec, drawn(dense_shapes(spec), self.device, dtype))
        experts = kit.random_experts(spec, self.device, dtype)
        parts = kit.Parts(model, kit.ExpertShard(experts, num_experts=spec.num_experts))
        self.note("layers", layers=spec.num_layers, moe=len(spec.moe_layers), made_s=time.perf_counter() - began)
        contexts, counts = ((1024, 8192), (1, 8, 64, 256)) if self.on_gpu else ((40,), (2,))
        blocks = max(contexts) // 16 + 1
        kv = KVCache(spec, num_blocks=max(counts) * blocks, block_size=16, dtype=dtype, device=self.device)
        link = parts.link()
        for context in contexts:
            for count in counts:
                inputs = self.decodes(count, context, blocks)
                step = self.us(partial(forward, model, link, kv, (inputs,)))
                fixed = self.graph(partial(forward, model, link, kv, (self.fixed(model, inputs),)))
                self.note(
                    "layers", decodes=count, context=context, layer_us_eager=step / spec.num_layers,
                    layer_us_graph=self.us(fixed) / spec.num_layers,
                )  # fmt: skip
        for past, rows in ((0, 2048), (0, 8192), (6144, 2048), (8000, 128), (8000, 8)) if self.on_gpu else ((16, 8),):
            inputs = self.piece(past, rows)
            step = self.us(partial(forward, model, link, kv, (inputs,)))
            peak = torch.cuda.max_memory_allocated(self.device) / 2**30 if self.on_gpu else 0.0
            self.note("layers", past=past, rows=rows, layer_us_eager=step / spec.num_layers, peak_gib=peak)

    def of(self, values: Any) -> Tensor:
        return torch.as_tensor(np.asarray(values, dtype=np.int64)).to(self.device)

    def decodes(self, count: int, context: int, blocks: int) -> StepInputs:
        table = np.arange(count * blocks, dtype=np.int64).reshape(count, blocks)
        at = context - 1
        return StepInputs(
            token_ids_T=self.of(range(7, 7 + count)), positions_T=self.of([at] * count),
            slots_T=self.of(table[:, at // 16] * 16 + at % 16), sequences=(), logits_rows_R=self.of([]),
            decodes=DecodeRows(kv_len_B=np.full(count, context, dtype=np.int64), blocks_BM=table),
        )  # fmt: skip

    def fixed(self, model: DenseModel, inputs: StepInputs) -> StepInputs:
        """The same step, as a graph has it."""
        latent = model.plan(inputs, 16).latent
        assert latent is not None
        rows = latent.rows[0]
        return replace(inputs, decodes=None, paged=PagedRows(kv_len_B=rows.kv_len_B, blocks_BM=rows.blocks_BM))

    def piece(self, past: int, rows: int) -> StepInputs:
        positions = range(past, past + rows)
        return StepInputs(
            token_ids_T=self.of([7 + position % 400 for position in positions]), positions_T=self.of(positions),
            slots_T=self.of(positions), logits_rows_R=self.of([]),
            sequences=(SequenceRows(start=0, length=rows, kv_len=past + rows, blocks=range((past + rows) // 16 + 1)),),
        )  # fmt: skip

    @torch.inference_mode()
    def us(self, work: Callable[[], Any], times: int = 20) -> float:
        for _ in range(3):
            work()
        if not self.on_gpu:
            return 1.0
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        first.record()
        for _ in range(times):
            work()
        last.record()
        torch.cuda.synchronize()
        return 1e3 * float(first.elapsed_time(last)) / times


def in_turn(case: LatentCase, calls: int) -> list[Tensor]:
    """Over as many caches as there are, so that none is in the L2."""
    return [case(number) for number in range(calls)]


def greedy(oracle: ReferenceModel, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(int(oracle.logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="build/latent_layers")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parts", default="verify,kernel,layers")
    parser.add_argument("--layers", type=int, default=4, help="the first has no experts; each other takes 22.5 GB")
    bench = Bench(parser.parse_args())
    for part in bench.options.parts.split(","):
        try:
            with torch.inference_mode():
                getattr(bench, part)()
        except Exception:  # noqa: BLE001  the other parts still run
            traceback.print_exc()
            bench.wrong += 1
    return 1 if bench.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
