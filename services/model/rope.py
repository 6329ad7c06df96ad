"""Rotary position embedding: makes cos and sin of positions, and rotates queries and keys by them.

Legend: T rows, N heads, H head dimension, R the first dimensions of a head, which are rotated, I = R / 2 frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from services.model.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Return the angle per position of each dimension pair: float32 ``[I]``, on the CPU."""
    rotated = rope.dim or head_dim
    exponent_I = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    frequency_I = 1.0 / rope.theta**exponent_I
    if rope.kind == "linear":
        return frequency_I / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequency_I)
    if rope.kind == "yarn":
        return _yarn(rope, frequency_I, rotated)
    return frequency_I


def cos_sin(
    positions_T: Tensor,
    frequency_I: Tensor,
    attention_factor: float,
    each: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor] = lambda op, x: op(x),
) -> tuple[Tensor, Tensor]:
    """Return ``cos`` and ``sin`` for :func:`rotate`: float32 ``[T, 1, R]``, the sign of the rotation in ``sin``.

    Args:
        each: applies a function to each element.
    """
    angle_TI = positions_T.unsqueeze(1).float() * frequency_I
    cos_TI, sin_TI = (each(op, angle_TI) * attention_factor for op in (torch.cos, torch.sin))
    return torch.cat((cos_TI, cos_TI), dim=1).unsqueeze(1), torch.cat((-sin_TI, sin_TI), dim=1).unsqueeze(1)


def rotate(x_TNR: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    """Turn each pair (i, i + R/2) of ``x`` by its angle (Su et al. 2021, eq. 34, pairs split in halves)."""
    swapped_TNR = x_TNR.roll(x_TNR.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_TNR * cos_T1R, swapped_TNR, sin_T1R)


def _llama3(rope: RopeSpec, frequency_I: Tensor) -> Tensor:
    """Long wavelengths are stretched by ``factor``, short ones kept, those between blended (Llama 3.1)."""
    turns_I = rope.original_max_position * frequency_I / (2 * math.pi)
    kept_I = ((turns_I - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return frequency_I * (kept_I + (1 - kept_I) / rope.factor)


def _yarn(rope: RopeSpec, frequency_I: Tensor, rotated: int) -> Tensor:
    """Apply NTK-by-parts (Peng et al. 2023, section 3.2): dimensions that turn often are kept, the others stretched."""

    def dimension_of(turns: float) -> float:
        """Return the (fractional) dimension that makes ``turns`` turns over the original length."""
        wavelength = rope.original_max_position / (turns * 2 * math.pi)
        return rotated * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    ramp_I = (torch.arange(rotated // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    kept_I = 1 - ramp_I.clamp(0, 1)
    return frequency_I * (kept_I + (1 - kept_I) / rope.factor)
