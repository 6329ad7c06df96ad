"""The models beside the Mixture-of-Experts, in the same code: its dense rival, and the speculators.

A dense model is a :class:`pocket_moe.model.PocketMoe` whose configuration has no experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from pocket_moe.config import PocketConfig

_NO_EXPERTS: Final[dict[str, Any]] = {
    "num_experts": 0,
    "num_experts_per_tok": 0,
    "moe_intermediate_size": 0,
    "norm_topk_prob": True,
}


def dense_like(config: PocketConfig) -> PocketConfig:
    """A qwen3 that does the same work per token as ``config``: one network as wide as the experts a token takes."""
    width = config.num_experts_per_tok * config.moe_intermediate_size
    return replace(config, model_type="qwen3", intermediate_size=width, **_NO_EXPERTS)


def speculator(target: PocketConfig, *, layers: int = 3) -> PocketConfig:
    """A llama with the target's vocabulary; 2.98 MB in bfloat16 with 3 layers, 2.69 MB with 2."""
    return replace(
        target,
        model_type="llama",
        hidden_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=256,
        **_NO_EXPERTS,
    )
