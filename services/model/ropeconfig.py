"""The rotary part of ``config.json``: ``rope_parameters`` of transformers 5, or ``rope_theta`` and ``rope_scaling``."""

from __future__ import annotations

import math
from dataclasses import replace

from services.errors import UnsupportedModel
from services.model.configfile import ConfigFile
from services.model.spec import RopeSpec


def rope_spec(
    config: ConfigFile,
    *,
    max_position: int,
    default_theta: float,
    head_dim: int,
    rotated: float | None = None,
    interleaved: bool = False,
) -> RopeSpec:
    """Return the rotary spec in ``config``.

    Args:
        rotated: the part of a head that is rotated unless ``config`` says otherwise; None: families that rotate all.

    Raises:
        UnsupportedModel: the kind of scaling is not implemented.
        CheckpointError: a value is wrong.
    """
    scaling = config.section("rope_scaling")
    if not scaling.values:
        scaling = config.section("rope_parameters")
    if nested := [key for key, value in scaling.values.items() if isinstance(value, dict)]:
        raise UnsupportedModel(
            f'{config.path}: rotary embeddings of their own for "{nested[0]}" are not supported.',
            hint="Supported is one rotary embedding for all layers.",
        )
    spec = _scaled(config, scaling, max_position, default_theta)
    return replace(spec, dim=_rotated_dim(config, scaling, head_dim, rotated), interleaved=interleaved)


def _scaled(config: ConfigFile, scaling: ConfigFile, max_position: int, default_theta: float) -> RopeSpec:
    theta = scaling.number("rope_theta", default=config.number("rope_theta", default=default_theta))
    kind = scaling.text("rope_type", "type", default="default")
    if kind in ("default", "dynamic"):
        # Dynamic NTK scaling starts beyond max_position_embeddings, and no request is let in that goes there.
        return RopeSpec(theta=theta)
    # A length outside the rotary object wins: some checkpoints keep the pretrained one there.
    original = config.optional_count("original_max_position_embeddings") or scaling.count(
        "original_max_position_embeddings", default=max_position
    )
    if kind == "linear":
        return RopeSpec(kind="linear", theta=theta, factor=scaling.number("factor"))
    if kind == "llama3":
        return _llama3(scaling, theta, original)
    if kind == "yarn":
        return _yarn(scaling, theta, original, max_position)
    raise UnsupportedModel(
        f'{config.path}: rope_type "{kind}" is not supported.',
        hint="Supported are default, linear, dynamic, llama3 and yarn.",
    )


def _llama3(scaling: ConfigFile, theta: float, original: int) -> RopeSpec:
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if high <= low:
        raise scaling.wrong("high_freq_factor", f'more than "low_freq_factor" {low:g}', high)
    return RopeSpec(
        kind="llama3",
        theta=theta,
        factor=scaling.number("factor"),
        original_max_position=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(scaling: ConfigFile, theta: float, original: int, max_position: int) -> RopeSpec:
    """Read YaRN (Peng et al. 2023, section 3.4): the attention temperature becomes a factor on cos and sin."""
    if theta <= 1:
        raise scaling.wrong("rope_theta", "more than 1", theta)
    factor = scaling.number("factor", default=max_position / original)
    mscale, mscale_all_dim = (_temperature_key(scaling, key) for key in ("mscale", "mscale_all_dim"))
    attention_factor = scaling.optional_number("attention_factor")
    if attention_factor is None:
        if mscale and mscale_all_dim:
            attention_factor = _temperature(factor, mscale) / _temperature(factor, mscale_all_dim)
        else:
            attention_factor = _temperature(factor, 1.0)
    return RopeSpec(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_position=original,
        attention_factor=attention_factor,
        beta_fast=scaling.number("beta_fast", default=32.0),
        beta_slow=scaling.number("beta_slow", default=1.0),
        truncate=scaling.flag("truncate", default=True),
    )


def softmax_factor(config: ConfigFile) -> float:
    """Return what DeepSeek multiplies the scale of the softmax by: the square of YaRN's temperature, of what its
    ``mscale_all_dim`` says, whatever the kind of scaling; 1 without one."""
    scaling = config.section("rope_scaling")
    if not scaling.values:
        scaling = config.section("rope_parameters")
    if scaling.text("rope_type", "type", default="default") == "default":
        return 1.0
    mscale = _temperature_key(scaling, "mscale_all_dim")
    return 1.0 if mscale is None else _temperature(scaling.number("factor"), mscale) ** 2


def _temperature_key(scaling: ConfigFile, key: str) -> float | None:
    """Return the number under ``key``; 0 is none, as DeepSeek writes it."""
    return None if scaling.values.get(key) == 0 else scaling.optional_number(key)


def _temperature(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _rotated_dim(config: ConfigFile, scaling: ConfigFile, head_dim: int, rotated: float | None) -> int:
    """Return how many dimensions of a head are rotated, 0 for all of them."""
    key = "partial_rotary_factor"
    fraction = scaling.number(key, default=config.number(key, default=rotated or 1.0))
    if rotated is None and fraction != 1.0:
        raise UnsupportedModel(
            f"{config.path}: {key} {fraction} is not supported.",
            hint="Supported is 1: every dimension of a head is rotated.",
        )
    if fraction == 1.0:
        return 0
    dim = int(head_dim * fraction)
    if dim < 2 or dim % 2 or dim > head_dim:
        expected = f"such that an even number of the {head_dim} dimensions of a head is rotated"
        raise scaling.wrong(key, expected, fraction)
    return dim
