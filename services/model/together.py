"""Weights and biases of all experts of a layer in one tensor, as transformers writes gpt-oss. Torch-free.

``gate_up_proj`` is ``[E, D, 2F]``, the columns of gate and up projection in turn, ``down_proj`` is ``[E, F, D]``. Their
biases, after ``_bias``, are ``[E, 2F]`` and ``[E, D]``. What is read of them has names and shapes of single experts.
Legend: E experts of a layer, D hidden size, F expert width.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from services.errors import CheckpointError
from services.model.configfile import CONFIG
from services.model.header import FLOATS, TensorEntry
from services.model.names import TensorNames
from services.model.quantised.config import KEY
from services.model.quantised.mxfp4 import Mxfp4
from services.model.quantised.quantisation import Choice
from services.model.quantised.stored import Layout, Shape, Stored
from services.model.sources import Source
from services.model.spec import ModelSpec

_HINT = "config.json and weights must come from the same checkpoint: download both again."
_ALL: slice = slice(None)
_PARTS: Mapping[str, tuple[str, slice]] = {
    "gate_proj": ("gate_up_proj", slice(0, None, 2)),
    "up_proj": ("gate_up_proj", slice(1, None, 2)),
    "down_proj": ("down_proj", _ALL),
}
"""Where each matrix of an expert lies, and which of the columns there are its."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Together:
    """The format of a weight or a bias that is a part of such a tensor, as numbers. A weight lies there transposed."""

    @property
    def label(self) -> str:
        return "part of a tensor of all experts"

    @property
    def unread(self) -> tuple[str, ...]:
        return ()

    def problem(self, shape: Shape) -> str | None:
        del shape
        return None

    def stays(self, shape: Shape) -> bool:
        del shape
        return False

    def layouts(self, module: str, shape: Shape) -> tuple[Layout, ...]:
        del module, shape
        return ()


def find_together(
    entries: Mapping[str, TensorEntry], folder: Path, spec: ModelSpec, found: Container[str]
) -> dict[str, Source]:
    """Return where the experts' weights and biases lie that are not ``found`` yet, by name; {} of other families.

    Raises:
        CheckpointError: one is missing, of another type or shape, or is quantised by config.json and not in the files.
    """
    if not TensorNames(spec.family).together:
        return {}
    sources = {name: source for name, source in _sources(spec) if name not in found}
    wanted = {source.parts["codes"].name: source.parts["codes"] for source in sources.values()}
    if missing := [stored for name, stored in wanted.items() if name not in entries]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"{folder} lacks {missing[0]}{more}, which config.json calls for.",
            hint="Download the missing files, or the config.json that belongs to these weights.",
        )
    for name, stored in wanted.items():
        entry = entries[name]
        if entry.shape not in stored.shapes or entry.dtype not in stored.types:
            raise CheckpointError(
                f"{entry.file}: config.json calls for {stored}, found {entry.dtype} {list(entry.shape)}.", hint=_HINT
            )
    _refuse_plain(sources, folder, spec)
    return sources


def _sources(spec: ModelSpec) -> Iterator[tuple[str, Source]]:
    """Yield each weight and each bias of every expert, and where it lies."""
    names = TensorNames(spec.family)
    for layer in spec.moe_layers:
        for expert in range(spec.num_experts):
            ffn = names.expert(layer, expert)
            for weight, bias, shape in zip(ffn.matrices, ffn.biases, _shapes(spec), strict=True):
                yield weight, _source(names, spec, layer, expert, weight, shape)
                if spec.expert_bias:
                    yield bias, _source(names, spec, layer, expert, bias, (1, shape[0]))


def _shapes(spec: ModelSpec) -> tuple[Shape, Shape, Shape]:
    inner, outer = (spec.expert_ffn, spec.hidden_size), (spec.hidden_size, spec.expert_ffn)
    return inner, inner, outer


def _source(names: TensorNames, spec: ModelSpec, layer: int, expert: int, name: str, shape: Shape) -> Source:
    module, _, end = name.rpartition(".")
    whole, columns = _PARTS[module.rpartition(".")[2]]
    both = 1 if columns == _ALL else 2
    # A bias [1, F] is [E, both x F] there, a weight [F, D] is [E, D, both x F].
    at = (spec.num_experts, both * shape[1]) if end == "bias" else (spec.num_experts, shape[1], both * shape[0])
    select = (expert, columns) if end == "bias" else (expert, _ALL, columns)
    stored = Stored(
        name=f"{names.experts(layer)}.{whole}{'_bias' if end == 'bias' else ''}",
        types=tuple(FLOATS),
        shapes=(at,),
        select=select,
        share=spec.num_experts * both,
    )
    return Source(module=module, format=Together(), shape=shape, parts={"codes": stored})


def _refuse_plain(sources: Mapping[str, Source], folder: Path, spec: ModelSpec) -> None:
    """Raise CheckpointError where config.json says that experts are in MXFP4, which the files have as numbers. To tools
    of other formats a tensor of all experts is no linear layer, and stays without being listed."""
    if spec.quantisation is None:
        return
    choice = Choice(spec.quantisation)
    for name, source in sources.items():
        if not name.endswith(".weight"):
            continue
        said, scheme = choice.of([source.module], free=False)
        if said == "quantised" and isinstance(scheme, Mxfp4) and not scheme.stays(source.shape):
            raise CheckpointError(
                f'{folder}: "{source.module}" is {scheme.label} by {KEY} of {CONFIG}, found '
                f"{source.parts['codes'].name} as numbers.",
                hint=_HINT,
            )
