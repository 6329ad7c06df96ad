"""Reads the spec and the fingerprint of a model's folder. Torch-free."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from services.errors import CheckpointError
from services.model.families import spec_from_config
from services.model.spec import LayerSpec, ModelSpec, RopeSpec, RouterSpec

INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 100_000_000


def load_spec(model_dir: Path, *, drafts: bool = False) -> ModelSpec:
    """Return the spec of the checkpoint in ``model_dir``. Reads no weights. ``drafts``: of a model that only drafts for
    another one, so it may be dense.

    Raises:
        CheckpointError: ``config.json`` is missing, damaged or contradicts itself.
        UnsupportedModel: the architecture, or something the config switches on, is not implemented.
    """
    spec = spec_from_config(model_dir, drafts=drafts)
    return dataclasses.replace(spec, fingerprint=_fingerprint(spec, model_dir))


def unreadable(model_dir: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"A weight file of {model_dir} cannot be read: {error}.",
        hint="Check that it is a file, complete, and readable by this user.",
    )


def read_index(path: Path) -> bytes:
    """Return the bytes of the index at ``path``. Raises CheckpointError where they are more than any index can have."""
    if path.stat().st_size > _MAX_INDEX_BYTES:
        raise CheckpointError(f"{path} has more than {_MAX_INDEX_BYTES:,} bytes.", hint="Download it again.")
    return path.read_bytes()


def _fingerprint(spec: ModelSpec, model_dir: Path) -> str:
    """Return the hash of the spec and of the names and sizes of the weights, or of their index where there is one."""
    index = model_dir / INDEX
    try:
        if index.is_file():
            weights = [read_index(index).hex()]
        else:
            weights = [f"{file.name}:{file.stat().st_size}" for file in sorted(model_dir.glob("*.safetensors"))]
    except OSError as error:
        raise unreadable(model_dir, error) from error
    fields = dataclasses.asdict(spec)
    for name in ("weights", "experts", "linears"):
        del fields[name]  # which the release before has not, and both have to find one fingerprint
    if spec.quantisation is None:
        del fields["quantisation"]  # nor this one
    _leave_out(fields, spec, "shared_gated", "mtp_layers", "sinks", "expert_bias", "expert_activation", "latent")
    _leave_out(fields, spec, "recurrent", "output_gate", "centred_norms")
    _leave_out(fields["rope"], spec.rope, "dim", "interleaved")
    _leave_out(fields["router"], spec.router, "bias", "groups", "top_groups", "group_score", "logit_bias")
    for values, layer in zip(fields["layers"], spec.layers, strict=True):
        _leave_out(values, layer, "rotated", "recurrent")
    content = json.dumps([fields, weights], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def _leave_out(values: dict[str, Any], spec: ModelSpec | RopeSpec | RouterSpec | LayerSpec, *later: str) -> None:
    """Leave fields out of ``values`` that an earlier release has not, where they say nothing but their defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(spec)}
    for name in later:
        if values[name] == defaults[name]:
            del values[name]


def tokenizer_file(model_dir: Path) -> Path:
    """Return the checkpoint's tokenizer.json. Raises CheckpointError where it is missing."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{path} does not exist.",
            hint="Save the fast tokenizer with the weights (transformers: AutoTokenizer(...).save_pretrained(DIR)).",
        )
    return path
