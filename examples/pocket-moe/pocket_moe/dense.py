"""The models beside the Mixture-of-Experts, in the same code: its dense rival, and the speculators.

A dense model is a :class:`pocket_moe.model.PocketMoe` whose configuration has no experts.
"""

from __future__ import annotations

from pocket_moe.config import PocketConfig


def dense_like(config: PocketConfig) -> PocketConfig:
    """A qwen3 that does the same work per token as ``config``: one network as wide as the experts a token takes."""
    return PocketConfig(
        model_type="qwen3",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.num_experts_per_tok * config.moe_intermediate_size,
        rope_theta=config.rope_theta,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )


def speculator(target: PocketConfig, *, layers: int = 3) -> PocketConfig:
    """A llama with the target's vocabulary; 2.98 MB in bfloat16 with 3 layers, 2.69 MB with 2."""
    return PocketConfig(
        model_type="llama",
        vocab_size=target.vocab_size,
        hidden_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=256,
        rope_theta=target.rope_theta,
        max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=target.rms_norm_eps,
        eos_token_id=target.eos_token_id,
        pad_token_id=target.pad_token_id,
    )
