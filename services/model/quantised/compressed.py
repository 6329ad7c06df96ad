"""compressed-tensors, as llm-compressor writes it: ``"quant_method": "compressed-tensors"``.

Integers of b bits (4 or 8), as bytes or packed, are ``weight = scale x (code - zero)``; packed codes and zero points
are stored with 2 ** (b - 1) added. FP8 (E4M3) is ``weight = scale x value``. A scale is for the whole weight, a row, a
group of columns in a row, or a block.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Literal

from services.errors import UnsupportedModel
from services.model.configfile import ConfigFile
from services.model.quantised.mxfp4 import COLUMNS, Mxfp4
from services.model.quantised.quantisation import Group, Quantisation
from services.model.quantised.stored import (
    SCALE_TYPES,
    WORD_BITS,
    Layout,
    LinearFormat,
    Shape,
    Stored,
    groups_of,
    uneven,
)

Codes = Literal["packed", "bytes", "fp8"]
Strategy = Literal["tensor", "channel", "group", "block"]

_CODES: dict[str, Codes] = {
    "pack-quantized": "packed",
    "int-quantized": "bytes",
    "float-quantized": "fp8",
    "naive-quantized": "bytes",
}
_MXFP4 = "mxfp4-pack-quantized"
_FORMATS = (*_CODES, _MXFP4)
_STRATEGIES: dict[str, Strategy] = {"tensor": "tensor", "channel": "channel", "group": "group", "block": "block"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Compressed:
    """``rows`` and ``columns`` are those of a block (strategy "block"); ``columns`` alone those of a group.
    ``sorts``: config.json has columns in groups of an order of their own."""

    codes: Codes
    bits: int
    strategy: Strategy
    rows: int = 0
    columns: int = 0
    zeros: bool = False
    sorts: bool = False

    @property
    def label(self) -> str:
        kind = "FP8" if self.codes == "fp8" else f"int{self.bits}"
        part = {"group": f" in groups of {self.columns}", "block": f" in blocks of {self.rows} x {self.columns}"}
        one = {"tensor": " with one scale", "channel": " with a scale per row"}
        return f"compressed-tensors {kind}{(part | one)[self.strategy]}{', asymmetric' if self.zeros else ''}"

    @property
    def unread(self) -> tuple[str, ...]:
        return (".input_scale", ".output_scale", ".input_zero_point", ".output_zero_point", ".input_global_scale")

    def problem(self, shape: Shape) -> str | None:
        return uneven("columns", shape[1], self.columns, "groups") if self.strategy == "group" else None

    def stays(self, shape: Shape) -> bool:
        del shape
        return False

    def layouts(self, module: str, shape: Shape) -> tuple[Layout, ...]:
        rows, columns = shape
        by = self._scale_shapes(shape)

        def stored(name: str, *types: str, at: tuple[Shape, ...], optional: bool = False) -> Stored:
            return Stored(name=f"{module}.{name}", types=types, shapes=at, optional=optional)

        layout = {"scales": stored("weight_scale", *SCALE_TYPES, at=by)}
        if self.codes == "packed":
            layout["codes"] = stored("weight_packed", "I32", at=((rows, self._words(columns)),))
            layout["shape"] = stored("weight_shape", "I64", "I32", at=((2,),), optional=True)
            order = stored("weight_g_idx", "I32", "I64", at=((columns,),), optional=True)
            layout["order"] = dataclasses.replace(order, promised=self.sorts)
        else:
            layout["codes"] = stored("weight", "F8_E4M3" if self.codes == "fp8" else "I8", at=(shape,))
        if self.zeros and self.codes == "packed" and self.strategy != "tensor":
            at = (self._words(rows), by[0][1])
            layout["zeros"] = stored("weight_zero_point", "I32", at=(at,))
        elif self.zeros:
            layout["zeros"] = stored("weight_zero_point", "I8", *SCALE_TYPES, at=by)
        else:  # some tools write zeros
            layout["nothing"] = stored("weight_zero_point", "I8", "F8_E4M3", *SCALE_TYPES, at=by, optional=True)
        return (layout,)

    def _words(self, count: int) -> int:
        return -(-count * self.bits // WORD_BITS)

    def _scale_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        rows, columns = shape
        if self.strategy == "tensor":
            return ((1,), (), (1, 1))
        if self.strategy == "channel":
            return ((rows, 1), (rows,))
        if self.strategy == "group":
            return ((rows, columns // self.columns),)
        return ((groups_of(rows, self.rows), groups_of(columns, self.columns)),)


def read(config: ConfigFile) -> Quantisation:
    """Raises CheckpointError, UnsupportedModel."""
    for key in ("sparsity_config", "transform_config"):
        found = config.section(key)
        if found.values and found.values.get("format") != "dense":
            raise UnsupportedModel(f"{config.path}: compressed-tensors with a {key} are not supported.")
    status = config.text("quantization_status", default="compressed")
    if status not in ("compressed", "frozen"):  # tools of 2024 wrote the latter
        raise UnsupportedModel(
            f'{config.path}: compressed-tensors of "quantization_status" "{status}" are not supported.',
            hint="Save the model compressed (save_pretrained(..., save_compressed=True)).",
        )
    named = config.section("config_groups")
    groups = [_group(named, name, config.text("format", default="")) for name in named.values]
    if not groups:
        raise config.wrong("config_groups", "an object with a group of layers", dict(named.values) or None)
    left = config.strings("ignore")
    return Quantisation(method="compressed-tensors", groups=_by_precision(groups), left=left, match="names")


def _by_precision(groups: list[Group]) -> tuple[Group, ...]:
    """Return ``groups`` by what their targets are, which counts: names, patterns by alphabet, then "Linear"."""
    names, patterns, classes = [], [], []
    for group in groups:
        named = [target for target in group.targets if not target.startswith("re:") and target != "Linear"]
        matching = [target for target in group.targets if target.startswith("re:")]
        names += [dataclasses.replace(group, targets=tuple(named))]
        patterns += [dataclasses.replace(group, targets=(target,)) for target in matching]
        classes += [dataclasses.replace(group, targets=("Linear",))] * ("Linear" in group.targets)
    return (*names, *sorted(patterns, key=lambda group: group.targets), *classes)


def _group(named: ConfigFile, name: str, usual: str) -> Group:
    config = named.section(name)
    weights = config.section("weights")
    targets = config.strings("targets")
    if not targets or not weights.values:
        raise named.wrong(name, 'an object with "targets" and "weights"', dict(config.values))
    return Group(format=_format(weights, config.text("format", default=usual)), targets=targets)


def _format(weights: ConfigFile, name: str) -> LinearFormat:
    bits, kind = weights.count("num_bits", default=8), weights.text("type", default="int")
    if name == _MXFP4:
        group = weights.count("group_size", default=COLUMNS)
        if group != COLUMNS:
            raise weights.wrong("group_size", f"{COLUMNS} in MXFP4", group)
        return Mxfp4(packed=True)
    if name not in _CODES:
        raise UnsupportedModel(
            f'{weights.path}: compressed-tensors of the format "{name}" are not supported.',
            hint=f"Supported are {', '.join(_FORMATS)}.",
        )
    codes = "fp8" if name == "naive-quantized" and kind == "float" else _CODES[name]
    if kind != ("float" if codes == "fp8" else "int") or bits not in ((8,) if codes == "fp8" else (4, 8)):
        raise UnsupportedModel(
            f'{weights.path}: "{name}" weights of {bits} bits of type "{kind}" are not supported.',
            hint="Supported are int of 4 and 8 bits, and float of 8.",
        )
    return _scaled(weights, codes, bits)


def _scaled(weights: ConfigFile, codes: Codes, bits: int) -> Compressed:
    usual = "tensor" if weights.values.get("group_size") in (None, -1) else "group"
    strategy = weights.text("strategy", default="channel" if weights.values.get("group_size") == -1 else usual)
    if strategy not in _STRATEGIES:
        raise UnsupportedModel(
            f'{weights.path}: weights quantised by "strategy" "{strategy}" are not supported.',
            hint=f"Supported are {', '.join(_STRATEGIES)}.",
        )
    rows = columns = 0
    if strategy == "group":
        columns = weights.count("group_size")
    elif strategy == "block":
        rows, columns = _block(weights)
    symmetric = weights.flag("symmetric", default=True) or codes == "fp8"
    return Compressed(
        codes=codes,
        bits=bits,
        strategy=_STRATEGIES[strategy],
        rows=rows,
        columns=columns,
        zeros=not symmetric,
        sorts=weights.values.get("actorder") in (True, "group", "dynamic"),
    )


def _block(weights: ConfigFile) -> tuple[int, ...]:
    """Return the rows and columns of a block: a list of them, or as some tools write it "128x128"."""
    found = weights.values.get("block_structure")
    if isinstance(found, str):
        sizes = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", found)
        block = tuple(map(int, sizes.groups())) if sizes else ()
    else:
        block = weights.integers("block_structure")
    if len(block) != 2 or not all(block):
        raise weights.wrong("block_structure", "the rows and columns of a block", found)
    return block
