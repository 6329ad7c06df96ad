"""Checks of quantised weights and of what is to be quantised. Shapes and dtypes only, so no device is waited for."""

from __future__ import annotations

from typing import Final, Literal, get_args

import torch
from torch import Tensor

from moe_kernels.arguments import (
    FLOATS,
    check_count,
    check_device,
    check_like,
    describe,
    is_integer,
    require,
    require_optional_tensors,
    require_tensors,
)

Codes = Literal["int", "e4m3", "e2m1"]
RUN: Final = 128
"""Input columns of a run of the layout in 4 bits."""
GROUPS: Final = (0, 32, 64, 128)
STEP: Final = 16
"""Columns come in multiples of this, so that rows of activations start where 16-byte loads may."""
SCALE_TYPES: Final[dict[str, tuple[torch.dtype, ...]]] = {
    "int": (torch.float16, torch.bfloat16, torch.float32),
    "e4m3": (torch.float32, torch.bfloat16, torch.float16),
    "e2m1": (torch.uint8,),
}
"""By what codes mean; the first is what an empty weight has."""
_BITS: Final[dict[str, tuple[int, ...]]] = {"int": (4, 8), "e4m3": (8,), "e2m1": (4,)}


def groups_of(in_features: int, group: int) -> int:
    """Scales of a row."""
    return -(-in_features // group) if group else 1


def stored_columns(in_features: int, bits: int) -> int:
    """Bytes of a row."""
    return -(-in_features // RUN) * (RUN // 2) if bits == 4 else in_features


def check_quantise(w_EOI: Tensor, bits: int, group: int, codes: Codes) -> None:
    require_tensors(weights=w_EOI)
    require(not w_EOI.is_meta, f"weights must have values, found {describe(w_EOI)} on meta")
    check_format(bits, group, codes)
    fits = w_EOI.dim() == 3 and w_EOI.dtype in FLOATS
    require(fits, f"weights must be [E, O, I] in {FLOATS}, found {describe(w_EOI)}")
    check_columns(w_EOI.shape[2])


def check_quantised(
    packed: Tensor,
    scales: Tensor,
    bits: int,
    group: int,
    in_features: int,
    codes: Codes,
    zeros: Tensor | None,
    scale_rows: int,
    order: Tensor | None,
) -> None:
    require_tensors(**{"packed weights": packed, "scales": scales})
    require_optional_tensors(zeros=zeros, order=order)
    check_format(bits, group, codes)
    check_count("in_features", in_features, 1)
    check_count("scale_rows", scale_rows, 1)
    check_columns(in_features)
    require(packed.dim() == 3, f"packed weights must be [E, O, I x bits / 8], found {describe(packed)}")
    experts, out_features, _ = packed.shape
    wide = (experts, out_features, stored_columns(in_features, bits))
    check_like(packed, wide, torch.uint8, f"packed weights of {in_features} columns in {bits} bits")
    whole = out_features % scale_rows == 0
    require(whole, f"rows must be multiples of scale_rows={scale_rows}, found {out_features}: repeat scales instead")
    scaled = (experts, out_features // scale_rows, groups_of(in_features, group))
    types = SCALE_TYPES[codes]
    named = "scales [E, O, G]" if scale_rows == 1 else "scales [E, O / scale_rows, G]"
    check_like(scales, scaled, scales.dtype if scales.dtype in types else types[0], named)
    if zeros is not None:
        require(codes == "int", f"zeros go with codes 'int', found {describe(zeros)} with {codes!r}")
        check_like(zeros, scaled, torch.uint8, "zeros like scales")
    if order is not None:
        check_like(order, (experts, in_features), torch.int32, "order [E, I]")
    parts = {"packed weights": packed, "scales": scales, "zeros": zeros, "order": order}
    for name, part in parts.items():
        if part is not None:
            check_device(part, packed, name, "packed weights")
            require(part.is_contiguous(), f"{name} must be contiguous, found {describe(part)}")
    # Kernels load 16 bytes at a time.
    require(
        packed.is_meta or packed.data_ptr() % 16 == 0,
        "packed weights must be contiguous and start at a multiple of 16 bytes",
    )


def check_format(bits: int, group: int, codes: Codes) -> None:
    require(codes in get_args(Codes), f"codes must be one of {get_args(Codes)}, found {codes!r}")
    require(is_integer(bits) and bits in (4, 8), f"bits must be 4 or 8, found {bits!r}")
    require(bits in _BITS[codes], f"bits of {codes!r} must be {_BITS[codes][0]}, found {bits}")
    fits = is_integer(group) and group in GROUPS
    require(fits, f"group must be 0 (per channel), 32, 64 or 128, found {group!r}")


def check_columns(in_features: int) -> None:
    fits = in_features > 0 and in_features % STEP == 0
    require(fits, f"quantised weights need I in multiples of {STEP}, found I={in_features}")
