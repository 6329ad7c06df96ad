"""Expert weights as codes of 8 or 4 bits and scales: one type for all formats, whose layout the kernels read.

Legend: E experts, O output features (rows of an expert's matrix), I input features, G groups of a row, R row blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

import torch
from torch import Tensor

from moe_kernels.arguments import is_integer, require
from moe_kernels.quant.checks import RUN, SCALE_TYPES, Codes, check_quantised, groups_of, stored_columns
from moe_kernels.quant.forms import Forms

PARTS: Final = ("packed", "scales", "zeros", "order")
"""The tensors of a weight."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QuantisedWeight:
    """``w_EOI`` as codes and scales: ``w[e, o, i] = value(code[e, o, i]) * scales[e, o // scale_rows, i // group]``.

    ``bits`` 8: ``packed`` uint8 ``[E, O, I]``, byte i = code of column i. ``bits`` 4: ``packed`` uint8
    ``[E, O, ceil(I / 128) x 64]``, split halves: of each run of 128 columns c..c+127, byte j of the run's 64 has column
    c + j in its low nibble and column c + 64 + j in its high nibble. So a tile of bytes unpacks into two tiles of
    neighbouring columns, without any exchange between threads. Nibbles past column I - 1 are padding and mean nothing.

    ``codes`` says what a code's value is:
    "int": code - zero, with ``zeros`` uint8 like ``scales``, or 8 (``bits`` 4) or 128 without; scales are floats;
    "e4m3": the number whose FP8 pattern it is; scales are floats, for instance of DeepSeek-V3's 128 x 128 blocks;
    "e2m1": the number whose FP4 pattern it is, 0 0.5 1 1.5 2 3 4 6 and their negatives; ``scales`` uint8, E8M0: byte s
    is 2^(s - 127). That is MXFP4 with groups of 32.

    ``group``: columns that share a scale, 0: all; the last group may be smaller. ``scale_rows`` divides O; ``scales``
    is ``[E, O / scale_rows, ceil(I / group) or 1]``. ``in_features``: I. ``order`` int32 ``[E, I]``: column i meets
    x's column order[e, i] (GPTQ's act-order, sorted so that a group's columns are neighbours); None: i.
    ``torch.save`` and ``torch.load`` take it, also inside of other things.

    Example (a run shortened from 128 columns to 4): codes ``[3, 15, 8, 1]`` are the bytes ``[0x83, 0x1F]``; with scale
    0.5 they mean ``[-2.5, 3.5, 0.0, -3.5]``.

    Raises:
        ArgumentError: parts that do not fit each other.
    """

    packed: Tensor
    scales: Tensor
    bits: int
    group: int
    in_features: int
    codes: Codes = "int"
    zeros: Tensor | None = None
    scale_rows: int = 1
    order: Tensor | None = None
    forms: Forms = field(default_factory=Forms, init=False, repr=False)

    def __post_init__(self) -> None:
        check_quantised(
            self.packed, self.scales, self.bits, self.group, self.in_features, self.codes, self.zeros, self.scale_rows,
            self.order,
        )  # fmt: skip

    @classmethod
    def empty(
        cls,
        shape: tuple[int, int, int],
        *,
        bits: int,
        group: int,
        codes: Codes = "int",
        scale_rows: int = 1,
        zeros: bool = False,
        ordered: bool = False,
        scale_type: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> QuantisedWeight:
        """Parts for ``[E, O, I]``, nothing in them yet: what a loader fills expert by expert."""
        experts, out_features, in_features = shape
        scales = (experts, out_features // scale_rows, groups_of(in_features, group))
        packed = (experts, out_features, stored_columns(in_features, bits))
        return cls(
            packed=torch.empty(packed, dtype=torch.uint8, device=device),
            scales=torch.empty(scales, dtype=scale_type or SCALE_TYPES[codes][0], device=device),
            bits=bits, group=group, in_features=in_features, codes=codes, scale_rows=scale_rows,
            zeros=torch.empty(scales, dtype=torch.uint8, device=device) if zeros else None,
            order=torch.empty(experts, in_features, dtype=torch.int32, device=device) if ordered else None,
        )  # fmt: skip

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(E, O, I)``, as of the tensor that was quantised."""
        experts, out_features, _ = self.packed.shape
        return experts, out_features, self.in_features

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def dtype_name(self) -> str:
        """The key of tile tables: "int8", "int4" (groups of 128), "int8_channel", "int4_channel"; "int4_mixed" and
        "int8_mixed" with zero points, other groups or padding; "fp8", "mxfp4".
        """
        if self.codes != "int":
            return {"e4m3": "fp8", "e2m1": "mxfp4"}[self.codes]
        return f"int{self.bits}" + ("_mixed" if not self.plain else "" if self.group else "_channel")

    @property
    def format(self) -> str:
        """What holders of a weight must agree on, e.g. "int4 g128", "int4 g32 zeros", "e4m3 128x128", "e2m1 g32"."""
        name = f"int{self.bits}" if self.codes == "int" else self.codes
        size = f"g{self.group}" if self.group else "channel"
        size = f"{self.scale_rows}x{self.group or self.in_features}" if self.scale_rows > 1 else size
        flags = [name for name in ("zeros", "order") if getattr(self, name) is not None]
        return " ".join([name, size, *flags])

    @property
    def plain(self) -> bool:
        """Integers around 8 or 128 with a scale per row or 128 whole columns: the layout that kernels are tuned for."""
        whole = self.in_features % (RUN if self.bits == 4 or self.group else 1) == 0
        unmixed = self.codes == "int" and self.zeros is None and self.scale_rows == 1 and self.order is None
        return unmixed and whole and self.group in (0, RUN)

    @property
    def nbytes(self) -> int:
        """Of all parts."""
        return sum(part.nbytes for part in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """The parts that there are, by name: "packed", "scales", "zeros", "order". Each has E first."""
        parts = {name: getattr(self, name) for name in PARTS}
        return {name: part for name, part in parts.items() if part is not None}

    def with_tensors(self, parts: Mapping[str, Tensor]) -> QuantisedWeight:
        """The same kind of weight around other tensors of the same names.

        Raises:
            ArgumentError: a part is missing or of no use here, or they do not fit each other.
        """
        wanted = sorted(self.tensors())
        require(sorted(parts) == wanted, f"{self.format} has the parts {wanted}, found {sorted(parts)}")
        return _replaced(self, parts)

    def to(self, device: torch.device | str) -> QuantisedWeight:
        """All parts on ``device``, themselves if they are there. Their dtypes are part of the layout."""
        fits = isinstance(device, (torch.device, str))
        require(fits, f"quantised weights of shape {self.shape} go to a device, not to {device!r}")
        return self.with_tensors({name: part.to(device) for name, part in self.tensors().items()})

    def with_order(self) -> QuantisedWeight:
        """Itself if it has an ``order``, else with one in which column i meets x's column i."""
        if self.order is not None:
            return self
        columns_I = torch.arange(self.in_features, dtype=torch.int32, device=self.device)
        return _replaced(self, {"order": columns_I.expand(self.shape[0], -1).contiguous()})

    def without_order(self) -> QuantisedWeight:
        """What meets x once its columns are in the order of the weight's. What a CPU keeps is kept for both."""
        if self.order is None:
            return self
        found = replace(self, order=None)
        object.__setattr__(found, "forms", self.forms)
        return found

    def experts(self, first: int, last: int) -> QuantisedWeight:
        """A view of experts ``first..last - 1``: a shard.

        Raises:
            ArgumentError: not all of them are here.
        """
        _check_range("experts", first, last, self.shape[0], 1, self.shape, "")
        return self.with_tensors({name: part[first:last] for name, part in self.tensors().items()})

    def rows(self, begin: int, end: int) -> QuantisedWeight:
        """A copy of output features ``begin..end - 1`` of every expert.

        Raises:
            ArgumentError: not all of them are here, or the cut is inside of rows that share a scale.
        """
        rule = f": {self.scale_rows} rows share a scale"
        _check_range("rows", begin, end, self.shape[1], self.scale_rows, self.shape, rule)
        blocks = slice(begin // self.scale_rows, end // self.scale_rows)
        cuts = {"packed": slice(begin, end), "scales": blocks, "zeros": blocks, "order": slice(None)}
        return self.with_tensors({name: _copy(part[:, cuts[name]]) for name, part in self.tensors().items()})

    def columns(self, begin: int, end: int) -> QuantisedWeight:
        """A copy of input features ``begin..end - 1`` of every expert.

        Raises:
            ArgumentError: not all of them are here, the cut is inside of a group or of a run of the layout, or columns
                lie in an order of their own.
        """
        require(self.order is None, f"columns of {self.format} weights lie in another order than x's: not cut")
        step = math.lcm(RUN if self.bits == 4 else 16, self.group or 1)
        rule = f": runs of the layout and groups of {self.format} end at multiples of {step}"
        _check_range("columns", begin, end, self.in_features, step, self.shape, rule)
        groups = slice(begin // self.group, math.ceil(end / self.group)) if self.group else slice(None)
        packed = self.packed[:, :, begin * self.bits // 8 :][:, :, : stored_columns(end - begin, self.bits)]
        parts = {name: part[:, :, groups] for name, part in self.tensors().items()} | {"packed": packed}
        parts = {name: _copy(part) for name, part in parts.items()}
        return _replaced(self, parts, in_features=end - begin)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and what is loaded from a file pass the checks again: kernels trust them."""
        return _from_parts, tuple(getattr(self, name) for name in _FIELDS)


_FIELDS: Final = tuple(one.name for one in fields(QuantisedWeight) if one.init)
Weight = Tensor | QuantisedWeight
"""Experts' matrices ``[E, O, I]``, as numbers or quantised."""


def kind_flags(weight: Weight) -> dict[str, Any]:
    """What kernels must know about a weight's codes and scales beside its bits."""
    if isinstance(weight, Tensor):
        return {"CODES": "int", "GROUP": 0, "SCALE_ROWS": 1, "HAS_ZEROS": False}
    return {
        "CODES": weight.codes, "GROUP": weight.group, "SCALE_ROWS": weight.scale_rows,
        "HAS_ZEROS": weight.zeros is not None,
    }  # fmt: skip


def stack_rows(*parts: QuantisedWeight) -> QuantisedWeight:
    """One below the other, e.g. gate and up. Blocks of scales that would not meet are cut into smaller ones.

    Raises:
        ArgumentError: different formats, experts or columns, or columns in different orders.
    """
    require(len(parts) > 0, "there must be weights to stack, found none")
    scale_rows = math.gcd(*(part.scale_rows for part in parts), *(part.shape[1] for part in parts))
    first, *others = finer = [_with_scale_rows(part, scale_rows) for part in parts]
    for other in others:
        fits = (other.format, other.shape[::2]) == (first.format, first.shape[::2])
        found = f"found {other.format} of shape {other.shape} below {first.format} of shape {first.shape}"
        require(fits, f"weights must agree in format, experts and columns, {found}")
        same = first.order is None or (other.order is not None and torch.equal(first.order, other.order))
        require(same, f"weights of shapes {first.shape} and {other.shape} have their columns in different orders")
    joined = {name: torch.cat([part.tensors()[name] for part in finer], dim=1) for name in first.tensors()}
    return _replaced(first, joined | ({} if first.order is None else {"order": first.order}))


def _with_scale_rows(weight: QuantisedWeight, scale_rows: int) -> QuantisedWeight:
    rows = torch.arange(0, weight.shape[1], scale_rows, device=weight.device) // weight.scale_rows
    blocks = {name: part[:, rows] for name, part in weight.tensors().items() if name in ("scales", "zeros")}
    return _replaced(weight, blocks, scale_rows=scale_rows)


def _replaced(weight: QuantisedWeight, parts: Mapping[str, Tensor], **sizes: int) -> QuantisedWeight:
    changes: dict[str, Any] = {**parts, **sizes}
    return replace(weight, **changes)


def _copy(part: Tensor) -> Tensor:
    return part.clone(memory_format=torch.contiguous_format)


def _check_range(what: str, begin: int, end: int, held: int, step: int, shape: tuple[int, int, int], rule: str) -> None:
    whole = is_integer(begin) and is_integer(end)
    require(whole, f"{what} of {shape} are counted by integers, found {begin!r} and {end!r}")
    require(0 <= begin <= end <= held, f"{what} {begin}..{end - 1} are not all among the {held} of {shape}")
    fits = begin % step == 0 and (end % step == 0 or end == held)
    require(fits, f"{what} {begin}..{end - 1} of {shape} cannot be cut out{rule}")


def _from_parts(*values: Any) -> QuantisedWeight:
    """Files of before the kinds have five values."""
    return QuantisedWeight(**dict(zip(_FIELDS, values, strict=False)))


# What torch.load may call by default, with weights_only=True.
torch.serialization.add_safe_globals([_from_parts])
