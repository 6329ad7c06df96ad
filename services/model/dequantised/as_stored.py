"""Brings a stored weight into the form that kernels take, without rounding anything."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels import ArgumentError, QuantisedWeight, from_codes
from services.errors import CheckpointError
from services.model.dequantised.formats import scaled
from services.model.dequantised.parts import HINT, Part, Parts, Scaled, equal_groups
from services.model.dequantised.values import pieces
from services.model.expert_format import KINDS, Kind
from services.model.quantised.stored import LinearFormat, Shape

_LARGEST = {"e4m3": 448.0, "e2m1": 6.0}
"""Of the numbers that codes mean; of whole numbers, less their zero points, 2 ** bits is more than any."""


def as_stored(scheme: LinearFormat, parts: Parts, shape: Shape, kind: Kind, dtype: torch.dtype) -> QuantisedWeight:
    """Return the weight ``[N, K]``, as the only expert of a weight of ``kind`` that is served in ``dtype``.

    Raises:
        CheckpointError: codes, scales, zero points or the order of columns are not such that ``kind`` has each value,
            or a value is not finite in ``dtype``.
    """
    found = scaled(scheme, parts, shape)
    most = float(found.scales_NG.abs().max()) * _LARGEST.get(kind.codes, 1 << kind.bits)
    if most > min(torch.finfo(dtype).max, torch.finfo(torch.float32).max):
        _check_finite(scheme, parts, shape, dtype)
    groups_K = found.group_K.sort().values if kind.ordered else found.group_K
    if not torch.equal(groups_K, equal_groups(shape[1], kind.group or shape[1])):
        others = "groups of other sizes" if kind.ordered else "another order"
        raise _inexact(kind, parts.get("order", parts["codes"]), f"columns in groups of {kind.group}", others)
    codes_NK, zeros_NG = _whole(found, parts, kind) if kind.codes == "int" else (found.codes_NK, None)
    scales_NG = found.scales_NG
    if kind.scale_type == "uint8":
        scales_NG = parts["scales"].tensor.view(torch.uint8).reshape(shape[0], -1)
    scales_NG = scales_NG.expand(shape[0], -1)[:: kind.scale_rows]
    try:
        weight = from_codes(
            codes_NK.contiguous().unsqueeze(0),
            scales_NG.to(getattr(torch, kind.scale_type)).contiguous().unsqueeze(0),
            bits=kind.bits,
            group=kind.group,
            codes=kind.codes,
            zeros=None if zeros_NG is None else zeros_NG[:: kind.scale_rows].contiguous().unsqueeze(0),
            scale_rows=kind.scale_rows,
            group_of=found.group_K.unsqueeze(0) if kind.ordered else None,
        )
        return weight.with_order() if kind.ordered else weight
    except ArgumentError as error:
        raise CheckpointError(
            f'{parts["codes"].file}: "{parts["codes"].name}" cannot be held as it is stored: {error}.',
            hint=HINT,
        ) from error


def _whole(weight: Scaled, parts: Parts, kind: Kind) -> tuple[Tensor, Tensor | None]:
    """Return codes from 0 on, and their zero points; None where all are in the middle, and ``kind`` has none."""
    half, codes_NK, signed = 1 << (kind.bits - 1), weight.codes_NK, weight.codes_NK.dtype == torch.int8
    assert signed or weight.zeros_NG is not None, "codes from 0 on have zero points"
    zeros_NG = torch.zeros(1, 1) if weight.zeros_NG is None else weight.zeros_NG
    if signed:
        codes_NK, zeros_NG = codes_NK.short() + half, zeros_NG + half
    zeros_NG = zeros_NG.expand(codes_NK.shape[0], -1)
    for name, numbers in (("codes", codes_NK), ("zeros", zeros_NG)):
        if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < 2 * half:
            raise _inexact(kind, parts.get(name, parts["codes"]), f"integers of {kind.bits} bits", "larger ones")
    if kind.zeros:
        return codes_NK.to(torch.uint8), zeros_NG.expand(-1, weight.scales_NG.shape[1]).to(torch.uint8)
    if not (zeros_NG == half).all():
        raise _inexact(kind, parts.get("zeros", parts["codes"]), f"the zero point {half} alone", "others")
    return codes_NK.to(torch.uint8), None


def _check_finite(scheme: LinearFormat, parts: Parts, shape: Shape, dtype: torch.dtype) -> None:
    """Raise CheckpointError where a value is not finite in ``dtype``; :func:`pieces` finds those not in float32."""
    for first, piece in pieces(scheme, parts, shape):
        large_NK = ~piece.to(dtype).isfinite()
        if large_NK.any():
            row, column = (int(index) for index in large_NK.nonzero()[0])
            raise CheckpointError(
                f'{parts["codes"].file}: "{parts["codes"].name}" times its scales must be finite in '
                f"{str(dtype).removeprefix('torch.')}, found {float(piece[row, column]):g} in row {first + row}, "
                f"column {column}.",
                hint="Serve it with --dtype bfloat16 or float32.",
            )


def _inexact(kind: Kind, part: Part, expected: str, found: str) -> CheckpointError:
    """The other formats dequantise the weight, and round it if they are not "dense"."""
    *others, last = ("dense", *(name for name, other in KINDS.items() if str(other) != str(kind)))
    hint = f"Serve it with --expert-format {', '.join(others)} or {last}."
    return CheckpointError(
        f'{part.file}: tensor "{part.name}" must hold {expected} for its weight to be held as it is stored, found '
        f"{found}.",
        hint=hint if ".experts." in part.name else "Serve it with --dense-format dense.",
    )
