"""How fast an H200 could run a layer at best: its weights' bytes or its arithmetic at measured rates, the larger.

Only bytes that no implementation can avoid count: the weights of the experts that the draw hit. Activations, the router
and launches do not, so 100 % is out of reach.
"""

from __future__ import annotations

from typing import Final

from bench.shapes import LayerShape

BYTES_PER_S: Final = 4.3e12
"""Device-to-device copy on an H200, bytes read plus written (datasheet: 4.8e12)."""
FLOP_PER_S: Final = 790e12
"""bf16 product of two 8192 x 8192 matrices of random values (datasheet: 990e12)."""
GROUP: Final = 128
"""Input columns that share one scale, in ``int4``; rows and columns of a block in ``fp8``."""
SCALE_BYTES: Final = 2
_SCALES: Final = {
    "int8": SCALE_BYTES / GROUP,
    "int4": SCALE_BYTES / GROUP,
    "int4_mixed": (SCALE_BYTES + 1) / GROUP,
    "int4_g32": (SCALE_BYTES + 1) / 32,
    "fp8": 4 / GROUP**2,
    "mxfp4": 1 / 32,
}
"""Bytes per weight of scales and zero points, where they go with groups or blocks."""
WEIGHT_BYTES: Final = {
    "bf16": 2.0,
    "fp16": 2.0,
    "fp32": 4.0,
    "int8": 1.0,
    "int8_channel": 1.0,
    "int4": 0.5,
    "int4_channel": 0.5,
    "int4_mixed": 0.5,
    "int4_g32": 0.5,
    "fp8": 1.0,
    "mxfp4": 0.5,
}
"""Per weight, without scales."""


def expert_bytes(shape: LayerShape, dtype: str) -> float:
    """Weights of one expert, their scales and zero points: per output channel in ``_channel`` dtypes, else by group.

    Example: d 2048, f 768 gated: 4,718,592 weights; 9.44 MB in bf16, 4.73 MB in int8_channel, 2.43 MB in int4.
    """
    weights = shape.parameters * WEIGHT_BYTES[dtype]
    if dtype.endswith("_channel"):
        return weights + (shape.in_rows + shape.d) * SCALE_BYTES
    return weights + shape.parameters * _SCALES.get(dtype, 0.0)


def layer_flops(shape: LayerShape, pairs: int) -> float:
    """Of ``pairs`` (token, expert) pairs: two per weight that a pair meets."""
    return 2.0 * pairs * shape.parameters


def layer_us(shape: LayerShape, pairs: int, active: int, dtype: str) -> float:
    """Floor of one forward pass in microseconds when ``active`` experts have rows.

    Example: Mixtral, one token, two experts in bf16: 705 MB / 4.3 TB/s = 164 us.
    """
    return max(memory_us(active * expert_bytes(shape, dtype)), compute_us(layer_flops(shape, pairs)))


def training_us(shape: LayerShape, pairs: int, active: int, dtype: str) -> float:
    """Forward and backward: three forward passes, in arithmetic as in bytes.

    The gradients of inputs and of weights are as many products as the forward each; weights are read forward and
    backward, and their gradients, as many bytes, are written. Example: ScatterMoE's unit, 61,440 tokens: 31.3 ms.
    """
    return 3.0 * layer_us(shape, pairs, active, dtype)


def memory_us(byte_count: float) -> float:
    return byte_count / BYTES_PER_S * 1e6


def compute_us(flops: float) -> float:
    return flops / FLOP_PER_S * 1e6
