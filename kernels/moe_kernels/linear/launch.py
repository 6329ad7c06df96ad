"""From tensors to launches of :mod:`moe_kernels.linear.kernel`.

The sizes are those that were fastest on an H200 for 1 to 128 rows of Qwen3-30B's and larger layers in int4 and FP8.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
from torch import Tensor

from moe_kernels import backend
from moe_kernels.experts.kernel import aligned_rows
from moe_kernels.linear.kernel import quantised_linear_kernel, sum_products_kernel
from moe_kernels.quant.weight import QuantisedWeight, kind_flags

MAX_ROWS: Final = 128
"""With more it is faster to make numbers of the whole matrix first, and multiply these."""
BLOCK_N: Final = 64
MAX_BLOCK_M: Final = 64
"""With 128, registers do not suffice for all formats."""
BLOCK_K: Final = 128
"""A run of the layout in 4 bits, and the most columns that share a scale."""
PROGRAMS: Final = 264
"""Two for each multiprocessor: columns are divided until there are so many, or among :data:`MAX_PARTS`."""
MAX_PARTS: Final = 8
SUM_BLOCK: Final = 1024
_WARPS: Final = 4
_STAGES: Final = 3


def launch(x_TI: Tensor, weight: QuantisedWeight, bias_O: Tensor | None) -> Tensor:
    """:func:`moe_kernels.quantised_linear` of few rows, its arguments checked; at least one row."""
    x_TI, bias_O = aligned_rows(x_TI), backend.packed(bias_O)
    (rows, columns), width = x_TI.shape, weight.shape[1]
    block_m = min(MAX_BLOCK_M, max(16, triton.next_power_of_2(rows)))
    blocks = triton.cdiv(width, BLOCK_N), triton.cdiv(rows, block_m)
    depth = _depth(columns, blocks[0] * blocks[1])
    parts = triton.cdiv(columns, depth)
    out_TO = x_TI.new_empty(rows, width)
    target = out_TO if parts == 1 else x_TI.new_empty(parts, rows, width, dtype=torch.float32)
    bias = x_TI if bias_O is None else bias_O
    quantised_linear_kernel[(*blocks, parts)](
        x_TI, weight.packed, weight.scales, weight.scales if weight.zeros is None else weight.zeros, bias, target,
        x_TI.stride(0), rows, width, columns, weight.scales.shape[2], depth, HAS_BIAS=bias_O is not None and parts == 1,
        BITS=weight.bits, **kind_flags(weight), EVEN_N=width % BLOCK_N == 0, EVEN_K=columns % BLOCK_K == 0,
        UPCAST=backend.upcast(x_TI.dtype), PRECISION="ieee" if x_TI.dtype == torch.float32 else "tf32", STAGES=_STAGES,
        BLOCK_N=BLOCK_N, BLOCK_M=block_m, BLOCK_K=_step(weight), num_warps=_WARPS,
    )  # fmt: skip
    if parts > 1:
        sum_products_kernel[(triton.cdiv(rows * width, SUM_BLOCK),)](
            target, bias, out_TO, rows * width, width, PARTS=parts, HAS_BIAS=bias_O is not None, BLOCK=SUM_BLOCK
        )
    return out_TO


def _depth(columns: int, blocks: int) -> int:
    """Columns of a program, in whole blocks."""
    steps = triton.cdiv(columns, BLOCK_K)
    parts = min(MAX_PARTS, steps, triton.next_power_of_2(triton.cdiv(PROGRAMS, blocks)))
    return int(triton.cdiv(steps, parts) * BLOCK_K)


def _step(weight: QuantisedWeight) -> int:
    """Columns of a step: a whole run in 4 bits, else within one group."""
    return BLOCK_K if weight.bits == 4 else min(BLOCK_K, weight.group or BLOCK_K)
