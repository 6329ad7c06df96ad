"""The rotary part of ``config.json``: ``rope_parameters`` of transformers 5, or ``rope_theta`` and ``rope_scaling``."""

from __future__ import annotations

import math

from services.errors import UnsupportedModel
from services.model.configfile import ConfigFile
from services.model.spec import RopeSpec


def rope_spec(config: ConfigFile, *, max_position: int, default_theta: float) -> RopeSpec:
    """Return the rotary spec in ``config``.

    Raises:
        UnsupportedModel: the kind of scaling is not implemented.
    """
    scaling = config.section("rope_scaling")
    if not scaling.values:
        scaling = config.section("rope_parameters")
    theta = scaling.number("rope_theta", default=config.number("rope_theta", default=default_theta))
    kind = scaling.text("rope_type", "type", default="default")
    _refuse_partial(config, scaling)
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
    mscale, mscale_all_dim = scaling.optional_number("mscale"), scaling.optional_number("mscale_all_dim")
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


def _temperature(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _refuse_partial(config: ConfigFile, scaling: ConfigFile) -> None:
    fraction = scaling.number("partial_rotary_factor", default=config.number("partial_rotary_factor", default=1.0))
    if fraction != 1.0:
        raise UnsupportedModel(
            f"{config.path}: partial_rotary_factor {fraction} is not supported.",
            hint="Supported is 1: every dimension of a head is rotated.",
        )
