"""Keys of ``config.json`` that several families share, and what layers and routers follow from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from services.errors import UnsupportedModel
from services.model.configfile import ConfigFile
from services.model.quantised.config import read_quantisation
from services.model.ropeconfig import rope_spec
from services.model.spec import DType, ExpertActivation, LayerSpec, ModelSpec, QKNorm, RouterSpec

MAX_LAYERS = 1 << 14
MAX_MTP_LAYERS = 64
DEFAULT_THETA = 10_000.0
DEFAULT_WINDOW = 4096


def build(
    config: ConfigFile,
    eos_token_ids: tuple[int, ...],
    *,
    layers: list[LayerSpec],
    router: RouterSpec,
    num_experts: int,
    expert_ffn: int,
    top_k: int | None,
    top_k_keys: tuple[str, ...] = ("num_experts_per_tok",),
    shared_ffn: int = 0,
    shared_gated: bool = True,
    head_dim: int = 0,
    qk_norm: QKNorm = "none",
    qkv_bias: bool = False,
    o_bias: bool = False,
    clip_qkv: float | None = None,
    rms_eps: float = 1e-6,
    theta: float = DEFAULT_THETA,
    rotated: float | None = None,
    interleaved: bool = False,
    tied: bool = False,
    mtp_layers: int = 0,
    sinks: bool = False,
    expert_bias: bool = False,
    expert_activation: ExpertActivation = "swiglu",
) -> ModelSpec:
    """Read the keys that all families share. ``top_k``, ``head_dim`` (0: that of the hidden size), ``rms_eps``,
    ``theta``, ``tied`` and ``rotated`` (the part of a head; None: the family has no such key) are defaults of missing
    keys. A model without experts has ``num_experts`` 0."""
    hidden_size, num_heads = config.count("hidden_size"), config.count("num_attention_heads")
    vocab_size = config.count("vocab_size")
    head_dim = config.optional_count("head_dim") or head_dim or hidden_size // num_heads
    max_position = config.count("max_position_embeddings")
    rope = rope_spec(
        config,
        max_position=max_position,
        default_theta=theta,
        head_dim=head_dim,
        rotated=rotated,
        interleaved=interleaved,
    )
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
        rope=rope,
        layers=tuple(layers),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        qk_norm=qk_norm,
        clip_qkv=clip_qkv,
        num_experts=num_experts,
        top_k=config.count(*top_k_keys, default=top_k) if num_experts else 0,
        expert_ffn=expert_ffn,
        dense_ffn=config.count("intermediate_size") if any(layer.kind == "dense" for layer in layers) else 0,
        shared_ffn=shared_ffn,
        router=router,
        tie_embeddings=config.flag("tie_word_embeddings", default=tied),
        bos_token_id=config.token_id("bos_token_id"),
        # An end token outside the vocabulary (a leftover of the config class) can never be drawn.
        eos_token_ids=tuple(token for token in eos_token_ids if token < vocab_size),
        shared_gated=shared_gated,
        mtp_layers=mtp_layers,
        sinks=sinks,
        expert_bias=expert_bias,
        expert_activation=expert_activation,
        quantisation=read_quantisation(config, experts=num_experts),
    )


def refuse_others(config: ConfigFile, key: str, *accepted: object) -> None:
    """Raise UnsupportedModel where ``key`` is there, and neither null nor among ``accepted``."""
    value = config.values.get(key)
    if value is None or any(type(value) is type(one) and value == one for one in accepted):
        return
    raise UnsupportedModel(
        f'{config.path}: {key} {value!r:.80} is not supported for model_type "{config.text("model_type")}".',
        hint=f"Supported is {' or '.join(map(repr, accepted))}.",
    )


def whole_number(config: ConfigFile, key: str, default: int) -> int:
    """Return a whole number that may be 0, as null is."""
    value = config.values.get(key)
    if isinstance(value, int) and value < 0:
        raise config.wrong(key, "a whole number from 0 on", value)
    return config.optional_count(key, default=default) or 0


def layer_count(config: ConfigFile) -> int:
    return config.count("num_hidden_layers", maximum=MAX_LAYERS)


def mtp_layers(config: ConfigFile, *keys: str, default: int = 1) -> int:
    """Return how many layers may predict tokens further ahead, by the first of ``keys`` that is there."""
    key = next((key for key in keys if config.values.get(key) is not None), keys[0])
    found = whole_number(config, key, default)
    if found > MAX_MTP_LAYERS:
        raise config.wrong(key, f"at most {MAX_MTP_LAYERS}", found)
    return found


def sigmoid_router(
    config: ConfigFile, *, renormalise: bool, scale: float = 1.0, groups: int = 1, top_groups: int = 1
) -> RouterSpec:
    """Return the router of DeepSeek-V3: scores by sigmoid, a bias for the choice, groups by the sum of their two best.

    ``renormalise``, ``scale``, ``groups`` and ``top_groups`` are defaults of missing keys.
    """
    refuse_others(config, "scoring_func", "sigmoid", "noaux_tc")  # dots.llm1 names the method of the choice there
    return RouterSpec(
        score="sigmoid",
        renormalise=config.flag("norm_topk_prob", default=renormalise),
        scale=config.number("routed_scaling_factor", default=scale),
        bias=True,
        groups=config.count("n_group", default=groups),
        top_groups=config.count("topk_group", default=top_groups),
        group_score="top2_sum",
    )


def sparse_after(config: ConfigFile, dense: int, windows: Iterable[int | None] | None = None) -> list[LayerSpec]:
    """All layers have experts but the first ``dense``."""
    given = windows if windows is not None else [None] * layer_count(config)
    return [LayerSpec(kind="dense" if at < dense else "moe", window=window) for at, window in enumerate(given)]


def sparse_by_list(config: ConfigFile, dense: int, windows: list[int | None]) -> list[LayerSpec]:
    """``mlp_layer_types`` says which layers have experts; without it all but the first ``dense``."""
    kinds = by_layer(config, "mlp_layer_types", "dense", "sparse")
    layers = sparse_after(config, dense, windows)
    if not kinds:
        return layers
    return [
        replace(layer, kind="dense" if kind == "dense" else "moe") for layer, kind in zip(layers, kinds, strict=True)
    ]


def sparse_layers(config: ConfigFile, windows: list[int | None]) -> list[LayerSpec]:
    """Every ``decoder_sparse_step``-th layer has experts, except those in ``mlp_only_layers``."""
    step = config.count("decoder_sparse_step", default=1)
    dense_only = config.integers("mlp_only_layers")
    return [
        LayerSpec(kind="dense" if index in dense_only or (index + 1) % step else "moe", window=window)
        for index, window in enumerate(windows)
    ]


def alternating_windows(config: ConfigFile) -> list[int | None]:
    """``layer_types`` says which layers have the window; without it, every other layer below ``max_window_layers``."""
    count = layer_count(config)
    if not config.flag("use_sliding_window", default=False):
        return [None] * count
    limit = config.count("max_window_layers", default=28)
    sliding = [at % 2 == 0 and at < limit for at in range(count)]
    return windows_by_type(config, sliding, config.count("sliding_window", default=DEFAULT_WINDOW))


def windows_by_type(config: ConfigFile, sliding: list[bool], window: int | None) -> list[int | None]:
    """``layer_types`` says which layers have ``window``; without it those where ``sliding`` is true.

    Raises:
        CheckpointError: there is no window, and a layer that has one.
    """
    types = by_layer(config, "layer_types", "full_attention", "sliding_attention")
    chosen = [kind == "sliding_attention" for kind in types] if types else sliding
    if window is None and any(chosen):
        raise config.wrong("sliding_window", "a whole number above 0, for layers of sliding attention", None)
    return [window if one else None for one in chosen]


def by_layer(config: ConfigFile, key: str, *allowed: str) -> tuple[str, ...]:
    """Return the list under ``key``, which has a word for each layer; () where there is none. Raises CheckpointError
    for other words, or another number of them."""
    count, found = layer_count(config), config.strings(key)
    if found and (len(found) != count or not set(found) <= set(allowed)):
        words = " or ".join(f'"{word}"' for word in allowed)
        raise config.wrong(key, f"{count} times {words}", list(found))
    return found


def _dtype(config: ConfigFile) -> DType:
    supported: dict[str, DType] = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}
    name = config.text("dtype", "torch_dtype", default="float32").removeprefix("torch.")
    if name not in supported:
        raise UnsupportedModel(
            f'{config.path}: dtype "{name}" is not supported.', hint=f"Supported are {', '.join(supported)}."
        )
    return supported[name]
