"""Brings each format's tensors into the form of :class:`Scaled`: codes, scales and zero points by row and group.

Legend: N rows (outputs) and K columns (inputs) of the weight, G groups of columns that share a scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.errors import CheckpointError
from services.model.dequantised.parts import (
    HINT,
    Part,
    Parts,
    Scaled,
    equal_groups,
    order_of,
    scales_of,
    unpacked,
)
from services.model.quantised.awq import Awq
from services.model.quantised.compressed import Compressed
from services.model.quantised.fp8 import Fp8Block
from services.model.quantised.gptq import Gptq
from services.model.quantised.mxfp4 import COLUMNS, Mxfp4
from services.model.quantised.stored import WORD_BITS, LinearFormat, Shape
from services.model.together import Together

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word the code of each of eight rows is."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def scaled(scheme: LinearFormat, parts: Parts, shape: Shape) -> Scaled:
    """Raises CheckpointError."""
    if isinstance(scheme, Together):
        return _together(parts, shape)
    if isinstance(scheme, Fp8Block):
        return _fp8(scheme, parts, shape)
    if isinstance(scheme, Compressed):
        return _compressed(scheme, parts, shape)
    if isinstance(scheme, Gptq):
        return _gptq(scheme, parts, shape)
    if isinstance(scheme, Awq):
        return _awq(scheme, parts, shape)
    assert isinstance(scheme, Mxfp4), scheme
    return _mxfp4(parts, shape)


def _together(parts: Parts, shape: Shape) -> Scaled:
    """Numbers, of a weight transposed; a bias is a row."""
    values_NK = parts["codes"].tensor
    one = torch.ones(1, 1).expand(shape[0], 1)
    group_K = equal_groups(shape[1], shape[1])
    return Scaled(codes_NK=values_NK.t() if values_NK.dim() == 2 else values_NK[None], scales_NG=one, group_K=group_K)


def _fp8(scheme: Fp8Block, parts: Parts, shape: Shape) -> Scaled:
    by = _blocks(parts["scales"], shape, scheme.rows, scheme.columns)
    return Scaled(codes_NK=parts["codes"].tensor.view(torch.uint8), table=_e4m3(), **by)


def _e4m3() -> Tensor:
    """Return the value of each byte, which is quicker to look up than to convert."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def _blocks(scales: Part, shape: Shape, rows: int, columns: int) -> dict[str, Tensor]:
    """Return scales by row and group; without ``rows`` there is one for the whole weight."""
    values = scales_of(scales)
    if not rows:
        return {"scales_NG": values.reshape(1, 1).expand(shape[0], 1), "group_K": equal_groups(shape[1], shape[1])}
    return {
        "scales_NG": values.repeat_interleave(rows, dim=0)[: shape[0]],
        "group_K": equal_groups(shape[1], columns),
    }


def _gptq(scheme: Gptq, parts: Parts, shape: Shape) -> Scaled:
    scales_GN = scales_of(parts["scales"])
    groups = len(scales_GN)
    if "bias" in parts and parts["bias"].tensor.any():
        raise parts["bias"].wrong("zeros, as the architecture has no bias here", "others")
    # Version 1 takes 1 from each zero point in a word, as a subtraction of words: a zero point of 0 borrows.
    ones = sum(1 << shift for shift in range(0, WORD_BITS, scheme.bits))
    zeros_GN = unpacked(parts["zeros"].tensor + scheme.zero_offset * ones, scheme.bits)
    order = parts.get("order")
    if not scheme.sorts and order is not None and not order.tensor.any():
        order = None  # some tools leave zeros where nothing is sorted
    return Scaled(
        codes_NK=unpacked(parts["codes"].tensor.t(), scheme.bits),
        scales_NG=scales_GN.t(),
        zeros_NG=zeros_GN.t(),
        group_K=equal_groups(shape[1], scheme.group or shape[1]) if order is None else order_of(order, groups),
    )


def _awq(scheme: Awq, parts: Parts, shape: Shape) -> Scaled:
    codes_KN, zeros_GN = (_awq_rows(parts[name].tensor) for name in ("codes", "zeros"))
    return Scaled(
        codes_NK=codes_KN.t(),
        scales_NG=scales_of(parts["scales"]).t(),
        zeros_NG=zeros_GN.t(),
        group_K=equal_groups(shape[1], scheme.group or shape[1]),
    )


def _awq_rows(words: Tensor) -> Tensor:
    rows = unpacked(words, 4).reshape(len(words), -1, len(_AWQ_ORDER))[..., list(_AWQ_ORDER)]
    return rows.flatten(-2)


def _mxfp4(parts: Parts, shape: Shape) -> Scaled:
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    return Scaled(
        codes_NK=unpacked(parts["codes"].tensor, 4).reshape(shape),
        scales_NG=scales_of(parts["scales"]),
        group_K=equal_groups(shape[1], COLUMNS),
        table=table,
    )


def _compressed(scheme: Compressed, parts: Parts, shape: Shape) -> Scaled:
    rows, columns = shape
    half = 1 << (scheme.bits - 1)
    packed = scheme.codes == "packed"
    if "shape" in parts:
        _check_shape(parts["shape"], shape)
    if "nothing" in parts and parts["nothing"].tensor.float().any():
        raise parts["nothing"].wrong("zeros, as config.json has the weights symmetric", "others")
    codes = parts["codes"].tensor
    if packed:
        codes = unpacked(codes, scheme.bits)[:, :columns]
    table = _e4m3() if scheme.codes == "fp8" else None
    codes = codes if table is None else codes.view(torch.uint8)
    if scheme.strategy == "block":
        by = _blocks(parts["scales"], shape, scheme.rows, scheme.columns)
        zeros = _plain_zeros(parts, scheme)
        zeros = None if zeros is None else zeros.repeat_interleave(scheme.rows, dim=0)[:rows]
        return Scaled(codes_NK=codes, zeros_NG=zeros, table=table, **by)
    scales = scales_of(parts["scales"]).reshape(rows if scheme.strategy != "tensor" else 1, -1)
    groups, order = scales.shape[1], parts.get("order")
    if order is not None and (order.tensor == -1).any():
        order = None  # what tools begin with, and leave where nothing is sorted
    if packed and "zeros" in parts and scheme.strategy != "tensor":
        zeros = unpacked(parts["zeros"].tensor.t(), scheme.bits)[:, :rows].t()
    else:
        zeros = _plain_zeros(parts, scheme)
        zeros = None if zeros is None else zeros.reshape(-1, groups)
        if packed:
            zeros = torch.full((rows, 1), half) if zeros is None else zeros + half
    return Scaled(
        codes_NK=codes,
        scales_NG=scales.expand(rows, groups),
        zeros_NG=None if zeros is None else zeros.expand(rows, zeros.shape[1]),
        table=table,
        group_K=equal_groups(columns, columns // groups) if order is None else order_of(order, groups),
    )


def _plain_zeros(parts: Parts, scheme: Compressed) -> Tensor | None:
    return parts["zeros"].tensor.float() if scheme.zeros else None


def _check_shape(part: Part, shape: Shape) -> None:
    found = tuple(int(size) for size in part.tensor)
    if found != shape:
        raise CheckpointError(
            f'{part.file}: tensor "{part.name}" must hold {list(shape)}, as config.json has the weight, found '
            f"{list(found)}.",
            hint=HINT,
        )
