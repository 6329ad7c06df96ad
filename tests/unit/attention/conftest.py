"""A tiny random checkpoint written by hand, so that these tests need no transformers, and engines over it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from services.attention.step.cuda_graphs import Capture
from services.attention.step.engine import Engine, EngineOptions
from services.attention.step.overlap import OverlapPolicy
from services.fabric.local import LocalHandle, LocalLink
from services.model.dense import DenseModel
from services.model.experts import ExpertShard
from services.model.load_spec import load_spec
from services.model.names import dense_shapes, expert_shapes
from services.model.progress import NoProgress
from services.model.reference import ReferenceModel
from services.model.weights import load_dense, load_experts

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "torch_dtype": "float32",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "use_sliding_window": False,
    "eos_token_id": 0,
    "bos_token_id": 1,
}


@dataclass
class TinyModel:
    """Where the checkpoint lies, and its oracle."""

    folder: Path
    reference: ReferenceModel

    def dense(self) -> DenseModel:
        spec = load_spec(self.folder)
        weights = load_dense(self.folder, spec, dtype=torch.float32, device=torch.device("cpu"), progress=NoProgress())
        return DenseModel(spec, weights)

    def link(self) -> LocalLink:
        spec = load_spec(self.folder)
        experts = load_experts(
            self.folder, spec, dtype=torch.float32, device=torch.device("cpu"), progress=NoProgress(), experts=None
        )
        return LocalLink(ExpertShard(experts, num_experts=spec.num_experts).by_layer(), num_experts=spec.num_experts)

    def greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        """What the oracle generates; it must be sure of every token and of every choice of experts."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + max_tokens:
            output = self.reference.run(tokens)
            best = output.logits_TV[-1].topk(2).values
            assert float(best[0] - best[1]) >= 1e-4
            assert float(output.router_margin_T.min()) >= 1e-4
            tokens.append(int(output.logits_TV[-1].argmax()))
            if tokens[-1] == 0:
                break
        return tokens[len(prompt) :]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    spec = load_spec(folder)
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, shape in (dense_shapes(spec) | expert_shapes(spec)).items():
        values = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.1 * values if len(shape) == 1 else 1.5 * values / shape[-1] ** 0.5
    save_file(tensors, folder / "model.safetensors")
    return TinyModel(folder, ReferenceModel.load(folder))


@pytest.fixture(params=["off", "all"], ids=["read at once", "lookahead"])
def make_engine(tiny: TinyModel, request: pytest.FixtureRequest) -> Callable[..., Engine[LocalHandle]]:
    """Engines over the tiny model, without and with lookahead; keyword arguments are the engine's options."""

    def make(
        *,
        model: DenseModel | None = None,
        link: Any = None,
        clock: Callable[[], int] = lambda: 0,
        overlap: OverlapPolicy | None = None,
        capture: Capture | None = None,
        **options: Any,
    ) -> Engine[LocalHandle]:
        defaults: dict[str, Any] = {
            "block_size": 4,
            "kv_blocks": 128,
            "max_num_batched_tokens": 64,
            "lookahead": request.param,
        }
        return Engine(
            model=model or tiny.dense(),
            link=link or tiny.link(),
            options=EngineOptions(**{**defaults, **options}),
            clock=clock,
            overlap=overlap,
            capture=capture,
        )

    return make
