"""Reads ``config.json``: finds the family that it names, and checks its numbers against one another."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from services.errors import CheckpointError, UnsupportedModel
from services.model.configfile import ConfigFile, read_config, read_generation_config
from services.model.dense_families import DENSE_FAMILIES
from services.model.family_configs import END_TOKENS, FAMILIES
from services.model.recurrent_configs import text_config
from services.model.spec import ModelSpec

MAX_EXPERTS = 1 << 18
"""Most experts over all layers. The loader looks for several names for each, so a damaged number must not reach it."""


def spec_from_config(model_dir: Path, *, drafts: bool = False) -> ModelSpec:
    """Return the spec of the checkpoint in ``model_dir``, checked, without its fingerprint. ``drafts``: the model only
    drafts for another one, so it may be dense."""
    config = text_config(read_config(model_dir))
    family = config.text("model_type")
    families = {**FAMILIES, **DENSE_FAMILIES} if drafts else FAMILIES
    if family not in families:
        raise _dense(family, config) if family in DENSE_FAMILIES else _unknown(family, config, families)
    _refuse_unsupported(config)
    eos_token_ids = read_generation_config(model_dir).integers("eos_token_id") or config.integers("eos_token_id")
    if "eos_token_id" not in config.values:
        eos_token_ids = eos_token_ids or END_TOKENS.get(family, ())
    spec = families[family](config, eos_token_ids)
    _check(spec, config)
    return spec


def _dense(family: str, config: ConfigFile) -> UnsupportedModel:
    return UnsupportedModel(
        f'{config.path}: model_type "{family}" is not a Mixture-of-Experts model, but a dense model where experts are '
        "asked for.",
        hint="Beside a model with the same tokens it can draft: --speculative-config "
        '\'{"method": "draft_model", "model": "DIR"}\'. '
        f"Served are {', '.join(sorted(FAMILIES))}.",
    )


def _unknown(family: str, config: ConfigFile, families: Iterable[str]) -> UnsupportedModel:
    dense = "" if "expert" in str(config.values) else ": it is not a Mixture-of-Experts model"
    near = difflib.get_close_matches(family, families, n=1)
    nearest = f'The nearest is "{near[0]}". ' if near else ""
    return UnsupportedModel(
        f'{config.path}: model_type "{family}" is not supported{dense}.',
        hint=f"{nearest}Supported are {', '.join(sorted(families))}.",
    )


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
    explicit_head_dim = spec.latent is not None or config.optional_count("head_dim") is not None
    demand(
        explicit_head_dim or spec.head_dim != width // heads or width % heads == 0,
        f'"hidden_size" {width} is not divisible by "num_attention_heads" {heads}, and "head_dim" is not given',
    )
    demand(heads % kv_heads == 0, f'"num_attention_heads" {heads} is not divisible by "num_key_value_heads" {kv_heads}')
    demand(
        spec.latent is not None or spec.head_dim % 2 == 0,
        f'"head_dim" {spec.head_dim} is odd; rotary embeddings need an even one',
    )
    demand(
        spec.top_k <= spec.num_experts,
        f'"num_experts_per_tok" {spec.top_k} is more than the {spec.num_experts} experts there are',
    )
    router = spec.router
    demand(
        spec.num_experts % router.groups == 0,
        f'{spec.num_experts} experts do not divide into the {router.groups} groups of "n_group"',
    )
    in_group = spec.num_experts // router.groups
    demand(router.groups == 1 or in_group > 1, f"{router.groups} groups of {spec.num_experts} experts have one each")
    demand(
        router.top_groups <= router.groups,
        f'"topk_group" {router.top_groups} is more than the {router.groups} groups there are',
    )
    demand(
        spec.top_k <= router.top_groups * in_group,
        f'"num_experts_per_tok" {spec.top_k} is more than the {router.top_groups * in_group} experts of '
        f'"topk_group" {router.top_groups} groups',
    )
    demand(
        len(spec.moe_layers) * spec.num_experts <= MAX_EXPERTS,
        f"{len(spec.moe_layers)} layers of {spec.num_experts} experts are more than {MAX_EXPERTS} experts",
    )
