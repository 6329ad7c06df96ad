"""A grouped product that exists to compare how integers become floats: "Who Says Elephants Can't Run", table 1.

Not part of the library: its kernels never use the conversion unit. Everything but the conversion is the same here.
Legend: A active experts, R rows of each, O output columns, I input columns, G = 1 scale per output column.
"""

import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.quant.decode_kernel import int4_halves, int8_values


@triton.jit
def _native_int8(packed, DTYPE: tl.constexpr):
    """uint8 code 0..255 to -128..127 through the conversion unit (I2F). Code 133 is 5."""
    return (packed.to(tl.int16) - 128).to(DTYPE)


@triton.jit
def _native_int4(packed, DTYPE: tl.constexpr):
    """Low and high nibbles to -8..7 through the conversion unit. Byte 0x83 is -5 and 0."""
    wide = packed.to(tl.int16)
    return ((wide & 0xF) - 8).to(DTYPE), ((wide >> 4) - 8).to(DTYPE)


@triton.jit
def convert_gemm_kernel(
    x, w, scales, y, R, O, I, BITS: tl.constexpr, NATIVE: tl.constexpr, STAGES: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y[a, r] = scale[a] x (codes[a] x[a, r]), weights on the wide side of the product.

    Example: one expert, R = O = I = 1, code 133 (5), scale 0.5, x 4: y = 10.
    """
    expert = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_M)
    dtype: tl.constexpr = x.dtype.element_ty
    x_at = x + (expert * R + rows)[:, None] * I
    w_row = (expert.to(tl.int64) * O + columns)[:, None]
    valid = (rows < R)[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for k in tl.range(0, I, BLOCK_K, num_stages=STAGES):
        if BITS == 4:
            # One run of the layout: 64 bytes hold columns 0..63 (low nibbles) and 64..127 (high).
            byte = tl.arange(0, 64)
            packed = tl.load(w + w_row * (I // 2) + (k // 2 + byte)[None, :])
            if NATIVE:
                low, high = _native_int4(packed, dtype)
            else:
                low, high = int4_halves(packed, dtype)
            x_low = tl.load(x_at + byte[None, :] + k, mask=valid, other=0.0)
            x_high = tl.load(x_at + byte[None, :] + k + 64, mask=valid, other=0.0)
            acc = tl.dot(low, x_low.T, acc)
            acc = tl.dot(high, x_high.T, acc)
        else:
            column = k + tl.arange(0, BLOCK_K)
            tile = tl.load(w + w_row * I + column[None, :])
            if BITS == 8 and NATIVE:
                tile = _native_int8(tile, dtype)
            elif BITS == 8:
                tile = int8_values(tile, dtype)
            acc = tl.dot(tile, tl.load(x_at + column[None, :], mask=valid, other=0.0).T, acc)
    if BITS != 16:
        acc *= tl.load(scales + expert * O + columns).to(tl.float32)[:, None]
    y_at = y + (expert * R + rows)[None, :] * O + columns[:, None]
    tl.store(y_at, acc.to(dtype), mask=(rows < R)[None, :])


def launch(
    x_ARI: Tensor, stored: Tensor, scales: Tensor, y_ARO: Tensor, *, bits: int, native: bool, block_n: int = 64,
    block_k: int = 128, num_warps: int = 4, num_stages: int = 4,
) -> Tensor:  # fmt: skip
    """``stored``: ``[A, O, I]``, or ``[A, O, I / 2]`` at 4 bits. O must be a multiple of block_n, I of 128."""
    active, rows, columns = x_ARI.shape
    out = y_ARO.shape[2]
    convert_gemm_kernel[(out // block_n, active)](
        x_ARI, stored, scales, y_ARO, rows, out, columns, BITS=bits, NATIVE=native, STAGES=num_stages,
        BLOCK_N=block_n, BLOCK_M=max(16, triton.next_power_of_2(rows)), BLOCK_K=128 if bits == 4 else block_k,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return y_ARO
