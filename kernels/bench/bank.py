"""Random weights of one layer, in as many copies as a measurement rotates over; shared by all providers.

Everything is built on first use and dropped with the bank, so that the next shape finds the memory free.
Legend: E experts, O output rows, I input columns, D hidden, F expert width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from bench import floors
from bench.shapes import LayerShape
from bench.timing import copies_for
from moe_kernels.quant.op import dequantize_experts, quantize_experts
from moe_kernels.quant.weight import QuantisedWeight, Weight

DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
QUANTISED: Final[Mapping[str, Mapping[str, Any]]] = {
    "int8": {"bits": 8, "group": floors.GROUP},
    "int8_channel": {"bits": 8, "group": 0},
    "int4": {"bits": 4, "group": floors.GROUP},
    "int4_channel": {"bits": 4, "group": 0},
    "int4_mixed": {"bits": 4, "group": floors.GROUP, "zeros": True},
    "int4_g32": {"bits": 4, "group": 32, "zeros": True},
    "fp8": {"bits": 8, "group": floors.GROUP, "codes": "e4m3", "scale_rows": floors.GROUP},
    "mxfp4": {"bits": 4, "group": 32, "codes": "e2m1"},
}
"""dtype of the weights: how :func:`quantize_experts` makes them."""


class Bank:
    """Weights of ``shape`` on ``device``. Activations have ``activation_dtype`` also where weights are integers."""

    def __init__(self, shape: LayerShape, device: str, *, activation_dtype: str = "bf16", seed: int = 0) -> None:
        self.shape = shape
        self.device = device
        self.activation_dtype = activation_dtype
        self.torch_dtype = DTYPES[activation_dtype]
        self._generator = torch.Generator(device).manual_seed(seed)
        self._float: list[tuple[Tensor, Tensor]] = []
        self._quantised: dict[str, list[tuple[QuantisedWeight, QuantisedWeight]]] = {}

    def copies(self, dtype: str, active: int) -> int:
        """How many copies a call that touches ``active`` experts must rotate over."""
        if self.device == "cpu":
            return 1
        size = floors.expert_bytes(self.shape, dtype)
        memory = torch.cuda.get_device_properties(self.device).total_memory
        return copies_for(active * size, self.shape.E * size, memory)

    def weights(self, dtype: str, copies: int) -> Sequence[tuple[Weight, Weight]]:
        """Pairs of w_in and w_down, as tensors ``[E, 2F or F, D]`` and ``[E, D, F]`` or as QuantisedWeight."""
        return self._quantised_copies(dtype, copies) if dtype in QUANTISED else self.floats(copies)

    def floats(self, copies: int) -> list[tuple[Tensor, Tensor]]:
        while len(self._float) < copies:
            self._float.append(self._random_layer())
        return self._float[:copies]

    def randn(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self._generator, device=self.device, dtype=self.torch_dtype)

    def expert(self, dtype: str, expert: int) -> tuple[Tensor, Tensor]:
        """w_in and w_down of one expert of copy 0 in float32, as its stored numbers mean them."""
        w_in, w_down = self.weights(dtype, 1)[0]
        return _one_expert(w_in, expert).float(), _one_expert(w_down, expert).float()

    def _random_layer(self) -> tuple[Tensor, Tensor]:
        """Scaled so that activations neither vanish nor blow up from one matrix to the next."""
        shape = self.shape
        w_in = self.randn(shape.E, shape.in_rows, shape.d).div_(math.sqrt(shape.d))
        return w_in, self.randn(shape.E, shape.d, shape.f).div_(math.sqrt(shape.f))

    def _quantised_copies(self, dtype: str, copies: int) -> list[tuple[QuantisedWeight, QuantisedWeight]]:
        made = self._quantised.setdefault(dtype, [])
        if not made:
            w_in, w_down = self.floats(1)[0]
            made.append((quantize_experts(w_in, **QUANTISED[dtype]), quantize_experts(w_down, **QUANTISED[dtype])))
        while len(made) < copies:
            made.append((_clone(made[0][0]), _clone(made[0][1])))
        return made[:copies]


def _clone(weight: QuantisedWeight) -> QuantisedWeight:
    return weight.with_tensors({name: part.clone() for name, part in weight.tensors().items()})


def _one_expert(weight: Weight, expert: int) -> Tensor:
    if isinstance(weight, Tensor):
        return weight[expert]
    return dequantize_experts(weight.experts(expert, expert + 1))[0]


def poison(device: str, sizes: Iterable[int] = (1 << 20, 1 << 24, 1 << 28)) -> None:
    """Leaves NaN where ``torch.empty`` will allocate next: an output that a kernel does not write shows up as NaN."""
    if device == "cpu":
        return
    blocks = [torch.full((size // 4,), torch.nan, device=device) for size in sizes for _ in range(4)]
    torch.cuda.synchronize()
    del blocks
