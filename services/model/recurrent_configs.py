"""The families with recurrent layers beside attention: which keys of ``config.json`` they have, and their defaults."""

from __future__ import annotations

from dataclasses import replace

from services.errors import CheckpointError
from services.model.configfile import ConfigFile
from services.model.family_keys import (
    build,
    by_layer,
    layer_count,
    mtp_layers,
    refuse_others,
    sparse_after,
    sparse_layers,
)
from services.model.spec import LayerSpec, ModelSpec, RecurrentSpec, RouterSpec

MULTIMODAL = frozenset({"qwen3_5_moe"})
"""Families whose ``config.json`` has an object for the text part, and others for images."""
MAX_CONV = 64
"""Most tokens of a convolution: a state holds that many columns less one."""
_PARTS = ("text_config", "vision_config")


def text_config(config: ConfigFile) -> ConfigFile:
    """Return what ``config`` says of the text part, which is all of it but in multimodal families. What stands beside
    that part holds for it as well, and counts first where it is about tied embeddings."""
    part = (
        config.section("text_config") if config.values.get("model_type") in MULTIMODAL else ConfigFile(config.path, {})
    )
    if not part.values:
        return config
    beside = {key: value for key, value in config.values.items() if not isinstance(value, dict) or key not in _PARTS}
    first = {key: beside[key] for key in ("model_type", "tie_word_embeddings") if key in beside}
    return ConfigFile(config.path, beside | dict(part.values) | first)


def qwen3_next(config: ConfigFile, eos: tuple[int, ...]) -> ModelSpec:
    layers = sparse_layers(config, [None] * layer_count(config))
    return _qwen(
        config,
        eos,
        layers,
        by_head=True,
        num_experts=config.count("num_experts", "num_local_experts", default=512),
        top_k=10,
        renormalise=config.flag("norm_topk_prob", default=True),
    )


def qwen3_5_moe(config: ConfigFile, eos: tuple[int, ...]) -> ModelSpec:
    """Qwen3.5 and 3.6: the text part."""
    refuse_others(config, "norm_topk_prob", True)
    return _qwen(
        config,
        eos,
        sparse_after(config, 0),
        by_head=False,
        num_experts=config.count("num_experts", "num_local_experts", default=256),
        top_k=8,
        renormalise=True,
    )


def _qwen(
    config: ConfigFile,
    eos: tuple[int, ...],
    layers: list[LayerSpec],
    *,
    by_head: bool,
    num_experts: int,
    top_k: int,
    renormalise: bool,
) -> ModelSpec:
    refuse_others(config, "attn_output_gate", True)
    bias = config.flag("attention_bias", default=False)
    spec = build(
        config,
        eos,
        layers=_with_recurrence(config, layers),
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        router=RouterSpec(renormalise=renormalise),
        num_experts=num_experts,
        expert_ffn=config.count("moe_intermediate_size", default=512),
        shared_ffn=config.count("shared_expert_intermediate_size", default=512),
        head_dim=256,
        top_k=top_k,
        rotated=0.25,
        mtp_layers=mtp_layers(config, "mtp_num_hidden_layers", "num_nextn_predict_layers"),
    )
    return replace(spec, recurrent=_recurrent(config, by_head), output_gate=True, centred_norms=True)


def _with_recurrence(config: ConfigFile, layers: list[LayerSpec]) -> list[LayerSpec]:
    """``layer_types`` says which layers have attention; without it every ``full_attention_interval``-th."""
    types = by_layer(config, "layer_types", "full_attention", "linear_attention")
    interval = config.count("full_attention_interval", default=4)
    attends = [kind == "full_attention" for kind in types] or [(at + 1) % interval == 0 for at in range(len(layers))]
    if not any(attends):
        raise CheckpointError(
            f"{config.path}: none of the {len(layers)} layers has attention.",
            hint='Correct "layer_types" or "full_attention_interval": one layer at least has to be "full_attention".',
        )
    return [replace(layer, recurrent=not one) for layer, one in zip(layers, attends, strict=True)]


def _recurrent(config: ConfigFile, by_head: bool) -> RecurrentSpec:
    key_heads = config.count("linear_num_key_heads", default=16)
    value_heads = config.count("linear_num_value_heads", default=32)
    if value_heads % key_heads:
        expected = f'a multiple of the {key_heads} of "linear_num_key_heads"'
        raise config.wrong("linear_num_value_heads", expected, value_heads)
    return RecurrentSpec(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=config.count("linear_key_head_dim", default=128),
        value_dim=config.count("linear_value_head_dim", default=128),
        conv=config.count("linear_conv_kernel_dim", default=4, maximum=MAX_CONV),
        by_head=by_head,
    )
