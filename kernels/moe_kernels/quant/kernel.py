"""Quantised weights to numbers in memory, for products of so many rows that unpacking them per tile costs more.

Kernel of :func:`moe_kernels.quant.op.dequantize_experts`. Legend: R rows of all experts, I input columns, G groups per
row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.quant.decode_kernel import int4_halves, int8_values
from moe_kernels.quant.weight import QuantisedWeight

_BLOCK_ROWS = 16
_BLOCK_BYTES = 256
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def dequantize_kernel(
    packed, scales, out, R, I, G,
    BITS: tl.constexpr, GROUP: tl.constexpr, DTYPE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_B: tl.constexpr,
):
    """out[r, i] = code[r, i] x scale[r, i // GROUP], the product in float32 and rounded once. GROUP I: per channel.

    Example: byte 0x83 at byte 5 of a row: columns 5 and 69 are (3 - 8) and (8 - 8) times their scale.
    """
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    at = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    width = I // 2 if BITS == 4 else I
    inside = (rows < R)[:, None] & (at < width)[None, :]
    row_start = rows.to(tl.int64)[:, None]
    codes = tl.load(packed + row_start * width + at[None, :], mask=inside, other=0)
    columns = at // 64 * 128 + at % 64 if BITS == 4 else at
    scale = tl.load(scales + row_start * G + (columns // GROUP)[None, :], mask=inside, other=0.0).to(tl.float32)
    target = out + row_start * I + columns[None, :]
    if BITS == 4:
        low, high = int4_halves(codes, tl.float32)
        tl.store(target, (low * scale).to(DTYPE), mask=inside)
        tl.store(target + 64, (high * scale).to(DTYPE), mask=inside)
    else:
        tl.store(target, (int8_values(codes, tl.float32) * scale).to(DTYPE), mask=inside)


def launch(q: QuantisedWeight, dtype: torch.dtype) -> Tensor:
    experts, out_features, in_features = q.shape
    out_EOI = torch.empty(experts, out_features, in_features, dtype=dtype, device=q.device)
    rows, stored = experts * out_features, q.packed.shape[2]
    if out_EOI.numel():
        dequantize_kernel[(triton.cdiv(rows, _BLOCK_ROWS), triton.cdiv(stored, _BLOCK_BYTES))](
            q.packed, q.scales, out_EOI, rows, in_features, q.scales.shape[2],
            BITS=q.bits, GROUP=q.group or in_features, DTYPE=_TYPES[dtype], BLOCK_R=_BLOCK_ROWS, BLOCK_B=_BLOCK_BYTES,
            num_warps=4,
        )  # fmt: skip
    return out_EOI
