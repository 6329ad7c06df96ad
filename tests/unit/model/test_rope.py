"""Rotary frequencies of every kind, in both layouts of config.json, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from testkit.models.tiny_models import BASE, LLAMA3_ROPE, MIXTRAL, YARN_ROPE

from services.model.load_spec import load_spec
from services.model.rope import cos_sin, inverse_frequencies, rotate
from services.model.spec import RopeSpec

HEAD_DIM = 64
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0},
    "llama3": LLAMA3_ROPE,
    "llama3-narrow": LLAMA3_ROPE | {"low_freq_factor": 2.0, "high_freq_factor": 2.5, "rope_theta": 5e5},
    "yarn": YARN_ROPE,
    "yarn-mscale": YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn-mscale-alone": YARN_ROPE | {"mscale": 0.7},
    "yarn-attention-factor": YARN_ROPE | {"attention_factor": 0.9},
    "yarn-betas": YARN_ROPE | {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
    "yarn-small-factor": YARN_ROPE | {"factor": 1.0},
    "yarn-long": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "original_max_position_embeddings": 32768},
}


@pytest.mark.parametrize("original_outside", [False, True])
@pytest.mark.parametrize("rope", KINDS.values(), ids=KINDS)
def test_frequencies_equal_transformers(tmp_path: Path, rope: dict[str, Any], original_outside: bool) -> None:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralRotaryEmbedding

    values = BASE | MIXTRAL | {"head_dim": HEAD_DIM, "rope_parameters": dict(rope)}
    if original_outside:
        values["original_max_position_embeddings"] = 48
    (tmp_path / "config.json").write_text(json.dumps(values))
    embedding = MixtralRotaryEmbedding(MixtralConfig(**json.loads(json.dumps(values))))
    spec = load_spec(tmp_path)
    torch.testing.assert_close(
        inverse_frequencies(spec.rope, spec.head_dim), embedding.inv_freq, atol=0, rtol=16 * torch.finfo().eps
    )
    assert spec.rope.attention_factor == pytest.approx(embedding.attention_scaling)


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    frequency_I = inverse_frequencies(RopeSpec(theta=100.0), 8)
    q_1NH, k_1NH = torch.randn(2, 1, 1, 8, generator=torch.Generator().manual_seed(0))

    def score(query_position: int, key_position: int) -> float:
        q = rotate(q_1NH, *cos_sin(torch.tensor([query_position]), frequency_I, 1.0))
        k = rotate(k_1NH, *cos_sin(torch.tensor([key_position]), frequency_I, 1.0))
        torch.testing.assert_close(q.norm(), q_1NH.norm())
        return float((q * k).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert abs(score(9, 4) - score(9, 5)) > 1e-3
