"""Calls that no tile was tuned for: small models' widths, and plans whose row tiles are not the table's."""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import Final

import torch
from torch import Tensor

from bench import draws
from bench.bank import DTYPES, QUANTISED
from bench.checks.base import Check, exact_weight, kernels, random, references, share
from moe_kernels.activations.op import Activation, gated
from moe_kernels.experts.op import fused_moe
from moe_kernels.plan.op import plan
from moe_kernels.quant.op import quantize_experts
from moe_kernels.quant.weight import Weight
from moe_kernels.training.sparse_mlp import sparse_mlp

SIZES: Final = ((256, 128, 16, 4), (1024, 384, 60, 6), (512, 1408, 10, 2))
"""Hidden size, width of an expert, experts, slots."""
ROWS: Final = (40, 700, 9000, 60_000)
PLANNED_ROWS: Final = (40, 700, 9000)
ACTIVATIONS: Final[tuple[Activation, ...]] = ("swiglu", "gelu")
BLOCK_ROWS: Final = (16, 32, 64, 128)
PLANNED_DTYPES: Final = ("bf16", "int8", "int4")
Size = tuple[int, int, int, int]


def foreign_checks() -> list[Check]:
    trained = [
        Check(
            name=f"sparse_mlp without gradients {size} {activation} {dtype} rows {rows}",
            key=f"foreign {size} {activation} {dtype}",
            run=partial(check_inference, size, activation, dtype, rows),
        )
        for size in SIZES
        for activation in ACTIVATIONS
        for dtype in ("bf16", "fp32")
        for rows in ROWS
    ]
    planned = [
        Check(
            name=f"fused_moe {size} swiglu {dtype} rows {rows}, plan of {block_rows}",
            key=f"foreign {size} swiglu {dtype}",
            run=partial(check_planned, size, dtype, rows, block_rows),
        )
        for size in SIZES[:2]
        for dtype in PLANNED_DTYPES
        for rows in PLANNED_ROWS
        for block_rows in BLOCK_ROWS
    ]
    return [*trained, *planned]


def check_inference(size: Size, activation: Activation, dtype: str, rows: int, device: str) -> float:
    hidden, _, experts, slots = size
    w_in, w_down = _weights(size, activation, dtype, device)
    assert isinstance(w_in, Tensor)
    assert isinstance(w_down, Tensor)
    draw = draws.uniform(rows, experts, slots, device=device)
    order = plan(draw.ids_TK, experts)
    x_TD = random((rows, hidden), DTYPES[dtype], device, seed=rows)
    with kernels(device), torch.no_grad():
        found = sparse_mlp(x_TD, w_in, w_down, order, draw.weights_TK, activation=activation)
    with references(), torch.no_grad():
        gates_TK = draw.weights_TK
        expected = sparse_mlp(x_TD.float(), w_in.float(), w_down.float(), order, gates_TK, activation=activation)
    return share(found, expected, x_TD.dtype)


def check_planned(size: Size, dtype: str, rows: int, block_rows: int, device: str) -> float:
    hidden, _, experts, slots = size
    w_in, w_down = _weights(size, "swiglu", dtype, device)
    draw = draws.uniform(rows, experts, slots, device=device)
    order = plan(draw.ids_TK, experts, block_rows=block_rows)
    x_TD = random((rows, hidden), torch.bfloat16, device, seed=rows)
    with kernels(device):
        found = fused_moe(x_TD, w_in, w_down, draw.ids_TK, draw.weights_TK, plan=order)
    with references():
        expected = fused_moe(x_TD.float(), exact_weight(w_in), exact_weight(w_down), draw.ids_TK, draw.weights_TK)
    return share(found, expected, x_TD.dtype)


@lru_cache(maxsize=1)
def _weights(size: Size, activation: Activation, dtype: str, device: str) -> tuple[Weight, Weight]:
    hidden, width, experts, _ = size
    kind = DTYPES.get(dtype, torch.bfloat16)
    inner = width * (1 + gated(activation))
    w_in = random((experts, inner, hidden), kind, device, seed=1) / math.sqrt(hidden)
    w_down = random((experts, hidden, width), kind, device, seed=2) / math.sqrt(width)
    if dtype in QUANTISED:
        return quantize_experts(w_in, **QUANTISED[dtype]), quantize_experts(w_down, **QUANTISED[dtype])
    return w_in, w_down
