"""One expert's matrix to codes, scales and zero points: what each format's rounding is. Range-based, no calibration.

Legend: O output features, I input features, R blocks of rows, r rows of one, G groups of a row, C columns of one.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_kernels.quant.checks import groups_of
from moe_kernels.quant.packing import E2M1_VALUES
from moe_kernels.quant.weight import QuantisedWeight

EXTREME_CODE: Final = {4: -8, 8: 127}
"""The code of a group's value of largest magnitude.

-8 uses all 16 codes of int4: the step is extreme / -8, and the scale has the sign that brings the extreme there. On
normal weights that leaves 12 % less rms error than extreme / 7 with codes -7..7, at the price that a value near minus
the extreme is clipped to 7 steps, an error of up to one step instead of a half. In int8 the gain would be 0.8 %: there
codes -127..127 keep every error within half a step."""
SMALLEST_SCALE: Final = 2.0**-24
"""float16's smallest positive number."""
_E4M3_LARGEST: Final = 448.0
_E2M1_TOP: Final = 2
"""The exponent of e2m1's largest numbers, 4 and 6."""


def rounded(w_OI: Tensor, like: QuantisedWeight) -> tuple[Tensor, Tensor, Tensor | None]:
    """uint8 codes ``[O, I]``, scales and zero points as ``like`` has them, of a matrix in float32."""
    out_features, in_features = w_OI.shape
    runs = groups_of(in_features, like.group)
    whole_OI = F.pad(w_OI, (0, runs * like.group - in_features if like.group else 0))
    w_RrGC = whole_OI.view(out_features // like.scale_rows, like.scale_rows, runs, whole_OI.shape[1] // runs)
    zeros_RG: Tensor | None = None
    if like.codes == "e4m3":
        scales_RG = _over(w_RrGC.abs().amax((1, 3)), _E4M3_LARGEST)
        codes_RrGC = (w_RrGC / _steps(scales_RG)).to(torch.float8_e4m3fn).view(torch.uint8)
    elif like.codes == "e2m1":
        scales_RG, codes_RrGC = _e2m1(w_RrGC)
    elif like.zeros is not None:
        scales_RG, zeros_RG = _between_extremes(w_RrGC, like.bits)
        codes_RrGC = _integers(w_RrGC, scales_RG, zeros_RG.float(), 0, (1 << like.bits) - 1)
    else:
        scales_RG, half = _around_zero(w_RrGC, like.bits), 1 << (like.bits - 1)
        lowest = 0 if like.bits == 4 else 1
        codes_RrGC = _integers(w_RrGC, scales_RG, torch.full_like(scales_RG, half).float(), lowest, 2 * half - 1)
    return codes_RrGC.view(out_features, whole_OI.shape[1])[:, :in_features], scales_RG, zeros_RG


def _around_zero(w_RrGC: Tensor, bits: int) -> Tensor:
    """float16 ``[R, G]``; tiny ones are raised to float16's smallest number, so that they still mean something."""
    w_RGC = w_RrGC.transpose(1, 2).flatten(2)
    extreme_RG = w_RGC.gather(2, w_RGC.abs().argmax(2, keepdim=True)).squeeze(2)
    exact_RG = _over(extreme_RG if bits == 4 else extreme_RG.abs(), EXTREME_CODE[bits])
    return torch.where(exact_RG == 0, 0.0, exact_RG.abs().clamp_min(SMALLEST_SCALE).copysign(exact_RG)).half()


def _between_extremes(w_RrGC: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scales in float16 and the codes of zero, which is among the numbers that can be meant."""
    low_RG, high_RG = w_RrGC.amin((1, 3)).clamp(max=0), w_RrGC.amax((1, 3)).clamp(min=0)
    levels = (1 << bits) - 1
    exact_RG = _over(high_RG - low_RG, levels)
    scales_RG = torch.where(exact_RG == 0, 0.0, exact_RG.clamp_min(SMALLEST_SCALE)).half()
    return scales_RG, (-low_RG / _steps(scales_RG)[:, 0, :, 0]).round().clamp(0, levels).to(torch.uint8)


def _integers(w_RrGC: Tensor, scales_RG: Tensor, zeros_RG: Tensor, lowest: int, highest: int) -> Tensor:
    codes_RrGC = (w_RrGC / _steps(scales_RG)).round() + zeros_RG[:, None, :, None]
    return codes_RrGC.clamp(lowest, highest).to(torch.uint8)


def _e2m1(w_RrGC: Tensor) -> tuple[Tensor, Tensor]:
    """The Open Compute Project's choice: the scale is 2 to the extreme's exponent less 2; larger numbers become 6."""
    extreme_RG = w_RrGC.abs().amax((1, 3))
    exponent_RG = torch.frexp(extreme_RG).exponent - 1 - _E2M1_TOP
    scales_RG = torch.where(extreme_RG == 0, 0, (exponent_RG + 127).clamp(0, 254)).to(torch.uint8)
    steps_RG = torch.ldexp(torch.ones(scales_RG.shape, device=w_RrGC.device), scales_RG.int() - 127)
    sizes = torch.tensor(E2M1_VALUES[:8], device=w_RrGC.device)
    between, w_RrGC = (sizes[1:] + sizes[:-1]) / 2, w_RrGC / steps_RG[:, None, :, None]
    # Halfway numbers go to the even mantissa: down to codes 0, 2, 4, 6, up from 1, 3, 5.
    nearest = torch.bucketize(w_RrGC.abs(), between)
    halfway = (w_RrGC.abs() == between[nearest.clamp(max=6)]) & (nearest % 2 == 1)
    return scales_RG, (nearest + halfway + 8 * (w_RrGC < 0)).to(torch.uint8)


def _over(values_RG: Tensor, number: float) -> Tensor:
    """The quotient. By a tensor: on a GPU torch multiplies by a number's inverse, and codes would not be a CPU's."""
    return values_RG / torch.full((), number, dtype=values_RG.dtype, device=values_RG.device)


def _steps(scales_RG: Tensor) -> Tensor:
    """Scales to divide by, ``[R, 1, G, 1]``: 1 where there is nothing but zeros."""
    return torch.where(scales_RG == 0, 1.0, scales_RG.float())[:, None, :, None]
