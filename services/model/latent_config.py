"""The families with multi-head latent attention: DeepSeek-V2, DeepSeek-V3 and R1, Kimi-K2, GLM-4.7-Flash."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from services.errors import UnsupportedModel
from services.model.configfile import ConfigFile
from services.model.family_keys import (
    build,
    layer_count,
    mtp_layers,
    refuse_others,
    sigmoid_router,
    sparse_after,
    sparse_by_list,
    whole_number,
)
from services.model.ropeconfig import softmax_factor
from services.model.spec import LatentSpec, ModelSpec, RouterSpec

EndTokens = tuple[int, ...]
MAX_RANK, MAX_SIZE = 512, 576
"""Numbers of a latent that :mod:`moe_kernels.paged_latent.op` takes, at most: of which values are made, and all."""


def deepseek_v3(config: ConfigFile, eos: EndTokens) -> ModelSpec:
    """DeepSeek-V3 and R1; Kimi-K2 has a name of its own for the same layers."""
    refuse_others(config, "topk_method", "noaux_tc")
    return _with_latents(
        config,
        eos,
        router=sigmoid_router(config, renormalise=True, scale=2.5, groups=8, top_groups=4),
        num_experts=config.count("n_routed_experts", "num_local_experts", default=256),
        expert_ffn=config.count("moe_intermediate_size", default=2048),
        shared=whole_number(config, "n_shared_experts", 1),
        layers=sparse_after(config, whole_number(config, "first_k_dense_replace", 3)),
        latent=_latent(config),
        interleaved=config.flag("rope_interleave", default=True),
        top_k=8,
        mtp_layers=mtp_layers(config, "num_nextn_predict_layers", "num_mtp_layers"),
    )


def deepseek_v2(config: ConfigFile, eos: EndTokens) -> ModelSpec:
    """DeepSeek-V2 and its Lite: a router by softmax, and groups by their best expert."""
    refuse_others(config, "topk_method", "greedy", "group_limited_greedy")
    refuse_others(config, "scoring_func", "softmax")
    refuse_others(config, "norm_topk_prob", False)  # transformers does not read it, and DeepSeek's code divides
    refuse_others(config, "mlp_bias", False)
    grouped = config.text("topk_method", default="greedy") == "group_limited_greedy"
    return _with_latents(
        config,
        eos,
        router=RouterSpec(
            scale=config.number("routed_scaling_factor", default=1.0),
            groups=config.count("n_group") if grouped else 1,
            top_groups=config.count("topk_group") if grouped else 1,
        ),
        num_experts=config.count("n_routed_experts", "num_experts", default=64),
        expert_ffn=config.count("moe_intermediate_size", default=1407),
        shared=whole_number(config, "n_shared_experts", 2),
        layers=sparse_after(config, whole_number(config, "first_k_dense_replace", 0)),
        latent=_latent(config),
        interleaved=True,
        top_k=None,
    )


def glm4_moe_lite(config: ConfigFile, eos: EndTokens) -> ModelSpec:
    """GLM-4.7-Flash: GLM's router, and DeepSeek-V3's attention."""
    refuse_others(config, "topk_method", "noaux_tc")
    refuse_others(config, "first_k_dense_replace", 1)  # mlp_layer_types says which layers have experts
    return _with_latents(
        config,
        eos,
        router=sigmoid_router(config, renormalise=True, scale=1.8),
        num_experts=config.count("n_routed_experts", "num_local_experts", default=64),
        expert_ffn=config.count("moe_intermediate_size", default=1536),
        shared=whole_number(config, "n_shared_experts", 1),
        layers=sparse_by_list(config, 1, [None] * layer_count(config)),
        latent=_latent(config, plain=192, value=256, query_rank=768),
        interleaved=config.flag("rope_interleave", default=True),
        top_k=4,
        rms_eps=1e-5,
        mtp_layers=mtp_layers(config, "num_nextn_predict_layers"),
    )


def _with_latents(
    config: ConfigFile, eos: EndTokens, *, latent: LatentSpec, shared: int, expert_ffn: int, **options: Any
) -> ModelSpec:
    """``shared``: experts that every row passes."""
    refuse_others(config, "moe_layer_freq", 1)
    refuse_others(config, "num_key_value_heads", config.count("num_attention_heads"))
    bias = config.flag("attention_bias", default=False)
    if bias and not latent.query_rank:
        raise UnsupportedModel(
            f"{config.path}: attention_bias without q_lora_rank is not supported.",
            hint="Supported are biases of the projections to latents.",
        )
    spec = build(
        config,
        eos,
        qkv_bias=bias,
        o_bias=bias,
        expert_ffn=expert_ffn,
        shared_ffn=expert_ffn * shared,
        shared_gated=False,
        head_dim=latent.rotated,
        **options,
    )
    return replace(
        spec,
        latent=latent,
        num_kv_heads=1,
        head_dim=latent.plain + latent.rotated,
        rope=replace(spec.rope, dim=latent.rotated),
    )


def _latent(config: ConfigFile, *, plain: int = 128, value: int = 128, query_rank: int = 1536) -> LatentSpec:
    """``plain``, ``value`` and ``query_rank`` are defaults of missing keys."""
    rotated, plain = config.count("qk_rope_head_dim", default=64), config.count("qk_nope_head_dim", default=plain)
    if rotated % 2:
        raise config.wrong("qk_rope_head_dim", "an even number", rotated)
    for key, size in (("head_dim", rotated), ("qk_head_dim", plain + rotated)):
        if config.optional_count(key, default=size) != size:
            raise config.wrong(key, f"{size}, as qk_rope_head_dim and qk_nope_head_dim have it", config.values[key])
    rank = config.count("kv_lora_rank", default=512)
    if rank > MAX_RANK or rank + rotated > MAX_SIZE:
        raise UnsupportedModel(
            f"{config.path}: kv_lora_rank {rank} with qk_rope_head_dim {rotated} is not supported.",
            hint=f"Supported are latents of at most {MAX_RANK} numbers, and {MAX_SIZE} with those that are rotated.",
        )
    direct = config.values.get("q_lora_rank", query_rank) is None
    return LatentSpec(
        rank=rank,
        rotated=rotated,
        plain=plain,
        value=config.count("v_head_dim", default=value),
        scale=(plain + rotated) ** -0.5 * softmax_factor(config),
        query_rank=0 if direct else config.count("q_lora_rank", default=query_rank),
    )
