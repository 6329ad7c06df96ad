"""Decides how the experts of a checkpoint are held, by --expert-format and by how they are stored. Torch-free.

All experts of a layer are held alike, so that what is decided is the same for workers that hold different ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from services.config import ExpertFormat
from services.errors import ConfigError
from services.model.expert_format import ALL_DENSE, KINDS, HeldExperts, Kind, held
from services.model.names import TensorNames
from services.model.spec import ModelSpec

log = logging.getLogger(__name__)

StoredKind = Callable[[str], Kind | None]
"""Returns the form in which the weight of a name can be held as it is stored, if there is one."""


def held_experts(spec: ModelSpec, choice: ExpertFormat, stored: StoredKind, folder: Path) -> HeldExperts:
    """Return how experts are held.

    Raises:
        ConfigError: a matrix cannot be held as ``choice`` says, or there is none.
    """
    if choice == "dense":
        return ALL_DENSE
    if choice == "auto":
        kinds = {layer: _as_stored(spec, layer, stored) for layer in spec.moe_layers}
        if spec.quantisation is not None:
            _log_dense(spec, kinds, stored)
        return held(kinds)
    _check(spec, choice, folder)
    return held({layer: _like(KINDS[choice], _as_stored(spec, layer, stored)) for layer in spec.moe_layers})


def _like(asked: Kind, stored: Kind | None) -> Kind:
    """Return ``stored`` where that is what was asked for, but for the type of its scales and the order of its columns:
    then nothing is rounded."""
    same = stored is not None and replace(stored.folded, scale_type=asked.scale_type) == asked
    return stored if stored is not None and same else asked


def _as_stored(spec: ModelSpec, layer: int, stored: StoredKind) -> Kind | None:
    kinds = set(map(stored, _names(spec, layer)))
    return kinds.pop() if len(kinds) == 1 else None


def _names(spec: ModelSpec, layer: int) -> list[str]:
    names = TensorNames(spec.family)
    ffns = [names.expert(layer, expert) for expert in range(spec.num_experts)]
    return [name for ffn in ffns for name in ffn.matrices]


def _log_dense(spec: ModelSpec, kinds: Mapping[int, Kind | None], stored: StoredKind) -> None:
    """Say which tensor of a quantised checkpoint is the first that keeps the experts of its layer dense."""
    dense = [layer for layer, kind in kinds.items() if kind is None]
    if not dense:
        return
    why = why_dense(_names(spec, dense[0]), stored)
    log.info("experts of %d of %d layers are held dense: %s", len(dense), len(kinds), why)


def why_dense(names: Sequence[str], stored: StoredKind) -> str:
    """Return which tensor keeps those of ``names``, which are held in one form or not at all, dense."""
    found = {name: stored(name) for name in names}
    usual = next(iter(found.values()))
    name = next(name for name, kind in found.items() if kind is None or kind != usual)
    how = f"is stored in {found[name]}" if found[name] else "is not stored in a form that kernels take"
    others = f", others of its layer are in {usual}" if usual else ""
    return f'"{name}" {how}{others}'


def check_slices(spec: ModelSpec, count: int) -> None:
    """Raise ConfigError where experts cannot be split into ``count`` slices of their inner width."""
    width = spec.expert_ffn
    if width % count:
        raise ConfigError(
            f"Experts of width {width} cannot be split into {count} slices.",
            hint="Choose a number that divides the width.",
        )
    for layer in spec.moe_layers:
        kind = spec.experts.of(layer)
        if kind is not None and width // count % kind.cut(width) and count > 1:
            raise ConfigError(
                f"Experts of width {width} that are held in {kind} cannot be split into {count} slices: expected a "
                f"multiple of {kind.cut(width)} columns for each, found {width // count}.",
                hint="Choose fewer slices, or --expert-format dense.",
            )


def expert_bytes(spec: ModelSpec, itemsize: int) -> int:
    """Return the bytes of all experts, held as ``spec.experts`` says; ``itemsize`` is of a number that is dense."""
    width, hidden = spec.expert_ffn, spec.hidden_size
    total = 0
    for layer in spec.moe_layers:
        kind = spec.experts.of(layer)
        each = 3 * width * hidden * itemsize if kind is None else _bytes(kind, width, hidden)
        biases = (2 * width + hidden) * itemsize if spec.expert_bias else 0
        total += spec.num_experts * (each + biases)
    return total


def kept_on_cpu(spec: ModelSpec, dtype: str) -> int:
    """Return the most bytes that a CPU which serves in ``dtype`` keeps beside experts that are held quantised."""
    width, hidden = spec.expert_ffn, spec.hidden_size
    kinds = filter(None, map(spec.experts.of, spec.moe_layers))
    each = (kind.kept_on_cpu(2 * width, hidden, dtype) + kind.kept_on_cpu(hidden, width, dtype) for kind in kinds)
    return spec.num_experts * sum(each)


def _bytes(kind: Kind, width: int, hidden: int) -> int:
    return kind.nbytes(2 * width, hidden) + kind.folded.nbytes(hidden, width)


def _check(spec: ModelSpec, choice: ExpertFormat, folder: Path) -> None:
    if not spec.moe_layers:
        raise ConfigError(
            f"The model in {folder} has no experts to hold in {choice}.", hint="Leave --expert-format out."
        )
    kind, ffn = KINDS[choice], TensorNames(spec.family).expert(spec.moe_layers[0], 0)
    for name, rows, columns in (
        (ffn.gate, spec.expert_ffn, spec.hidden_size),
        (ffn.down, spec.hidden_size, spec.expert_ffn),
    ):
        if problem := kind.problem(rows, columns):
            others = [other for other in KINDS if _all_fit(spec, KINDS[other])]
            raise ConfigError(
                f'{folder}: "{name}" cannot be held in {choice}: expected {problem}, found {rows} x {columns}.',
                hint=f"Choose --expert-format {' or '.join([*others, 'auto'])}.",
            )


def _all_fit(spec: ModelSpec, kind: Kind) -> bool:
    return not (kind.problem(spec.expert_ffn, spec.hidden_size) or kind.problem(spec.hidden_size, spec.expert_ffn))
