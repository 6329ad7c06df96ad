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

from moe_kernels import backend
from moe_kernels.arguments import (
    FLOATS,
    check_quantise,
    describe,
    require,
    require_kind,
    require_tensors,
)
from moe_kernels.quant.weight import QuantisedWeight

GROUP: Final = 128
"""Input columns of a group, and of a run of the int4 layout."""
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
def quantize_experts(w_EOI: Tensor, bits: int, group: int = GROUP) -> QuantisedWeight:
    """Round ``w_EOI`` to ``bits`` with one scale per row (``group`` 0) or per 128 columns of a row (``group`` 128).

    The scale is rounded to float16 first and the codes are taken with the rounded one, half to even. So a value's error
    is half a step at most; beyond that only clipping costs (int4 as :data:`EXTREME_CODE` says, and groups whose scale
    float16 holds to few bits, below 6e-5). A group of zeros has scale 0. Offline: it reads values, so a GPU is waited
    for. Memory beyond the result: one expert in float32, a few times.

    Args:
        w_EOI: float32, bfloat16 or float16, any strides. I must be a multiple of 128, of 16 for ``bits`` 8 per channel.
        bits: 4 or 8.
        group: 0 or 128.

    Raises:
        ArgumentError: a shape, dtype, ``bits`` or ``group`` that is not offered; NaN, infinity, or values that overflow
            float16's scale.

    Example: one row ``[-4.0, 1.0, 2.2, 0, ...]``, 4 bits: scale -4 / -8 = 0.5, codes -8, 2, 4, 0: ``[-4, 1, 2, 0]``.
    """
    check_quantise(w_EOI, bits, group)
    experts, out_features, in_features = w_EOI.shape
    runs = in_features // group if group else 1
    device = w_EOI.device
    packed = torch.empty(experts, out_features, in_features * bits // 8, dtype=torch.uint8, device=device)
    scales = torch.empty(experts, out_features, runs, dtype=torch.float16, device=device)
    for expert, w_OI in enumerate(w_EOI):
        w_OGC = w_OI.float().reshape(out_features, runs, in_features // runs)
        require(bool(w_OGC.isfinite().all()), f"expert {expert} has values that are NaN or infinite")
        scales[expert] = _scales(w_OGC, bits)
        require(bool(scales[expert].isfinite().all()), f"expert {expert}: a scale does not fit float16")
        packed[expert] = _pack(_codes(w_OGC, scales[expert], bits).flatten(1), bits)
    return QuantisedWeight(packed=packed, scales=scales, bits=bits, group=group, in_features=in_features)


@backend.eager
def dequantize_experts(q: QuantisedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """``w_EOI``: code x scale, exact in float32 (8 + 11 bits) and rounded once to another ``dtype``.

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
    experts, out_features, in_features = q.shape
    w_EOI = torch.empty(q.shape, dtype=dtype, device=q.device)
    for expert in range(experts):
        codes_OI = _unpack(q.packed[expert], q.bits).float() - (1 << (q.bits - 1))
        codes_OGC = codes_OI.view(out_features, q.scales.shape[2], q.group or in_features)
        w_EOI[expert] = (codes_OGC * q.scales[expert].float().unsqueeze(2)).view(out_features, in_features)
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


def _pack(codes_OI: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return codes_OI
    rows, columns = codes_OI.shape
    halves_ORHJ = codes_OI.view(rows, columns // GROUP, 2, GROUP // 2)
    return torch.bitwise_or(halves_ORHJ[:, :, 0], halves_ORHJ[:, :, 1] << 4).flatten(1)


def _unpack(packed_OB: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return packed_OB
    rows, stored = packed_OB.shape
    bytes_ORJ = packed_OB.view(rows, stored // (GROUP // 2), GROUP // 2)
    halves_ORHJ = torch.stack([bytes_ORJ & 15, bytes_ORJ >> 4], dim=2)
    return halves_ORHJ.flatten(1)
