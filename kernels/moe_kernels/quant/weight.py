"""Expert weights as codes of 8 or 4 bits and scales: the layout that :func:`moe_kernels.quantize_experts` makes.

Legend: E experts, O output features (rows of an expert's matrix), I input features, G groups of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_kernels.arguments import check_quantised, is_integer, require


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QuantisedWeight:
    """``w_EOI`` as codes and scales: ``w[e, o, i] = (code[e, o, i] - bias) * scales[e, o, i // 128 or 0]``.

    ``bits`` 8: ``packed`` uint8 ``[E, O, I]``, byte i = code of column i, bias 128 (codes 1..255).
    ``bits`` 4: ``packed`` uint8 ``[E, O, I / 2]``, bias 8 (codes 0..15), split halves: of each run of 128 columns
    c..c+127, byte j of the run's 64 has column c + j in its low nibble and column c + 64 + j in its high nibble. So a
    tile of bytes unpacks into two tiles of neighbouring columns, without any exchange between threads.
    ``scales`` float16 ``[E, O, G]``: G = I / 128 if ``group`` is 128, else 1 (``group`` 0: per channel). In int4 they
    may be negative. ``in_features``: I. ``torch.save`` and ``torch.load`` take it, also inside of other things.

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

    def __post_init__(self) -> None:
        check_quantised(self.packed, self.scales, self.bits, self.group, self.in_features)

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
        """The key of tile tables: "int8", "int4" (groups of 128), "int8_channel", "int4_channel"."""
        return f"int{self.bits}" + ("" if self.group else "_channel")

    @property
    def nbytes(self) -> int:
        """Of codes and scales."""
        return self.packed.nbytes + self.scales.nbytes

    def to(self, device: torch.device | str) -> QuantisedWeight:
        """Codes and scales on ``device``, themselves if they are there. Their dtypes are part of the layout."""
        fits = isinstance(device, (torch.device, str))
        require(fits, f"quantised weights of shape {self.shape} go to a device, not to {device!r}")
        return self._with(self.packed.to(device), self.scales.to(device))

    def experts(self, first: int, last: int) -> QuantisedWeight:
        """A view of experts ``first..last - 1``: a shard.

        Raises:
            ArgumentError: not all of them are here.
        """
        whole = is_integer(first) and is_integer(last)
        require(whole, f"experts of {self.shape} are counted by integers, found {first!r} and {last!r}")
        held = self.shape[0]
        require(0 <= first <= last <= held, f"experts {first}..{last - 1} are not all among the {held} of {self.shape}")
        return self._with(self.packed[first:last], self.scales[first:last])

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and what is loaded from a file pass the checks again: kernels trust them."""
        return _from_parts, (self.packed, self.scales, self.bits, self.group, self.in_features)

    def _with(self, packed: Tensor, scales: Tensor) -> QuantisedWeight:
        return _from_parts(packed, scales, self.bits, self.group, self.in_features)


def _from_parts(packed: Tensor, scales: Tensor, bits: int, group: int, in_features: int) -> QuantisedWeight:
    return QuantisedWeight(packed=packed, scales=scales, bits=bits, group=group, in_features=in_features)


# What torch.load may call by default, with weights_only=True.
torch.serialization.add_safe_globals([_from_parts])
