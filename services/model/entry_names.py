"""Tensors of a checkpoint under the names that the spec has for them: of a multimodal one the text part, and experts
one by one where a file has all of a layer in one tensor."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from services.model.header import FLOATS, TensorEntry
from services.model.names import FfnNames, TensorNames
from services.model.spec import ModelSpec

TEXT_PARTS = {"qwen3_5_moe": ("model.language_model.", "model.")}
"""With what names of the text part begin in the files of a multimodal family, and in the spec."""
OTHER_PARTS = {"qwen3_5_moe": "model.visual."}
"""With what names of its other parts begin."""

log = logging.getLogger(__name__)


def text_entries(entries: Mapping[str, TensorEntry], spec: ModelSpec) -> dict[str, TensorEntry]:
    """Return what the text part needs of ``entries``, by the spec's names. Says in the log what it leaves out."""
    if spec.family not in TEXT_PARTS:
        return dict(entries)
    begin, instead = TEXT_PARTS[spec.family]
    others = [name for name in entries if name.startswith(OTHER_PARTS[spec.family])]
    if others:
        log.info("%d tensors of images (%s) are left out: only text is served", len(others), OTHER_PARTS[spec.family])
    named = {
        instead + name.removeprefix(begin) if name.startswith(begin) else name: entry
        for name, entry in entries.items()
        if not name.startswith(OTHER_PARTS[spec.family])
    }
    return dict(_one_by_one(named, spec))


def _one_by_one(entries: Mapping[str, TensorEntry], spec: ModelSpec) -> Iterator[tuple[str, TensorEntry]]:
    names = TensorNames(spec.family)
    layers = {f"model.layers.{layer}.mlp.experts.": layer for layer in spec.moe_layers}
    for name, entry in entries.items():
        prefix, _, part = name.rpartition(".experts.")
        layer = layers.get(f"{prefix}.experts.") if part in ("gate_up_proj", "down_proj") else None
        if layer is None or not _holds_all(entry, spec, part):
            yield name, entry
            continue
        for expert in range(spec.num_experts):
            yield from _parts(names.expert(layer, expert), entry, expert, part)


def _holds_all(entry: TensorEntry, spec: ModelSpec, part: str) -> bool:
    """Return whether ``entry`` has the experts of a layer one after the other; what else it is has no place."""
    rows, columns = (2 * spec.expert_ffn, spec.hidden_size), (spec.hidden_size, spec.expert_ffn)
    return entry.dtype in FLOATS and entry.shape == (
        spec.num_experts,
        *(rows if part == "gate_up_proj" else columns),
    )


def _parts(ffn: FfnNames, entry: TensorEntry, expert: int, part: str) -> Iterator[tuple[str, TensorEntry]]:
    """Yield the matrices of one expert in ``entry``: rows of the gate come before those of the up projection."""
    experts, rows, columns = entry.shape
    names = (ffn.gate, ffn.up) if part == "gate_up_proj" else (ffn.down,)
    nbytes = entry.nbytes // experts // len(names)
    for number, name in enumerate(names):
        begin = entry.begin + (expert * len(names) + number) * nbytes
        shape = rows // len(names), columns
        yield name, TensorEntry(file=entry.file, dtype=entry.dtype, shape=shape, begin=begin, nbytes=nbytes)
