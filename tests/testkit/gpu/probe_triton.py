"""Small kernels on which the assertions of :mod:`testkit.gpu.aot` are tried."""

import triton
import triton.language as tl


@triton.jit
def product(
    a_desc, b_desc, c, O, I,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr, UPCAST: tl.constexpr,
    DOUBLE: tl.constexpr,
):
    """c = a b^T, or 2 a b^T if DOUBLE, one tile per program, both operands by host-made TMA descriptors."""
    row, column = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, I, BLOCK_K):
        a, b = a_desc.load([row, k]), b_desc.load([column, k])
        if DOUBLE:
            a = a + a
        if UPCAST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a, b.T, acc)
    rows, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    tl.store(c + rows[:, None].to(tl.int64) * O + columns[None, :], acc.to(DTYPE))


@triton.jit
def convert(x, y, BLOCK: tl.constexpr):
    """y = float(x)."""
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at).to(tl.float32))


@triton.jit
def crowded(x, y, BLOCK: tl.constexpr):
    """Prefix sums of an outer product: more live values than a warp has registers."""
    at = tl.arange(0, BLOCK)
    square = tl.load(x + at)[:, None] * tl.load(x + at)[None, :]
    tl.store(y + at[:, None] * BLOCK + at[None, :], tl.cumsum(square, 0) * tl.cumsum(square, 1) + square)
