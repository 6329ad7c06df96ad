"""MoE layers to test with, and what they return by definition: a loop in float64 that shares no code with the library.

Legend: T rows, D hidden size, E experts, F expert width, K slots per row, H the first matrix's rows (2F or F).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from moe_kernels import QuantisedWeight, dequantize_experts, fused_moe, quantize_experts

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMATS = [(8, 0), (8, 128), (4, 0), (4, 128)]
"""Bits and group of quantised weights."""
CODE_ROUNDINGS = {torch.float32: 128, torch.float16: 4, torch.bfloat16: 4}
"""With codes: a sum runs over code + offset, which costs float32 the bits of the offset."""


def _sigmoid(z: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-z))


def _swiglu_oai(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return (up + 1) * gate * _sigmoid(1.702 * gate)


def _gelu_tanh(z: Tensor) -> Tensor:
    return z / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu": lambda gate, up: gate * _sigmoid(gate) * up,
    "swiglu_oai": _swiglu_oai,
}
UNGATED: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda z: z / 2 * (1 + torch.erf(z / math.sqrt(2))),
    "gelu_tanh": _gelu_tanh,
    "relu": lambda z: z.clamp(min=0),
    "silu": lambda z: z * _sigmoid(z),
    "identity": lambda z: z,
}
ACTIVATIONS = [*GATED, *UNGATED]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """The arguments of :func:`moe_kernels.fused_moe`."""

    x_TD: Tensor
    w_in: Tensor | QuantisedWeight
    w_down: Tensor | QuantisedWeight
    ids_TK: Tensor
    weights_TK: Tensor
    activation: str = "swiglu"
    bias_in: Tensor | None = None
    bias_down: Tensor | None = None
    weights_on: str = "output"

    def __call__(self, **more: Any) -> Tensor:
        flags = {name: getattr(self, name) for name in ("activation", "bias_in", "bias_down", "weights_on")} | more
        return fused_moe(self.x_TD, self.w_in, self.w_down, self.ids_TK, self.weights_TK, **flags)

    def but(self, **changes: Any) -> Layer:
        return replace(self, **changes)

    def tensors(self) -> dict[str, Tensor]:
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def expected(self) -> Tensor:
        """``y_TD`` in float64; ids outside 0..E-1 contribute nothing."""
        return expected(self)


def random_layer(
    rows: int,
    hidden: int = 24,
    width: int = 16,
    experts: int = 5,
    slots: int = 2,
    *,
    dtype: torch.dtype = torch.float32,
    activation: str = "swiglu",
    biased: bool = False,
    seed: int = 0,
) -> Layer:
    """Distinct experts per row, outputs of order 1. With hidden size, width and slots from 1 on; rows from 0 on."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    in_width = 2 * width if activation in GATED else width
    return Layer(
        x_TD=normal(rows, hidden),
        w_in=normal(experts, in_width, hidden, scale=hidden**-0.5),
        w_down=normal(experts, hidden, width, scale=width**-0.5),
        ids_TK=torch.rand(rows, experts, generator=generator).argsort(dim=1)[:, :slots].contiguous(),
        weights_TK=torch.rand(rows, slots, generator=generator),
        activation=activation,
        bias_in=normal(experts, in_width) if biased else None,
        bias_down=normal(experts, hidden) if biased else None,
    )


def exact_layer(
    rows: int, size: int = 16, experts: int = 5, slots: int = 2, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Layer:
    """Expert e turns its row by e + 1 places: small integers and dyadic weights make every step exact in any dtype.

    D = F = ``size``, activation "identity". Outputs are multiples of 1/8 below 8 x slots.
    """
    generator = torch.Generator().manual_seed(seed)
    layer = random_layer(rows, size, size, experts, slots, dtype=dtype, activation="identity", seed=seed)
    eye = torch.eye(size, dtype=dtype)
    return layer.but(
        x_TD=torch.randint(-8, 9, (rows, size), generator=generator).to(dtype),
        w_in=eye.expand(experts, size, size).contiguous(),
        w_down=torch.stack([eye.roll(expert + 1, dims=0) for expert in range(experts)]),
        weights_TK=torch.randint(0, 9, (rows, slots), generator=generator) / 8,
    )


def quantised(layer: Layer, bits: int, group: int) -> tuple[Layer, Tensor]:
    """The layer with packed weights, and its output by definition with the values that they stand for."""
    packed = [quantize_experts(weight, bits, group) for weight in (layer.w_in, layer.w_down)]
    values = [dequantize_experts(weight, torch.float64) for weight in packed]
    return layer.but(w_in=packed[0], w_down=packed[1]), layer.but(w_in=values[0], w_down=values[1]).expected()


def expected(layer: Layer) -> Tensor:
    """The definition, one expert and slot at a time."""
    y_TD = torch.zeros(layer.x_TD.shape, dtype=torch.float64)
    weights_TK = layer.weights_TK.double()
    for expert in range(layer.w_down.shape[0]):
        for slot in range(layer.ids_TK.shape[1]):
            rows = layer.ids_TK[:, slot] == expert
            weight_N1 = weights_TK[rows, slot, None]
            x_ND = layer.x_TD[rows].double()
            if layer.weights_on == "input":
                y_TD[rows] += expert_output(layer, expert, x_ND * weight_N1)
            else:
                y_TD[rows] += weight_N1 * expert_output(layer, expert, x_ND)
    return y_TD


def expert_output(layer: Layer, expert: int, x_ND: Tensor) -> Tensor:
    h_NH = x_ND.double() @ layer.w_in[expert].double().T
    if layer.bias_in is not None:
        h_NH = h_NH + layer.bias_in[expert].double()
    if layer.activation in GATED:
        h_NF = GATED[layer.activation](*h_NH.chunk(2, dim=1))
    else:
        h_NF = UNGATED[layer.activation](h_NH)
    y_ND = h_NF @ layer.w_down[expert].double().T
    return y_ND if layer.bias_down is None else y_ND + layer.bias_down[expert].double()
