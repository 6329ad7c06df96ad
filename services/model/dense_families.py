"""The families without experts. They are not served by themselves: they draft for models with experts.

The defaults are those of transformers' config classes, as in :mod:`services.model.family_configs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from services.model.configfile import ConfigFile
from services.model.family_keys import DEFAULT_WINDOW, build, layer_count, refuse_others, whole_number, windows_by_type
from services.model.spec import LayerSpec, ModelSpec, RouterSpec

EndTokens = tuple[int, ...]


def _llama(config: ConfigFile, eos: EndTokens) -> ModelSpec:
    refuse_others(config, "mlp_bias", False)
    bias = config.flag("attention_bias", default=False)
    return build(
        config,
        eos,
        layers=[LayerSpec(kind="dense")] * layer_count(config),
        qkv_bias=bias,
        o_bias=bias,
        router=RouterSpec(),
        num_experts=0,
        expert_ffn=0,
        top_k=None,
    )


def _qwen3(config: ConfigFile, eos: EndTokens) -> ModelSpec:
    bias, window = config.flag("attention_bias", default=False), None
    if config.flag("use_sliding_window", default=False):
        window = config.optional_count("sliding_window", default=DEFAULT_WINDOW)
    first = whole_number(config, "max_window_layers", 28)
    sliding = [window is not None and at >= first for at in range(layer_count(config))]
    return build(
        config,
        eos,
        layers=[LayerSpec(kind="dense", window=one) for one in windows_by_type(config, sliding, window)],
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        router=RouterSpec(),
        num_experts=0,
        expert_ffn=0,
        top_k=None,
        head_dim=128,
    )


DENSE_FAMILIES: Mapping[str, Callable[[ConfigFile, EndTokens], ModelSpec]] = {"llama": _llama, "qwen3": _qwen3}
"""How ``config.json`` of each family is read, by the name in ``model_type``."""
