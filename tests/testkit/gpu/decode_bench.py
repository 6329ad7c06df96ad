"""Engines on one GPU that decode, by graph and eagerly, over weights from a folder or random ones, for measurements.

Legend: D hidden size, E experts, F expert width.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.attention.step.cuda_graphs import Capture
from services.attention.step.engine import Engine, EngineOptions
from services.fabric.local import LocalLink
from services.messages import GenerateRequest, SamplingParams
from services.model.dense import DenseModel
from services.model.experts import ExpertShard, ExpertWeights
from services.model.load_spec import load_spec
from services.model.products import Products
from services.model.spec import LayerSpec, ModelSpec, RopeSpec, RouterSpec
from services.model.weights import DenseWeights, LayerWeights, load_dense, load_experts


@dataclass
class Parts:
    """What engines are made of; made once."""

    model: DenseModel
    shard: ExpertShard

    def link(self) -> LocalLink:
        return LocalLink(self.shard.by_layer(), num_experts=self.model.spec.num_experts)

    def engine(self, capture: Capture | None, *, link: Any = None, **options: Any) -> Engine[Any]:
        return Engine(
            model=self.model,
            link=link or self.link(),
            options=EngineOptions(**options),
            clock=lambda: 0,
            capture=capture,
        )


def load(folder: Path, device: torch.device, dtype: torch.dtype, products: Products | None = None) -> Parts:
    spec = load_spec(folder)
    experts = load_experts(folder, spec, dtype=dtype, device=device)
    dense = DenseModel(spec, load_dense(folder, spec, dtype=dtype, device=device), products)
    shard = ExpertShard(experts, num_experts=spec.num_experts, products=products, activation=spec.expert_activation)
    return Parts(dense, shard)


def qwen3_30b(layers: int) -> ModelSpec:
    """Qwen3-30B-A3B's shapes, with fewer layers."""
    return ModelSpec(
        family="qwen3_moe", dtype="bfloat16", vocab_size=151_936, hidden_size=2048, num_heads=32, num_kv_heads=4,
        head_dim=128, max_position=40_960, rms_eps=1e-6, rope=RopeSpec(theta=1e6),
        layers=(LayerSpec(kind="moe"),) * layers, qkv_bias=False, o_bias=False, qk_norm="head", clip_qkv=None,
        num_experts=128, top_k=8, expert_ffn=768, dense_ffn=0, shared_ffn=0, router=RouterSpec(renormalise=True),
        tie_embeddings=True, bos_token_id=None, eos_token_ids=(),
    )  # fmt: skip


def random_dense(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> DenseModel:
    """Equal in every process that asks for it on a device of the same kind."""
    generator = torch.Generator(device).manual_seed(1)

    def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) / shape[-1] ** 0.5).to(dtype)

    router = dtype if device.type == "cuda" else torch.float32
    ones_D = torch.ones(spec.hidden_size, dtype=dtype, device=device)
    ones_H = torch.ones(spec.head_dim, dtype=dtype, device=device)
    layers = tuple(
        LayerWeights(
            attention_norm_D=ones_D, qkv_OD=draw(spec.q_size + 2 * spec.kv_size, spec.hidden_size), qkv_bias_O=None,
            q_norm=ones_H, k_norm=ones_H, o_DO=draw(spec.hidden_size, spec.q_size), o_bias_D=None, ffn_norm_D=ones_D,
            ffn=None, shared_gate_1D=None, router_ED=draw(spec.num_experts, spec.hidden_size, dtype=router) * 4,
        )
        for _ in spec.layers
    )  # fmt: skip
    embed_VD = draw(spec.vocab_size, spec.hidden_size) * spec.hidden_size**0.5
    head_VD = embed_VD if spec.tie_embeddings else draw(spec.vocab_size, spec.hidden_size) * 4
    return DenseModel(spec, DenseWeights(embed_VD=embed_VD, layers=layers, norm_D=ones_D, lm_head_VD=head_VD))


def random_experts(
    spec: ModelSpec, device: torch.device, dtype: torch.dtype, ids: tuple[int, ...] | None = None
) -> dict[int, ExpertWeights]:
    """Of each layer, or ``ids`` of each; equal in every process."""
    ids = tuple(range(spec.num_experts)) if ids is None else ids
    made = {}
    for layer in spec.moe_layers:
        parts: list[tuple[Tensor, Tensor]] = []
        for expert in ids:
            generator = torch.Generator(device).manual_seed(1000 * layer + expert)
            drawn = [
                (torch.randn(shape, generator=generator, device=device) / shape[1] ** 0.5).to(dtype)
                for shape in ((2 * spec.expert_ffn, spec.hidden_size), (spec.hidden_size, spec.expert_ffn))
            ]
            parts.append((drawn[0], drawn[1]))
        made[layer] = ExpertWeights(
            expert_ids=ids,
            w_gate_up_E2FD=torch.stack([part[0] for part in parts]),
            w_down_EDF=torch.stack([part[1] for part in parts]),
        )
    return made


def request(name: str, prompt: list[int], max_tokens: int, **sampling: Any) -> GenerateRequest:
    """Greedy and to ``max_tokens`` unless it says otherwise."""
    sampling = {"temperature": 0.0, "seed": 1, "ignore_eos": True} | sampling
    return GenerateRequest(
        id=name, attempt=1, token_ids=prompt, prompt_len=len(prompt), deadline_ms=10**15, priority=5, tenant="t",
        reply_to="g", sampling=SamplingParams(max_tokens=max_tokens, **sampling),
    )  # fmt: skip


@dataclass
class Run:
    """Tokens by request, and the times of the steps that did nothing but decode all of them, seconds."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    decode_s: list[float] = field(default_factory=list)
    graph_steps: int = 0

    @property
    def median_ms(self) -> float:
        return 1e3 * statistics.median(self.decode_s) if self.decode_s else -1.0


def run(engine: Engine[Any], requests: list[GenerateRequest], most_steps: int = 100_000) -> Run:
    """To the end of all requests, or that many steps."""
    found = Run(tokens={each.id: [] for each in requests})
    for each in requests:
        engine.add(each)
    before = engine.stats().graph_steps
    drawn = prefilled = 0
    for _ in range(most_steps):
        if not engine.has_work:
            break
        for event in engine.step():
            assert event.error is None, event.error
            if event.token_id is not None:
                found.tokens[event.request_id].append(event.token_id)
        stats = engine.stats()
        if stats.prefill_tokens == prefilled and stats.decode_tokens - drawn == len(requests):
            found.decode_s.append(stats.step_seconds)
        drawn, prefilled = stats.decode_tokens, stats.prefill_tokens
    found.graph_steps = engine.stats().graph_steps - before
    return found


def random_requests(count: int, prompt: int, max_tokens: int, vocab: int, seed: int = 0) -> list[GenerateRequest]:
    draw = random.Random(seed)
    return [
        request(f"r{number}", [draw.randrange(4, vocab) for _ in range(prompt)], max_tokens) for number in range(count)
    ]


def answers_of(engine: Engine[Any], requests: list[GenerateRequest]) -> dict[str, list[Any]]:
    """The tokens of each request and their log-probabilities, of which all bits are compared."""
    found: dict[str, list[Any]] = {each.id: [] for each in requests}
    for each in requests:
        engine.add(each)
    while engine.has_work:
        for event in engine.step():
            assert event.error is None, event.error
            if event.token_id is not None:
                found[event.request_id].append((event.token_id, event.logprob))
    return found
