"""Codes to the packed layout and back, and checkpoints' codes, scales and zero points to a checked weight.

Legend: E experts, O output features, I input features, G groups of a row, B bytes of a row, J bytes of a run.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_kernels.arguments import check_like, describe, require, require_optional_tensors, require_tensors
from moe_kernels.quant.checks import RUN, SCALE_TYPES, Codes, check_columns, check_format, groups_of
from moe_kernels.quant.weight import QuantisedWeight

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_E4M3_NAN = 0x7F
_E4M3_LARGEST = 448.0
_E8M0_NAN = 255
E8M0_LARGEST = 191
"""2^64: products take scales and a factor of 2^63 together as a bfloat16."""


def pack(codes_OI: Tensor, bits: int) -> Tensor:
    """uint8 codes ``[..., I]`` as :class:`QuantisedWeight` stores them; its last run is filled up with 0."""
    if bits == 8:
        return codes_OI
    *outer, columns = codes_OI.shape
    runs = -(-columns // RUN)
    halves_RHJ = F.pad(codes_OI, (0, runs * RUN - columns)).view(*outer, runs, 2, RUN // 2)
    return torch.bitwise_or(halves_RHJ[..., 0, :], halves_RHJ[..., 1, :] << 4).flatten(-2)


def unpack(packed_OB: Tensor, bits: int, columns: int) -> Tensor:
    """The inverse of :func:`pack`."""
    if bits == 8:
        return packed_OB
    bytes_RJ = packed_OB.view(*packed_OB.shape[:-1], packed_OB.shape[-1] // (RUN // 2), RUN // 2)
    return torch.stack([bytes_RJ & 15, bytes_RJ >> 4], dim=-2).flatten(-3)[..., :columns]


def from_codes(
    codes_EOI: Tensor,
    scales: Tensor,
    *,
    bits: int,
    group: int,
    codes: Codes = "int",
    zeros: Tensor | None = None,
    scale_rows: int = 1,
    group_of: Tensor | None = None,
) -> QuantisedWeight:
    """A weight of what a checkpoint holds, its values checked. Offline: it reads them.

    Args:
        codes_EOI: uint8, one code a byte.
        scales: as :class:`QuantisedWeight` has them, and ``zeros`` likewise, but the last block of rows may be smaller:
            then scales are repeated for smaller blocks.
        group_of: integers ``[E, I]``, the group of each column (GPTQ's ``g_idx``). Columns are sorted by it, once; a
            weight whose columns are in order already gets no ``order``.

    Raises:
        ArgumentError: parts that do not fit each other; a scale that is 0, NaN, infinite or too large for float32
            products with a code; codes that mean no number; groups that are not of ``group`` columns each.
    """
    require_tensors(codes=codes_EOI, scales=scales)
    require_optional_tensors(zeros=zeros, group_of=group_of)
    check_format(bits, group, codes)
    fits = codes_EOI.dim() == 3 and codes_EOI.dtype == torch.uint8
    require(fits, f"codes must be uint8 [E, O, I], found {describe(codes_EOI)}")
    check_columns(codes_EOI.shape[2])
    require(bits == 8 or int(codes_EOI.max()) < 16, f"codes of 4 bits must be below 16, found {int(codes_EOI.max())}")
    order = None if group_of is None else _sorted_columns(group_of, codes_EOI, group)
    if order is not None:
        codes_EOI = codes_EOI.gather(2, order.long().unsqueeze(1).expand_as(codes_EOI))
    finer = math.gcd(scale_rows, codes_EOI.shape[1])
    if finer != scale_rows:
        scales = scales.repeat_interleave(scale_rows // finer, 1)[:, : codes_EOI.shape[1] // finer]
        scale_rows = finer
    weight = QuantisedWeight(
        packed=pack(codes_EOI, bits).contiguous(), scales=scales.contiguous(), bits=bits, group=group,
        in_features=codes_EOI.shape[2], codes=codes, zeros=None if zeros is None else zeros.contiguous(),
        scale_rows=scale_rows, order=order,
    )  # fmt: skip
    check_values(weight)
    return weight


def check_values(weight: QuantisedWeight) -> None:
    """Every code, scale and product of them is a number in float32, and no scale is 0. Offline: it reads them.

    Raises:
        ArgumentError: names the format, the shape and what was found.
    """
    of = f"of {weight.format} weights of shape {weight.shape}"
    if weight.codes == "e2m1":
        require(not bool((weight.scales == _E8M0_NAN).any()), f"scales {of} must be numbers, found E8M0's NaN (255)")
        largest = int(weight.scales.max()) if weight.scales.numel() else 0
        require(largest <= E8M0_LARGEST, f"scales {of} must be 2^64 at most, found 2^{largest - 127}")
        _check_products(weight, of)
        return
    scales = weight.scales.float()
    require(bool(scales.isfinite().all()), f"scales {of} must be finite {weight.scales.dtype}, found NaN or infinity")
    require(not bool((scales == 0).any()), f"scales {of} must not be 0, found {int((scales == 0).sum())} of them")
    if weight.codes == "e4m3":
        nan = (weight.packed & 0x7F) == _E4M3_NAN
        require(not bool(nan.any()), f"codes {of} must be numbers, found {int(nan.sum())} times e4m3's NaN")
    _check_products(weight, of)


def _check_products(weight: QuantisedWeight, of: str) -> None:
    """Codes are multiplied only where the largest scale times the largest code is not finite."""
    scales = _float_scales(weight)
    largest = {"e4m3": _E4M3_LARGEST, "e2m1": max(E2M1_VALUES)}.get(weight.codes, 1 << weight.bits)
    if not scales.numel() or bool((scales.abs().max() * largest).isfinite()):
        return
    infinite = ~values(weight).isfinite()
    found = f"found {int(infinite.sum())} others: the largest scale is {float(scales.abs().max()):g}"
    require(not bool(infinite.any()), f"codes times scales {of} must be finite in float32, {found}")


def scales_as(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales of a file in another type.

    Raises:
        ArgumentError: one is too large for it, or so small that it would become 0.
    """
    require_tensors(scales=scales)
    require(dtype in SCALE_TYPES["int"], f"scales can be {SCALE_TYPES['int']}, found {dtype}")
    converted = scales.to(dtype)
    lost = (converted.isfinite() != scales.isfinite()) | ((converted == 0) != (scales == 0))
    example = scales[lost][:1].tolist()
    require(not example, f"scales do not fit {dtype}: {int(lost.sum())} of them, for instance {example}")
    return converted


def values(weight: QuantisedWeight) -> Tensor:
    """``w_EOI`` in float32: the value of each code times its scale, in plain torch."""
    experts, out_features, in_features = weight.shape
    codes_EOI = unpack(weight.packed, weight.bits, in_features)
    scales = _float_scales(weight)
    if weight.codes == "int" and weight.zeros is None:
        numbers_EOI = codes_EOI.float().sub_(1 << (weight.bits - 1))
    elif weight.zeros is not None:
        numbers_EOI = codes_EOI.float().sub_(_spread(weight.zeros.float(), weight))
    elif weight.codes == "e4m3":
        numbers_EOI = codes_EOI.view(torch.float8_e4m3fn).float()
    else:
        numbers_EOI = torch.tensor(E2M1_VALUES, device=weight.device)[codes_EOI.int()]
    numbers_EOI.mul_(_spread(scales, weight))
    if weight.order is None:
        return numbers_EOI
    order_EOI = weight.order.long().unsqueeze(1).expand(experts, out_features, in_features)
    return torch.empty_like(numbers_EOI).scatter_(2, order_EOI, numbers_EOI)


def _float_scales(weight: QuantisedWeight) -> Tensor:
    if weight.codes != "e2m1":
        return weight.scales.float()
    return torch.ldexp(torch.ones(weight.scales.shape, device=weight.device), weight.scales.int() - 127)


def _spread(part: Tensor, weight: QuantisedWeight) -> Tensor:
    """A part of scales or zeros to one number per row and column, where it is not broadcast."""
    if weight.scale_rows > 1:
        part = part.repeat_interleave(weight.scale_rows, 1)[:, : weight.shape[1]]
    return part.repeat_interleave(weight.group, 2)[:, :, : weight.in_features] if weight.group else part


def _sorted_columns(group_of: Tensor, codes_EOI: Tensor, group: int) -> Tensor | None:
    """int32 ``[E, I]``, columns by group; None if they are so already."""
    experts, _, in_features = codes_EOI.shape
    check_like(group_of, (experts, in_features), group_of.dtype, "group_of [E, I]")
    require(group > 0, f"columns belong to groups where there are groups: group_of with group {group}")
    sorted_EI, order_EI = group_of.sort(dim=1, stable=True)
    expected_I = torch.arange(in_features, device=group_of.device) // group
    fits = bool((sorted_EI == expected_I).all())
    require(fits, f"each of the {groups_of(in_features, group)} groups must have {group} of {in_features} columns")
    if bool((order_EI == torch.arange(in_features, device=group_of.device)).all()):
        return None
    return order_EI.int()
