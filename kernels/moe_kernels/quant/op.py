"""Expert weights in 8 or 4 bits: packed offline on any device, unpacked in registers by the kernels.

Symmetric and range-based, without calibration ("Who Says Elephants Can't Run", section 3.4): per output channel, or per
group of 128 input columns. :class:`~moe_kernels.quant.weight.QuantisedWeight` says the layout; ``decode_kernel`` is its
reader inside kernels.
Legend: E experts, O output features (rows of an expert's matrix), I input features, G groups of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_kernels import backend
from moe_kernels.arguments import FLOATS, describe, require, require_kind, require_tensors
from moe_kernels.quant.checks import check_quantise, groups_of
from moe_kernels.quant.packing import pack, values
from moe_kernels.quant.weight import QuantisedWeight

GROUP: Final = 128
"""Input columns of a group, unless the caller says otherwise."""
EXTREME_CODE: Final = {4: -8, 8: 127}
"""The code of a group's value of largest magnitude.

-8 uses all 16 codes of int4: the step is extreme / -8, and the scale has the sign that brings the extreme there. On
normal weights that leaves 12 % less rms error than extreme / 7 with codes -7..7, at the price that a value near minus
the extreme is clipped to 7 steps, an error of up to one step instead of a half. In int8 the gain would be 0.8 %: there
codes -127..127 keep every error within half a step."""
SMALLEST_SCALE: Final = 2.0**-24
"""float16's smallest positive number."""


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
    w_EOI: Tensor, bits: int, group: int = GROUP, *, into: QuantisedWeight | None = None
) -> QuantisedWeight:
    """Round ``w_EOI`` to ``bits`` with one scale per row (``group`` 0) or per ``group`` columns of a row.

    The scale is rounded to float16 first and the codes are taken with the rounded one, half to even. So a value's error
    is half a step at most; beyond that only clipping costs (int4 as :data:`EXTREME_CODE` says, and groups whose scale
    float16 holds to few bits, below 6e-5). A group of zeros has scale 0. Offline: it reads values, so a GPU is waited
    for. Memory beyond the result: one expert in float32, a few times.

    Args:
        w_EOI: float32, bfloat16 or float16, any strides. I must be a multiple of 16.
        bits: 4 or 8.
        group: 0, 32, 64 or 128. A row's last group may be smaller.
        into: parts to fill and return, on any device, e.g. ``parts.experts(e, e + 1)`` of one expert at a time.

    Raises:
        ArgumentError: a shape, dtype, ``bits`` or ``group`` that is not offered; ``into`` is another weight's; NaN,
            infinity, or values that overflow float16's scale.

    Example: one row ``[-4.0, 1.0, 2.2, 0, ...]``, 4 bits: scale -4 / -8 = 0.5, codes -8, 2, 4, 0: ``[-4, 1, 2, 0]``.
    """
    check_quantise(w_EOI, bits, group)
    shape = (w_EOI.shape[0], w_EOI.shape[1], w_EOI.shape[2])
    if into is None:
        into = QuantisedWeight.empty(shape, bits=bits, group=group, device=w_EOI.device)
    _check_into(into, shape, bits, group)
    out_features, runs = shape[1], groups_of(shape[2], group)
    for expert, w_OI in enumerate(w_EOI):
        require(bool(w_OI.isfinite().all()), f"expert {expert} has values that are NaN or infinite")
        whole_OI = F.pad(w_OI.float(), (0, runs * group - shape[2] if group else 0))
        w_OGC = whole_OI.reshape(out_features, runs, whole_OI.shape[1] // runs)
        scales_OG = _scales(w_OGC, bits)
        require(bool(scales_OG.isfinite().all()), f"expert {expert}: a scale does not fit float16")
        codes_OI = _codes(w_OGC, scales_OG, bits).flatten(1)[:, : shape[2]]
        into.scales[expert] = scales_OG
        into.packed[expert] = pack(codes_OI, bits)
    return into


def _check_into(into: QuantisedWeight, shape: tuple[int, int, int], bits: int, group: int) -> None:
    wanted = QuantisedWeight.empty((0, shape[1], shape[2]), bits=bits, group=group)
    fits = (into.format, into.shape, into.scales.dtype) == (wanted.format, shape, wanted.scales.dtype)
    found = f"found {into.format} of shape {into.shape} with {into.scales.dtype} scales"
    require(fits, f"into must be {wanted.format} of shape {shape} with {wanted.scales.dtype} scales, {found}")


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


def _scales(w_OGC: Tensor, bits: int) -> Tensor:
    """float16 ``[O, G]``; tiny ones are raised to float16's smallest number, so that they still mean something."""
    extreme_OG = w_OGC.gather(2, w_OGC.abs().argmax(2, keepdim=True)).squeeze(2)
    exact_OG = extreme_OG / EXTREME_CODE[bits] if bits == 4 else extreme_OG.abs() / EXTREME_CODE[bits]
    return torch.where(exact_OG == 0, 0.0, exact_OG.abs().clamp_min(SMALLEST_SCALE).copysign(exact_OG)).half()


def _codes(w_OGC: Tensor, scales_OG: Tensor, bits: int) -> Tensor:
    """Codes with their bias added: 0..15 or 1..255."""
    step_OG1 = torch.where(scales_OG == 0, 1.0, scales_OG.float()).unsqueeze(2)
    half = 1 << (bits - 1)
    lowest = -half if bits == 4 else 1 - half
    return ((w_OGC / step_OG1).round().clamp(lowest, half - 1) + half).to(torch.uint8)
