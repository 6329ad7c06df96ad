"""The unpacking helpers of moe_kernels.quant.decode_kernel as whole kernels."""

import triton
import triton.language as tl

from moe_kernels.quant.decode_kernel import int4_halves, int4_offset, int4_products, int8_products, int8_values


@triton.jit
def unpack(packed, values, BITS: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """``values`` [BLOCK], or [2, BLOCK] of 4 bits: low nibbles, then high ones."""
    at = tl.arange(0, BLOCK)
    tile = tl.load(packed + at)
    if BITS == 8:
        tl.store(values + at, int8_values(tile, DTYPE))
    else:
        low, high = int4_halves(tile, DTYPE)
        tl.store(values + at, low)
        tl.store(values + BLOCK + at, high)


@triton.jit
def dot(words, x, y, p16, p256, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """y[i] = the codes of word i times x[i, 0..7] (BITS 8: 0..3), columns of the low nibbles first."""
    at = tl.arange(0, BLOCK)
    word = tl.load(words + at)
    column = x + at * 8
    a, b, c, d = tl.load(column), tl.load(column + 1), tl.load(column + 2), tl.load(column + 3)
    if BITS == 8:
        sums = int8_products(word, p256, -384.0 * (a + b + c + d), a, b, c, d)
    else:
        e, f, g, h = tl.load(column + 4), tl.load(column + 5), tl.load(column + 6), tl.load(column + 7)
        sums = int4_products(word, p16, p256, int4_offset(a, b, c, d, e, f, g, h), a, b, c, d, e, f, g, h)
    tl.store(y + at, sums)
