"""The families: which keys of ``config.json`` each has, their defaults, and options of it that are not supported.

The defaults are those of transformers' config classes, because a checkpoint may leave a key out that equals them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from services.model.configfile import ConfigFile
from services.model.family_gpt_oss import gpt_oss
from services.model.family_keys import (
    DEFAULT_WINDOW,
    alternating_windows,
    build,
    layer_count,
    mtp_layers,
    refuse_others,
    sigmoid_router,
    sparse_after,
    sparse_by_list,
    sparse_layers,
    whole_number,
    windows_by_type,
)
from services.model.latent_config import deepseek_v2, deepseek_v3, glm4_moe_lite
from services.model.recurrent_configs import qwen3_5_moe, qwen3_next
from services.model.spec import LayerSpec, ModelSpec, RouterSpec

EndTokens = tuple[int, ...]


def _qwen3_moe(config: ConfigFile, eos: EndTokens) -> ModelSpec:
    window = None
    if config.flag("use_sliding_window", default=False):
        window = config.optional_count("sliding_window", default=DEFAULT_WINDOW)
    bias = config.flag("attention_bias", default=False)
    return build(
        config,
        eos,
        layers=sparse_layers(config, [window] * layer_count(config)),
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        router=RouterSpec(renormalise=config.flag("norm_topk_prob", default=False)),
        num_experts=config.count("num_experts", "num_local_experts", default=128),
        expert_ffn=config.count("moe_intermediate_size", default=768),
        top_k=8,
    )


def _qwen2_moe(config: ConfigFile, eos: EndTokens) -> ModelSpec:
    return build(
        config,
        eos,
        layers=sparse_layers(config, alternating_windows(config)),
        qkv_bias=config.flag("qkv_bias", default=True),
        router=RouterSpec(renormalise=config.flag("norm_topk_prob", default=False)),
        num_experts=config.count("num_experts", "num_local_experts", default=60),
        expert_ffn=config.count("moe_intermediate_size", default=1408),
        shared_ffn=config.count("shared_expert_intermediate_size", default=5632),
        top_k=4,
    )


def _mixtral(config: ConfigFile, eos: EndTokens) -> ModelSpec:
    window = config.optional_count("sliding_window")
    return build(
        config,
        eos,
        layers=[LayerSpec(kind="moe", window=window)] * layer_count(config),
        router=RouterSpec(renormalise=True),
        num_experts=config.count("num_local_experts", "num_experts", default=8),
        expert_ffn=config.count("intermediate_size"),
        top_k=2,
        rms_eps=1e-5,
        theta=1e6,
    )


def _olmoe(config: ConfigFile, eos: EndTokens) -> ModelSpec:
    bias = config.flag("attention_bias", default=False)
    spec = build(
        config,
        eos,
        layers=[LayerSpec(kind="moe")] * layer_count(config),
        qk_norm="projection",
        qkv_bias=bias,
        o_bias=bias,
        clip_qkv=config.optional_number("clip_qkv"),
        router=RouterSpec(renormalise=config.flag("norm_topk_prob", default=False)),
        num_experts=config.count("num_experts", "num_local_experts", default=64),
        expert_ffn=config.count("intermediate_size"),
        top_k=8,
        rms_eps=1e-5,
    )
    if spec.q_size != spec.hidden_size:
        raise config.wrong("head_dim", f"such that {spec.num_heads} heads are the hidden size", spec.head_dim)
    return spec


def _glm4_moe(config: ConfigFile, eos: EndTokens) -> ModelSpec:
    """GLM-4.5, 4.6 and 4.7."""
    expert_ffn = config.count("moe_intermediate_size", default=1408)
    return build(
        config,
        eos,
        layers=sparse_after(config, whole_number(config, "first_k_dense_replace", 1)),
        qk_norm="head" if config.flag("use_qk_norm", default=False) else "none",
        qkv_bias=config.flag("attention_bias", default=False),
        router=sigmoid_router(config, renormalise=True),
        num_experts=config.count("n_routed_experts", "num_local_experts", default=128),
        expert_ffn=expert_ffn,
        shared_ffn=expert_ffn * whole_number(config, "n_shared_experts", 1),
        shared_gated=False,
        top_k=8,
        rms_eps=1e-5,
        rotated=0.5,
        mtp_layers=mtp_layers(config, "num_nextn_predict_layers", "num_mtp_layers"),
    )


def _solar_open(config: ConfigFile, eos: EndTokens) -> ModelSpec:
    """GLM's layers, all with experts, without norms of queries and keys."""
    refuse_others(config, "first_k_dense_replace", 0)
    refuse_others(config, "use_qk_norm", False)
    expert_ffn = config.count("moe_intermediate_size", default=1280)
    return build(
        config,
        eos,
        layers=sparse_after(config, 0),
        qkv_bias=config.flag("attention_bias", default=False),
        router=sigmoid_router(config, renormalise=True),
        num_experts=config.count("n_routed_experts", "num_local_experts", default=128),
        expert_ffn=expert_ffn,
        shared_ffn=expert_ffn * whole_number(config, "n_shared_experts", 1),
        shared_gated=False,
        head_dim=128,
        top_k=8,
        rms_eps=1e-5,
        theta=1e6,
    )


def _dots1(config: ConfigFile, eos: EndTokens) -> ModelSpec:
    bias = config.flag("attention_bias", default=False)
    window = config.optional_count("sliding_window", default=DEFAULT_WINDOW)
    last = whole_number(config, "max_window_layers", 62)
    sliding = [window is not None and at >= last for at in range(layer_count(config))]
    windows = windows_by_type(config, sliding, window)
    expert_ffn = config.count("moe_intermediate_size", default=1408)
    return build(
        config,
        eos,
        layers=sparse_after(config, whole_number(config, "first_k_dense_replace", 0), windows),
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        router=sigmoid_router(config, renormalise=False),
        num_experts=config.count("n_routed_experts", "num_local_experts"),
        expert_ffn=expert_ffn,
        shared_ffn=expert_ffn * whole_number(config, "n_shared_experts", 0),
        shared_gated=False,
        top_k=None,
    )


def _minimax_m2(config: ConfigFile, eos: EndTokens) -> ModelSpec:
    refuse_others(config, "scoring_func", "sigmoid")
    refuse_others(config, "use_routing_bias", True)
    refuse_others(config, "use_qk_norm", True)
    refuse_others(config, "qk_norm_type", "per_layer")
    refuse_others(config, "shared_intermediate_size", 0)
    refuse_others(config, "attn_type_list", [1] * layer_count(config))
    head_dim = config.optional_count("head_dim") or 128
    return build(
        config,
        eos,
        layers=[LayerSpec(kind="moe")] * layer_count(config),
        qk_norm="projection",
        router=RouterSpec(score="sigmoid", renormalise=True, bias=True),
        num_experts=config.count("num_local_experts", "num_experts", default=256),
        expert_ffn=config.count("intermediate_size"),
        head_dim=head_dim,
        top_k=8,
        theta=5e6,
        rotated=config.count("rotary_dim", default=head_dim) / head_dim,
        mtp_layers=mtp_layers(config, "num_mtp_modules", default=0),
    )


def _exaone_moe(config: ConfigFile, eos: EndTokens) -> ModelSpec:
    """K-EXAONE. Queries and keys of layers without a window are not rotated."""
    # Published ones write the pattern in letters, beside the list that it stands for.
    each = 0 if config.strings("layer_types") else config.count("sliding_window_pattern", default=4)
    sliding = [bool(each and (at + 1) % each) for at in range(layer_count(config))]
    if config.values.get("sliding_window", DEFAULT_WINDOW) is None:
        raise config.wrong("sliding_window", "a whole number above 0", None)
    windows = windows_by_type(config, sliding, config.count("sliding_window", default=DEFAULT_WINDOW))
    layers = sparse_by_list(config, whole_number(config, "first_k_dense_replace", 1), windows)
    expert_ffn = config.count("moe_intermediate_size", default=1024)
    return build(
        config,
        eos,
        layers=[replace(layer, rotated=layer.window is not None) for layer in layers],
        qk_norm="head",
        router=sigmoid_router(config, renormalise=True, scale=2.5),
        num_experts=config.count("num_experts", "num_local_experts", default=64),
        expert_ffn=expert_ffn,
        shared_ffn=expert_ffn * whole_number(config, "num_shared_experts", 1),
        shared_gated=False,
        top_k=8,
        rms_eps=1e-5,
        mtp_layers=mtp_layers(config, "num_nextn_predict_layers"),
    )


def _hy_v3(config: ConfigFile, eos: EndTokens) -> ModelSpec:
    """Hunyuan 3."""
    refuse_others(config, "mlp_bias", False)
    bias = config.flag("attention_bias", default=False)
    expert_ffn = config.count("moe_intermediate_size", default=1536)
    return build(
        config,
        eos,
        layers=sparse_by_list(config, 1, [None] * layer_count(config)),
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        router=RouterSpec(
            score="sigmoid",
            renormalise=True,
            scale=config.number("router_scaling_factor", default=2.826),
            bias=True,
        ),
        num_experts=config.count("num_experts", "num_local_experts", default=192),
        expert_ffn=expert_ffn,
        shared_ffn=expert_ffn * whole_number(config, "num_shared_experts", 1),
        shared_gated=False,
        head_dim=128,
        top_k=8,
        rms_eps=1e-5,
        theta=11_158_840.0,
        mtp_layers=mtp_layers(config, "num_nextn_predict_layers"),
    )


def _ernie4_5_moe(config: ConfigFile, eos: EndTokens) -> ModelSpec:
    refuse_others(config, "use_bias", False)
    refuse_others(config, "compression_ratio", 1.0, 1)
    # Weights are divided by their sum, or by this if it is more, which no sum of probabilities chosen first comes near.
    refuse_others(config, "moe_norm_min", 1e-12)
    count = layer_count(config)
    first = whole_number(config, "moe_layer_start_index", 1)
    last = count - 1 if config.values.get("moe_layer_end_index") == -1 else None
    if last is None:
        last = whole_number(config, "moe_layer_end_index", count - 1)
    each = config.count("moe_layer_interval", default=1)
    expert_ffn = config.count("moe_intermediate_size", default=1536)
    return build(
        config,
        eos,
        layers=[
            LayerSpec(kind="moe" if first <= at <= last and (at + 1) % each == 0 else "dense") for at in range(count)
        ],
        router=RouterSpec(renormalise=True, bias=True),
        num_experts=config.count("moe_num_experts", "num_experts", default=64),
        expert_ffn=expert_ffn,
        shared_ffn=expert_ffn * whole_number(config, "moe_num_shared_experts", 2),
        shared_gated=False,
        top_k=6,
        top_k_keys=("moe_k", "num_experts_per_tok"),
        rms_eps=1e-5,
        theta=500_000.0,
        interleaved=True,
        tied=True,
        mtp_layers=mtp_layers(config, "num_nextn_predict_layers"),
    )


FAMILIES: Mapping[str, Callable[[ConfigFile, EndTokens], ModelSpec]] = {
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "dots1": _dots1,
    "ernie4_5_moe": _ernie4_5_moe,
    "exaone_moe": _exaone_moe,
    "glm4_moe": _glm4_moe,
    "gpt_oss": gpt_oss,
    "glm4_moe_lite": glm4_moe_lite,
    "hy_v3": _hy_v3,
    "kimi_k2": deepseek_v3,
    "minimax_m2": _minimax_m2,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "qwen2_moe": _qwen2_moe,
    "qwen3_5_moe": qwen3_5_moe,
    "qwen3_5_moe_text": qwen3_5_moe,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": qwen3_next,
    "solar_open": _solar_open,
}
"""How ``config.json`` of each family is read: by the name in ``model_type``, given the tokens that end a sequence."""
END_TOKENS: Mapping[str, EndTokens] = {"ernie4_5_moe": (2,), "exaone_moe": (53,), "minimax_m2": (200_020,)}
"""Tokens that end a sequence of families whose ``config.json`` need not name one."""
