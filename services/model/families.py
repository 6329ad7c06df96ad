"""Reads ``config.json`` for each family: its keys, its defaults, and options of it that are not supported.

The defaults are those of transformers' config classes, because a checkpoint may leave a key out that equals them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from services.errors import CheckpointError, UnsupportedModel
from services.model.configfile import ConfigFile, read_config, read_generation_config
from services.model.quantised.config import read_quantisation
from services.model.ropeconfig import rope_spec
from services.model.spec import DType, LayerSpec, ModelSpec, QKNorm, RouterSpec

DEFAULT_THETA = 10_000.0
MIXTRAL_THETA = 1_000_000.0
DEFAULT_WINDOW = 4096

MAX_LAYERS = 1 << 14
MAX_EXPERTS = 1 << 18
"""Most experts over all layers. The loader looks for several names for each, so a damaged number must not reach it."""


def spec_from_config(model_dir: Path) -> ModelSpec:
    """Return the spec of the checkpoint in ``model_dir``, checked, without its fingerprint."""
    config = read_config(model_dir)
    families: dict[str, Callable[[ConfigFile, tuple[int, ...]], ModelSpec]] = {
        "qwen3_moe": _qwen3_moe,
        "qwen2_moe": _qwen2_moe,
        "mixtral": _mixtral,
        "olmoe": _olmoe,
    }
    family = config.text("model_type")
    if family not in families:
        supported = ", ".join(sorted(families))
        dense = "" if "expert" in str(config.values) else ": it is not a Mixture-of-Experts model"
        raise UnsupportedModel(
            f'{config.path}: model_type "{family}" is not supported{dense}.', hint=f"Supported are {supported}."
        )
    _refuse_unsupported(config)
    eos_token_ids = read_generation_config(model_dir).integers("eos_token_id") or config.integers("eos_token_id")
    spec = families[family](config, eos_token_ids)
    _check(spec, config)
    return spec


def _qwen3_moe(config: ConfigFile, eos: tuple[int, ...]) -> ModelSpec:
    window = None
    if config.flag("use_sliding_window", default=False):
        window = config.optional_count("sliding_window", default=DEFAULT_WINDOW)
    bias = config.flag("attention_bias", default=False)
    return _build(
        config,
        eos,
        layers=_sparse_layers(config, [window] * _layer_count(config)),
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        renormalise=config.flag("norm_topk_prob", default=False),
        num_experts=config.count("num_experts", "num_local_experts", default=128),
        expert_ffn=config.count("moe_intermediate_size", default=768),
        top_k=8,
    )


def _qwen2_moe(config: ConfigFile, eos: tuple[int, ...]) -> ModelSpec:
    return _build(
        config,
        eos,
        layers=_sparse_layers(config, _alternating_windows(config)),
        qkv_bias=config.flag("qkv_bias", default=True),
        renormalise=config.flag("norm_topk_prob", default=False),
        num_experts=config.count("num_experts", "num_local_experts", default=60),
        expert_ffn=config.count("moe_intermediate_size", default=1408),
        shared_ffn=config.count("shared_expert_intermediate_size", default=5632),
        top_k=4,
    )


def _mixtral(config: ConfigFile, eos: tuple[int, ...]) -> ModelSpec:
    window = config.optional_count("sliding_window")
    return _build(
        config,
        eos,
        layers=[LayerSpec(kind="moe", window=window)] * _layer_count(config),
        renormalise=True,
        num_experts=config.count("num_local_experts", "num_experts", default=8),
        expert_ffn=config.count("intermediate_size"),
        top_k=2,
        rms_eps=1e-5,
        theta=MIXTRAL_THETA,
    )


def _olmoe(config: ConfigFile, eos: tuple[int, ...]) -> ModelSpec:
    bias = config.flag("attention_bias", default=False)
    return _build(
        config,
        eos,
        layers=[LayerSpec(kind="moe")] * _layer_count(config),
        qk_norm="projection",
        qkv_bias=bias,
        o_bias=bias,
        clip_qkv=config.optional_number("clip_qkv"),
        renormalise=config.flag("norm_topk_prob", default=False),
        num_experts=config.count("num_experts", "num_local_experts", default=64),
        expert_ffn=config.count("intermediate_size"),
        top_k=8,
        rms_eps=1e-5,
    )


def _build(
    config: ConfigFile,
    eos_token_ids: tuple[int, ...],
    *,
    layers: list[LayerSpec],
    renormalise: bool,
    num_experts: int,
    expert_ffn: int,
    top_k: int,
    shared_ffn: int = 0,
    qk_norm: QKNorm = "none",
    qkv_bias: bool = False,
    o_bias: bool = False,
    clip_qkv: float | None = None,
    rms_eps: float = 1e-6,
    theta: float = DEFAULT_THETA,
) -> ModelSpec:
    """Read the keys that all families share. ``top_k``, ``rms_eps`` and ``theta`` are defaults of missing keys."""
    hidden_size, num_heads = config.count("hidden_size"), config.count("num_attention_heads")
    vocab_size = config.count("vocab_size")
    head_dim = config.optional_count("head_dim") or hidden_size // num_heads
    max_position = config.count("max_position_embeddings")
    return ModelSpec(
        family=config.text("model_type"),
        dtype=_dtype(config),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=config.count("num_key_value_heads", default=num_heads),
        head_dim=head_dim,
        max_position=max_position,
        rms_eps=config.number("rms_norm_eps", default=rms_eps),
        rope=rope_spec(config, max_position=max_position, default_theta=theta),
        layers=tuple(layers),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        qk_norm=qk_norm,
        clip_qkv=clip_qkv,
        num_experts=num_experts,
        top_k=config.count("num_experts_per_tok", default=top_k),
        expert_ffn=expert_ffn,
        dense_ffn=config.count("intermediate_size") if any(layer.kind == "dense" for layer in layers) else 0,
        shared_ffn=shared_ffn,
        router=RouterSpec(renormalise=renormalise),
        tie_embeddings=config.flag("tie_word_embeddings", default=False),
        bos_token_id=config.token_id("bos_token_id"),
        # An end token outside the vocabulary (a leftover of the config class) can never be drawn.
        eos_token_ids=tuple(token for token in eos_token_ids if token < vocab_size),
        quantisation=read_quantisation(config, experts=num_experts),
    )


def _layer_count(config: ConfigFile) -> int:
    return config.count("num_hidden_layers", maximum=MAX_LAYERS)


def _sparse_layers(config: ConfigFile, windows: list[int | None]) -> list[LayerSpec]:
    """Every ``decoder_sparse_step``-th layer has experts, except those in ``mlp_only_layers``."""
    step = config.count("decoder_sparse_step", default=1)
    dense_only = config.integers("mlp_only_layers")
    return [
        LayerSpec(kind="dense" if index in dense_only or (index + 1) % step else "moe", window=window)
        for index, window in enumerate(windows)
    ]


def _alternating_windows(config: ConfigFile) -> list[int | None]:
    """``layer_types`` says which layers have the window; without it, every other layer below ``max_window_layers``."""
    count = _layer_count(config)
    if not config.flag("use_sliding_window", default=False):
        return [None] * count
    types = config.strings("layer_types")
    if not types:
        limit = config.count("max_window_layers", default=28)
        types = tuple("sliding_attention" if i % 2 == 0 and i < limit else "full_attention" for i in range(count))
    if len(types) != count or not set(types) <= {"sliding_attention", "full_attention"}:
        expected = f'{count} times "full_attention" or "sliding_attention"'
        raise config.wrong("layer_types", expected, list(types))
    window = config.count("sliding_window", default=DEFAULT_WINDOW)
    return [window if kind == "sliding_attention" else None for kind in types]


def _dtype(config: ConfigFile) -> DType:
    supported: dict[str, DType] = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}
    name = config.text("dtype", "torch_dtype", default="float32").removeprefix("torch.")
    if name not in supported:
        raise UnsupportedModel(
            f'{config.path}: dtype "{name}" is not supported.', hint=f"Supported are {', '.join(supported)}."
        )
    return supported[name]


def _refuse_unsupported(config: ConfigFile) -> None:
    activation = config.text("hidden_act", default="silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f'{config.path}: hidden_act "{activation}" is not supported.', hint="Supported is silu.")


def _check(spec: ModelSpec, config: ConfigFile) -> None:
    """Raise CheckpointError for numbers that are fine each by itself and contradict one another."""

    def demand(fits: bool, problem: str) -> None:
        if not fits:
            raise CheckpointError(
                f"{config.path}: {problem}.", hint="Correct the file, or download the checkpoint again."
            )

    heads, kv_heads, width = spec.num_heads, spec.num_kv_heads, spec.hidden_size
    explicit_head_dim = config.optional_count("head_dim") is not None
    demand(
        explicit_head_dim or width % heads == 0,
        f'"hidden_size" {width} is not divisible by "num_attention_heads" {heads}, and "head_dim" is not given',
    )
    demand(heads % kv_heads == 0, f'"num_attention_heads" {heads} is not divisible by "num_key_value_heads" {kv_heads}')
    demand(spec.head_dim % 2 == 0, f'"head_dim" {spec.head_dim} is odd; rotary embeddings need an even one')
    demand(
        spec.qk_norm != "projection" or spec.q_size == width,
        f'"head_dim" {spec.head_dim} times {heads} heads is not "hidden_size" {width}, as this architecture needs',
    )
    demand(
        spec.top_k <= spec.num_experts,
        f'"num_experts_per_tok" {spec.top_k} is more than the {spec.num_experts} experts there are',
    )
    demand(
        len(spec.moe_layers) * spec.num_experts <= MAX_EXPERTS,
        f"{len(spec.moe_layers)} layers of {spec.num_experts} experts are more than {MAX_EXPERTS} experts",
    )
