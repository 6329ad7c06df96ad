"""Options that a model's layers do not have, refused by name before anything is read. Pure."""

from __future__ import annotations

from services.config import Settings
from services.errors import ConfigError
from services.model.spec import ModelSpec


def check_supported(settings: Settings, spec: ModelSpec, *, on_cpu: bool) -> None:
    """Refuse what layers of this family cannot do.

    Raises:
        ConfigError: names the option, the family and why.
    """
    _check_recurrent(settings, spec)
    if settings.batch_invariant and spec.latent is not None:
        raise ConfigError(
            f'--batch-invariant is not supported for model_type "{spec.family}": its multi-head latent attention has '
            "no products that treat each row by itself.",
            hint="Leave --batch-invariant out, or serve a model of another family.",
        )
    if settings.speculation is not None and settings.speculation.num_branches > 1:
        _check_branches(spec, on_cpu=on_cpu)


def _check_recurrent(settings: Settings, spec: ModelSpec) -> None:
    if not spec.recurrent_layers:
        return
    why = f'the model ("{spec.family}") has {len(spec.recurrent_layers)} recurrent layers'
    if settings.speculation is not None:
        raise ConfigError(
            f"--speculative-config cannot be used: {why}, whose state cannot go back behind a draft that is rejected.",
            hint="Leave it out.",
        )
    if settings.batch_invariant:
        raise ConfigError(
            f"--batch-invariant cannot be used: {why}, and how a prompt is cut into chunks changes their last bits.",
            hint="Leave it out; with --dtype float32 differences stay below what changes a greedy token.",
        )


def _check_branches(spec: ModelSpec, *, on_cpu: bool) -> None:
    """Raise ConfigError where attention has no mask for drafts that branch."""
    if spec.latent is not None:
        why = "multi-head latent attention"
    elif spec.sinks and on_cpu:
        why = "attention with sinks on a CPU"
    else:
        return
    raise ConfigError(
        f'num_branches in --speculative-config must be 1 for model_type "{spec.family}": {why} computes no trees.',
        hint="Leave num_branches out: chains of drafts are verified.",
    )
