"""gpt-oss: how its ``config.json`` is read."""

from __future__ import annotations

from services.model.configfile import ConfigFile
from services.model.family_keys import build, layer_count, refuse_others, windows_by_type
from services.model.spec import LayerSpec, ModelSpec, RouterSpec

_ACTIVATION = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""Numbers of the experts' activation, which kernels have as constants."""
_WINDOW = 128
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def gpt_oss(config: ConfigFile, eos: tuple[int, ...]) -> ModelSpec:
    for key, only in _ACTIVATION.items():
        refuse_others(config, key, only, int(only))
    config = _with_defaults(config)
    bias = config.flag("attention_bias", default=True)
    sliding = [at % 2 == 0 for at in range(layer_count(config))]
    windows = windows_by_type(config, sliding, config.optional_count("sliding_window", default=_WINDOW))
    return build(
        config,
        eos,
        layers=[LayerSpec(kind="moe", window=window) for window in windows],
        sinks=True,
        qkv_bias=bias,
        o_bias=bias,
        router=RouterSpec(order="choose_first", logit_bias=True),
        num_experts=config.count("num_local_experts", "num_experts", default=128),
        expert_ffn=config.count("intermediate_size", default=2880),
        expert_bias=True,
        expert_activation="swiglu_oai",
        head_dim=64,
        top_k=4,
        top_k_keys=("num_experts_per_tok", "experts_per_token"),
        rms_eps=1e-5,
        theta=150_000.0,
    )


def _with_defaults(config: ConfigFile) -> ConfigFile:
    """Published ones name no dtype: what is not in MXFP4 is in bfloat16."""
    values = dict(config.values)
    if values.get("torch_dtype") is None and values.get("dtype") is None:
        values["dtype"] = "bfloat16"
    if not (config.section("rope_parameters").values or config.section("rope_scaling").values):
        values["rope_parameters"] = _ROPE
    return ConfigFile(config.path, values)
