"""Brings stored integers into the form that kernels take, without rounding anything."""

from __future__ import annotations

import torch

from moe_kernels import QuantisedWeight, from_codes
from services.errors import CheckpointError
from services.model.dequantised.formats import scaled
from services.model.dequantised.parts import Part, Parts, equal_groups
from services.model.expert_format import Kind
from services.model.quantised.stored import LinearFormat, Shape

_HINT = "Serve it with --expert-format dense."


def as_stored(scheme: LinearFormat, parts: Parts, shape: Shape, kind: Kind) -> QuantisedWeight:
    """Return the weight ``[N, K]``, as the only expert of a weight of ``kind``.

    Raises:
        CheckpointError: codes, zero points or the order of columns are not such that ``kind`` has each value exactly.
    """
    weight, half = scaled(scheme, parts, shape), 1 << (kind.bits - 1)
    if not torch.equal(weight.group_K, equal_groups(shape[1], kind.group or shape[1])):
        raise _inexact(parts.get("order", parts["codes"]), f"columns in groups of {kind.group}", "another order")
    codes_NK = weight.codes_NK
    if weight.zeros_NG is None:
        codes_NK = codes_NK.short() + half
    elif not (weight.zeros_NG == half).all():
        raise _inexact(parts.get("zeros", parts["codes"]), f"the zero point {half} alone", "others")
    if codes_NK.numel() and not 0 <= int(codes_NK.min()) <= int(codes_NK.max()) < 2 * half:
        raise _inexact(parts["codes"], f"integers of {kind.bits} bits", "larger ones")
    scales_NG = weight.scales_NG.expand(shape[0], -1).to(getattr(torch, kind.scale_type))
    return from_codes(
        codes_NK.to(torch.uint8).contiguous().unsqueeze(0),
        scales_NG.contiguous().unsqueeze(0),
        bits=kind.bits,
        group=kind.group,
    )


def _inexact(part: Part, expected: str, found: str) -> CheckpointError:
    return CheckpointError(
        f'{part.file}: tensor "{part.name}" must hold {expected} for its weight to be held as it is stored, found '
        f"{found}.",
        hint=_HINT,
    )
