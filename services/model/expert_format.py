"""How experts' weights are held in memory: as numbers of the serving dtype, or quantised. Torch-free.

A :class:`HeldExperts` goes with the spec of a model that is served, and its label with the hash of the weights: workers
that hold experts in different ways do not answer for one another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Literal, TypeVar

from services.config import ExpertFormat

DENSE = "dense"
GROUPS = (0, 32, 64, 128)
"""Columns that may share a scale; 0: all of a row."""
_RUN = 128
"""Columns of a run of the layout in 4 bits, the last of which is filled up."""
_STEP = 16
"""What must divide columns, so that rows of activations start where a kernel may load."""
ScaleType = Literal["float16", "bfloat16", "float32", "uint8"]
_SCALE_BYTES: Mapping[ScaleType, int] = {"float16": 2, "bfloat16": 2, "float32": 4, "uint8": 1}
_ORDER_BYTES = 4
_ROUNDED_SCALES: Mapping[str, ScaleType] = {"int": "float16", "e4m3": "float32", "e2m1": "uint8"}
Key = TypeVar("Key", int, str)
_NAMES = {"int": "int", "e4m3": "fp", "e2m1": "mxfp"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A form of :class:`moe_kernels.QuantisedWeight`, whose words these are: codes of ``bits`` bits that mean whole
    numbers, less zero points if there are ``zeros``, or FP8 or FP4 numbers; with a scale for each ``group`` columns of
    ``scale_rows`` rows. ``ordered``: columns are in an order of each expert's own (act-order); that of the down
    projection is :attr:`folded` into the rows of the other two as they are loaded."""

    bits: int
    group: int
    codes: Literal["int", "e4m3", "e2m1"] = "int"
    scale_rows: int = 1
    zeros: bool = False
    scale_type: ScaleType = "float16"
    ordered: bool = False

    def __str__(self) -> str:
        size = f"g{self.group}" if self.group else "channel"
        size = f"{self.scale_rows}x{self.group}" if self.scale_rows > 1 else size
        flags = f"{'-zeros' if self.zeros else ''}{'-order' if self.ordered else ''}"
        return f"{_NAMES[self.codes]}{self.bits}-{size}{flags}"

    @property
    def folded(self) -> Kind:
        """The form of a matrix whose columns are in order."""
        return replace(self, ordered=False)

    @property
    def rounded(self) -> Kind:
        """The form with scales of the type that rounding makes."""
        return replace(self, scale_type=_ROUNDED_SCALES[self.codes])

    def cut(self, rows_of: int) -> int:
        """Return at which multiples of rows of gate and up, and columns of down, experts can be cut. ``rows_of``: all
        of them."""
        columns = math.lcm(_RUN if self.bits == 4 else _STEP, self.group or 1)
        return math.lcm(columns, math.gcd(self.scale_rows, rows_of))

    def problem(self, rows: int, columns: int) -> str | None:
        """Return what a matrix that it can hold has, if it cannot hold this one."""
        if columns % _STEP:
            return f"columns in a multiple of {_STEP}"
        return f"rows in a multiple of {self.scale_rows}" if rows % self.scale_rows else None

    def nbytes(self, rows: int, columns: int) -> int:
        width = -(-columns // _RUN) * _RUN // 2 if self.bits == 4 else columns
        scales = -(-rows // self.scale_rows) * (-(-columns // self.group) if self.group else 1)
        order = _ORDER_BYTES * columns if self.ordered else 0
        return rows * width + scales * (_SCALE_BYTES[self.scale_type] + self.zeros) + order

    def kept_on_cpu(self, rows: int, columns: int, dtype: str) -> int:
        """Return the most bytes that ``moe_kernels.quant.cached`` keeps beside a matrix that rows in ``dtype`` met."""
        whole = self.codes == "int" and self.scale_rows == 1 and dtype == "bfloat16"
        int4 = self.bits == 4 and not (rows % _STEP or columns % (self.group or 32))
        int8 = self.bits == 8 and not self.group and not self.zeros
        if whole and (int4 or int8):
            return self.nbytes(rows, columns) * 9 // 8
        return rows * columns * (4 if dtype == "float32" else 2)


KINDS: Mapping[ExpertFormat, Kind] = {
    "int8": Kind(bits=8, group=0),
    "int4": Kind(bits=4, group=_RUN),
    "int4-channel": Kind(bits=4, group=0),
    "fp8": Kind(bits=8, group=128, codes="e4m3", scale_rows=128, scale_type="float32"),
    "mxfp4": Kind(bits=4, group=32, codes="e2m1", scale_type="uint8"),
}
"""What each value of --expert-format rounds to. "auto" and "dense" round nothing."""


@dataclass(frozen=True, slots=True)
class HeldExperts:
    """``kinds``: layer -> how its experts are held; other layers' are dense. ``label`` names all of it, "" if all are
    dense, as they were before there was anything else."""

    kinds: tuple[tuple[int, Kind], ...] = ()
    label: str = ""

    def of(self, layer: int) -> Kind | None:
        return dict(self.kinds).get(layer)

    @property
    def title(self) -> str:
        """The label, for messages."""
        return self.label or DENSE


ALL_DENSE = HeldExperts()


def held(kinds: Mapping[int, Kind | None]) -> HeldExperts:
    """Return how experts are held, from the kind of each layer that has some."""
    found, label = label_of(kinds)
    return HeldExperts(found, label)


def label_of(kinds: Mapping[Key, Kind | None]) -> tuple[tuple[tuple[Key, Kind], ...], str]:
    """Return those that are not dense, sorted, and a name of all of it: "" if all are dense."""
    found = tuple((key, kind) for key, kind in sorted(kinds.items()) if kind is not None)
    names = sorted({str(kind or DENSE) for kind in kinds.values()})
    if not found or len(names) == 1:
        return found, names[0] if found else ""
    digest = blake2b(repr([(key, str(kind)) for key, kind in found]).encode(), digest_size=4).hexdigest()
    return found, f"{'.'.join(names)}-{digest}"
