"""One check, and the random layers that checks run on."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from bench.bank import DTYPES, QUANTISED, poison
from bench.shapes import LayerShape, find
from moe_kernels import backend
from moe_kernels.quant.op import dequantize_experts, quantize_experts
from moe_kernels.quant.weight import QuantisedWeight, Weight

TOLERANCE: Final = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Norm of the difference over the norm of the float32 result, by the dtype of the activations. One rounding of h and
one of y leave 2^-9 each in bfloat16, 2^-12 in float16; the rest is room for the order of addition."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """``run(device)`` returns how far off it was as a share of what is allowed (0 where equality was asked for), or
    raises. Checks of equal ``key`` share inputs and run in one process.
    """

    name: str
    key: str
    run: Callable[[str], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """Weights as the op takes them, and the same numbers in float32."""

    shape: LayerShape
    w_in: Weight
    w_down: Weight
    exact_in: Tensor
    exact_down: Tensor
    bias_in: Tensor
    bias_down: Tensor


@lru_cache(maxsize=1)
def layer(name: str, dtype: str, activation_dtype: str, device: str) -> Layer:
    """Random weights of a known shape. The last one is kept: checks come sorted by key."""
    shape = find(name)
    kind = DTYPES[activation_dtype]
    w_in = random((shape.E, shape.in_rows, shape.d), kind, device, seed=1) / math.sqrt(shape.d)
    w_down = random((shape.E, shape.d, shape.f), kind, device, seed=2) / math.sqrt(shape.f)
    stored_in, stored_down = (_stored(w, dtype) for w in (w_in, w_down))
    return Layer(
        shape=shape,
        w_in=stored_in,
        w_down=stored_down,
        exact_in=exact_weight(stored_in),
        exact_down=exact_weight(stored_down),
        bias_in=random((shape.E, shape.in_rows), kind, device, seed=3),
        bias_down=random((shape.E, shape.d), kind, device, seed=4),
    )


def random(size: tuple[int, ...], dtype: torch.dtype, device: str, *, seed: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(size, generator=generator, device=device).to(dtype)


def unaligned(tensor: Tensor) -> Tensor:
    """The same numbers, starting one element into an allocation: loads of more than one element would fault."""
    buffer = tensor.new_empty(tensor.numel() + 1)
    return buffer[1:].view(tensor.shape).copy_(tensor)


def kernels(device: str) -> AbstractContextManager[None]:
    """The tested side: kernels, on whatever memory was last in use filled with NaN."""
    poison(device, sizes=(1 << 20, 1 << 24))
    return backend.forced("triton")


def references() -> AbstractContextManager[None]:
    return backend.forced("torch")


def share(found: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    """Deviation over tolerance. NaN or inf must stand in the same places."""
    found, expected = found.double(), expected.double()
    finite = expected.isfinite()
    require(found.shape == expected.shape, f"shape {tuple(found.shape)} instead of {tuple(expected.shape)}")
    require(bool((found.isfinite() == finite).all()), f"{int((found.isfinite() != finite).sum())} elements not written")
    difference = (found - expected)[finite].norm()
    return float(difference / expected[finite].norm().clamp_min(1e-30)) / TOLERANCE[dtype]


def require(condition: bool, message: str) -> None:
    """``assert`` that ``python -O`` keeps: a check that cannot fail is none."""
    if not condition:
        raise AssertionError(message)


def _stored(w_EOI: Tensor, dtype: str) -> Weight:
    return quantize_experts(w_EOI, **QUANTISED[dtype]) if dtype in QUANTISED else w_EOI


def exact_weight(weight: Weight) -> Tensor:
    return dequantize_experts(weight) if isinstance(weight, QuantisedWeight) else weight.float()
