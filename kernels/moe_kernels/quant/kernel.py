"""Quantised weights to numbers in memory, for products of so many rows that unpacking them per tile costs more.

Kernel of :func:`moe_kernels.quant.op.dequantize_experts`. Legend: R rows of all experts, I input columns, G groups per
row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.quant.decode_kernel import code_values, scale_values
from moe_kernels.quant.weight import QuantisedWeight

_BLOCK_ROWS = 16
_BLOCK_BYTES = 256
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def dequantize_kernel(
    packed, scales, zeros, order, out, R, O, I, G, B,
    BITS: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_ORDER: tl.constexpr, DTYPE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_B: tl.constexpr,
):
    """out[r, i] = value(code[r, i]) x scale[r // SCALE_ROWS, i // GROUP], the product in float32 and rounded once.

    B: bytes of a row, more than its columns take where the last run of 4 bits is not full. HAS_ORDER: column i goes to
    order[e, i].

    Example: int4, byte 0x83 at byte 5 of a row: columns 5 and 69 are (3 - 8) and (8 - 8) times their scale.
    """
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    at = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    row_start = rows.to(tl.int64)[:, None]
    codes = tl.load(packed + row_start * B + at[None, :], mask=(rows < R)[:, None] & (at < B)[None, :], other=0)
    first = at // 64 * 128 + at % 64 if BITS == 4 else at
    for half in tl.static_range(2 if BITS == 4 else 1):
        columns = first + 64 * half
        inside = (rows < R)[:, None] & (columns < I)[None, :]
        block = (rows // SCALE_ROWS).to(tl.int64)[:, None] * G + (columns // GROUP)[None, :]
        scale = scale_values(tl.load(scales + block, mask=inside, other=0), CODES)
        zero = 8.0 if BITS == 4 else 128.0
        if HAS_ZEROS:
            zero = tl.load(zeros + block, mask=inside, other=0).to(tl.float32)
        code = codes
        if BITS == 4:
            code = codes >> 4 if half else codes & 15
        targets = columns[None, :] + rows[:, None] * 0
        if HAS_ORDER:
            targets = tl.load(order + (rows // O).to(tl.int64)[:, None] * I + columns[None, :], mask=inside, other=0)
        tl.store(out + row_start * I + targets, (code_values(code, zero, CODES) * scale).to(DTYPE), mask=inside)


def launch(q: QuantisedWeight, dtype: torch.dtype) -> Tensor:
    experts, out_features, in_features = q.shape
    out_EOI = torch.empty(experts, out_features, in_features, dtype=dtype, device=q.device)
    rows, stored = experts * out_features, q.packed.shape[2]
    if out_EOI.numel():
        dequantize_kernel[(triton.cdiv(rows, _BLOCK_ROWS), triton.cdiv(stored, _BLOCK_BYTES))](
            q.packed, q.scales, q.scales if q.zeros is None else q.zeros, q.packed if q.order is None else q.order,
            out_EOI, rows, out_features, in_features, q.scales.shape[2], stored,
            BITS=q.bits, CODES=q.codes, GROUP=q.group or in_features, SCALE_ROWS=q.scale_rows,
            HAS_ZEROS=q.zeros is not None, HAS_ORDER=q.order is not None, DTYPE=_TYPES[dtype], BLOCK_R=_BLOCK_ROWS,
            BLOCK_B=_BLOCK_BYTES, num_warps=4,
        )  # fmt: skip
    return out_EOI
