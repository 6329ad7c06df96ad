"""Expert weights in 8 or 4 bits: packed offline on any device, unpacked in registers by the kernels.

Range-based, without calibration ("Who Says Elephants Can't Run", section 3.4). ``rounding`` says how a format rounds,
:class:`~moe_kernels.quant.weight.QuantisedWeight` the layout; ``decode_kernel`` is its reader inside kernels.
Legend: E experts, O output features (rows of an expert's matrix), I input features, G groups of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from moe_kernels import backend
from moe_kernels.arguments import FLOATS, describe, require, require_kind, require_tensors
from moe_kernels.quant.checks import Codes, check_quantise
from moe_kernels.quant.packing import pack, values
from moe_kernels.quant.rounding import rounded
from moe_kernels.quant.weight import QuantisedWeight

GROUP: Final = 128
"""Input columns of a group, unless the caller says otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QuantisationError:
    """What rounding did to each expert's matrix, float32 ``[E]`` each.

    ``relative_rms_E`` is rms(error) / rms(weight), ``snr_db_E`` = -20 log10 of it: infinite if nothing was lost. An
    expert of zeros has relative error 0.
    """

    max_abs_E: Tensor
    rms_E: Tensor
    relative_rms_E: Tensor
    snr_db_E: Tensor


@backend.eager
@torch.no_grad()
def quantize_experts(
    w_EOI: Tensor,
    bits: int,
    group: int = GROUP,
    *,
    codes: Codes = "int",
    scale_rows: int = 1,
    zeros: bool = False,
    into: QuantisedWeight | None = None,
) -> QuantisedWeight:
    """Round ``w_EOI`` to codes with one scale per row (``group`` 0) or per ``group`` columns of a row.

    Integers: the scale is rounded to float16 first and the codes are taken with the rounded one, half to even. So a
    value's error is half a step at most; beyond that only clipping costs (int4 as :data:`rounding.EXTREME_CODE` says,
    and groups whose scale float16 holds to few bits, below 6e-5). A group of zeros has scale 0. Offline: it reads
    values, so a GPU is waited for. Memory beyond the result: one expert in float32, a few times.

    Args:
        w_EOI: float32, bfloat16 or float16, any strides. I must be a multiple of 16, O of ``scale_rows``.
        bits: 4 or 8.
        group: 0, 32, 64 or 128. A row's last group may be smaller.
        codes, scale_rows: as in :class:`QuantisedWeight`: "e4m3" 8, 128, 128 is FP8 in blocks, "e2m1" 4, 32 MXFP4.
        zeros: integers between a group's extremes, not around 0.
        into: parts to fill and return, on any device, e.g. ``parts.experts(e, e + 1)`` of one expert at a time.

    Raises:
        ArgumentError: a shape, dtype, ``bits`` or ``group`` that is not offered; ``into`` is another weight's; NaN,
            infinity, or values that overflow float16's scale.

    Example: one row ``[-4.0, 1.0, 2.2, 0, ...]``, 4 bits: scale -4 / -8 = 0.5, codes -8, 2, 4, 0: ``[-4, 1, 2, 0]``.
    """
    check_quantise(w_EOI, bits, group, codes)
    wanted = QuantisedWeight.empty(
        (w_EOI.shape[0], w_EOI.shape[1], w_EOI.shape[2]), bits=bits, group=group, codes=codes, scale_rows=scale_rows,
        zeros=zeros, device="meta" if into is not None else w_EOI.device,
    )  # fmt: skip
    into = wanted if into is None else _checked_into(into, wanted)
    for expert, w_OI in enumerate(w_EOI):
        require(bool(w_OI.isfinite().all()), f"expert {expert} has values that are NaN or infinite")
        codes_OI, scales, zeros_of = rounded(w_OI.float(), into)
        fits = bool(scales.isfinite().all())
        require(fits, f"expert {expert}: a scale does not fit {str(into.scales.dtype).removeprefix('torch.')}")
        into.scales[expert] = scales
        into.packed[expert] = pack(codes_OI, bits)
        if into.zeros is not None and zeros_of is not None:
            into.zeros[expert] = zeros_of
    return into


def _checked_into(into: QuantisedWeight, wanted: QuantisedWeight) -> QuantisedWeight:
    fits = (into.format, into.shape, into.scales.dtype) == (wanted.format, wanted.shape, wanted.scales.dtype)
    found = f"found {into.format} of shape {into.shape} with {into.scales.dtype} scales"
    require(fits, f"into must be {wanted.format} of shape {wanted.shape} with {wanted.scales.dtype} scales, {found}")
    return into


@backend.eager
def dequantize_experts(q: QuantisedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """``w_EOI``: value of the code x scale in float32, rounded once to another ``dtype``. With float16 scales exact in
    float32 (8 + 11 bits).

    Raises:
        ArgumentError: ``dtype`` is not float32, bfloat16, float16 or float64.
    """
    require_kind(isinstance(q, QuantisedWeight), "q must be a QuantisedWeight", q)
    floats = (*FLOATS, torch.float64)
    require(dtype in floats, f"dtype must be one of {floats} for weights of shape {q.shape}, found {dtype}")
    if backend.use_triton(q.packed) and dtype in FLOATS:
        from moe_kernels.quant import kernel as dequantize_triton

        with backend.device_of(q.packed):
            return dequantize_triton.launch(q, dtype)
    w_EOI = torch.empty(q.shape, dtype=dtype, device=q.device)
    for expert in range(q.shape[0]):
        w_EOI[expert] = values(q.experts(expert, expert + 1))[0]
    return w_EOI


@backend.eager
@torch.no_grad()
def quantisation_error(w_EOI: Tensor, q: QuantisedWeight) -> QuantisationError:
    """How far ``q`` is from the ``w_EOI`` it was made from, per expert.

    Raises:
        ArgumentError: different shapes or devices.
    """
    require_tensors(w=w_EOI)
    require_kind(isinstance(q, QuantisedWeight), "q must be a QuantisedWeight", q)
    fits = tuple(w_EOI.shape) == q.shape and w_EOI.device == q.device
    require(fits, f"w must be {q.shape} on {q.device} like q, found {describe(w_EOI)} on {w_EOI.device}")
    stats = torch.zeros(3, q.shape[0], dtype=torch.float64, device=w_EOI.device)
    for expert in range(q.shape[0]):
        w_OI = w_EOI[expert].double()
        error_OI = dequantize_experts(q.experts(expert, expert + 1))[0].double() - w_OI
        if w_OI.numel():
            stats[:, expert] = torch.stack([error_OI.abs().amax(), _rms(error_OI), _rms(w_OI)])
    max_abs_E, rms_E, weight_E = stats
    relative_E = torch.where(rms_E == 0, 0.0, rms_E / weight_E)
    return QuantisationError(
        max_abs_E=max_abs_E.float(),
        rms_E=rms_E.float(),
        relative_rms_E=relative_E.float(),
        snr_db_E=-20 * relative_E.log10().float(),
    )


def _rms(values: Tensor) -> Tensor:
    result: Tensor = values.square().mean().sqrt()
    return result
