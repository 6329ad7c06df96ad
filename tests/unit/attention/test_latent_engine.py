"""An engine whose cache holds latents: its graphs, its memory, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from testkit.gpu.decode_bench import Parts, load, request, run
from testkit.gpu.recorded_graph import record
from testkit.models.tiny_models import CONFIGS, save_model

from moe_kernels import backend
from services.attention.kv_cache import KVCache, block_bytes
from services.attention.setup.build import served_model
from services.attention.step.engine import Engine
from services.attention.step.fixed_inputs import row_buckets
from services.config import load_settings
from services.errors import ConfigError
from services.model.load_spec import load_spec

CPU = torch.device("cpu")
PROMPTS = [[5, 9, 11], [3], [7] * 14, [2, 4, 6, 8, 10], [90, 80, 70, 60, 50, 40, 30]]
V3 = {
    "model_type": "deepseek_v3", "vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "first_k_dense_replace": 3,
    "max_position_embeddings": 163_840, "rope_theta": 10_000, "eos_token_id": 1, "torch_dtype": "bfloat16",
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0,
                     "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1},
}  # fmt: skip
"""The sizes that DeepSeek-V3 and R1 were published with."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deepseek3")
    save_model(path, CONFIGS["deepseek3"])
    return path


@pytest.fixture(scope="module")
def latent(folder: Path) -> Parts:
    return load(folder, CPU, torch.float32)


def tokens(engine: Engine[Any], count: int = 9) -> list[list[int]]:
    requests = [request(f"r{at}", prompt, count, ignore_eos=False) for at, prompt in enumerate(PROMPTS)]
    return list(run(engine, requests).tokens.values())


def test_steps_of_decodes_are_replayed_and_others_are_not(latent: Parts, make_engine: Callable[..., Any]) -> None:
    sizes = {"max_num_seqs": 5, "max_num_batched_tokens": 16}
    eager, graphs = (
        make_engine(model=latent.model, link=latent.link(), capture=capture, **sizes) for capture in (None, record)
    )
    graphs.prepare()
    assert graphs.stats().graphs == len(row_buckets(5))
    assert tokens(graphs) == tokens(eager)
    stats = graphs.stats()
    assert 0 < stats.graph_steps < stats.steps, "prompts ran without"


def test_with_the_kernel_itself(latent: Parts, make_engine: Callable[..., Any]) -> None:
    sizes = {"max_num_seqs": 5, "max_num_batched_tokens": 16, "kv_blocks": 24, "max_model_len": 32}
    plain, graphs = (
        make_engine(model=latent.model, link=latent.link(), capture=capture, **sizes) for capture in (None, record)
    )
    with backend.forced("triton"):
        graphs.prepare()
        found = tokens(graphs, 3)
    assert found == tokens(plain, 3)
    assert graphs.stats().graph_steps > 0


def test_a_token_takes_what_the_paper_says(tmp_path: Path, folder: Path) -> None:
    """DeepSeek-V3 technical report, section 2.1: 512 and 64 numbers for each layer; and nothing else is allocated."""
    (tmp_path / "config.json").write_text(json.dumps(V3))
    assert load_spec(tmp_path).kv_bytes(2) == 61 * (512 + 64) * 2 == 70_272
    spec = load_spec(folder)
    each = block_bytes(spec, block_size=4, dtype=torch.float32)
    assert each == 4 * 3 * (26 + 10) * 4
    cache = KVCache(spec, num_blocks=7, block_size=4, dtype=torch.float32, device=CPU)
    held = [cache.latents(layer) for layer in range(spec.num_layers)]
    assert sum(one.untyped_storage().nbytes() for one in held) == 8 * each, "and the spare block"
    assert all(one.shape == (8, 4, 36) and one.is_contiguous() for one in held)


def test_blocks_are_zeroed(folder: Path) -> None:
    cache = KVCache(load_spec(folder), num_blocks=3, block_size=4, dtype=torch.float32, device=CPU)
    for layer in range(3):
        cache.latents(layer).fill_(1)
    cache.zero([1])
    cache.clear(torch.tensor([9, 10]))
    for layer in range(3):
        assert cache.latents(layer).sum(2).flatten().tolist() == [36.0] * 4 + [0.0] * 4 + [36.0, 0.0, 0.0] + [36.0] * 5


def test_batch_invariance_is_refused_by_name(folder: Path) -> None:
    options = ["--model", str(folder), "--device", "cpu"]
    assert served_model(load_settings(options)).spec.latent is not None
    with pytest.raises(ConfigError, match=r"--batch-invariant is not supported for model_type \"deepseek_v3\""):
        served_model(load_settings([*options, "--batch-invariant"]))
