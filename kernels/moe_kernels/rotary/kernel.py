"""Kernel of :mod:`moe_kernels.rotary.op`: one pass that turns heads and moves them in front of the positions.

Legend: B sequences, L positions, K slots, G key heads, R heads of a slot and key head, C head size.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _at(b, l, k, g, r, stride_b, stride_l, stride_k, stride_g, stride_r):
    heads = k.to(tl.int64) * stride_k + g.to(tl.int64) * stride_g + r.to(tl.int64) * stride_r
    return b.to(tl.int64) * stride_b + l.to(tl.int64) * stride_l + heads


@triton.jit
def rotate_kernel(
    x, out, cos, sin, x_b, x_l, x_k, x_g, x_r, out_b, out_l, out_k, out_g, out_r, angle_b, L, HEADS,
    GROUPS: tl.constexpr, REPEATS: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr,
):
    """out = (low cos - high sin, high cos + low sin) of each head's halves, in float32; one program per position.

    The last axis of x and out is contiguous, the others have the strides given.

    Example: head (1, 0), cos 0, sin 1: (0, 1).
    """
    b = tl.program_id(0) // L
    l = tl.program_id(0) % L
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    columns = tl.arange(0, BLOCK_C)
    k = heads // (GROUPS * REPEATS)
    g = heads // REPEATS % GROUPS
    r = heads % REPEATS
    mask = (heads < HEADS)[:, None] & (columns < HALF)[None, :]
    angle_at = b.to(tl.int64) * angle_b + l * HALF + columns
    c = tl.load(cos + angle_at, mask=columns < HALF, other=0.0)[None, :]
    s = tl.load(sin + angle_at, mask=columns < HALF, other=0.0)[None, :]
    x_at = x + _at(b, l, k, g, r, x_b, x_l, x_k, x_g, x_r)[:, None] + columns[None, :]
    low = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(x_at + HALF, mask=mask, other=0.0).to(tl.float32)
    out_at = out + _at(b, l, k, g, r, out_b, out_l, out_k, out_g, out_r)[:, None] + columns[None, :]
    tl.store(out_at, (low * c - high * s).to(out.dtype.element_ty), mask=mask)
    tl.store(out_at + HALF, (high * c + low * s).to(out.dtype.element_ty), mask=mask)


def launch(x_BLKGRC: Tensor, out_BLKGRC: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Both in this order of axes, in any strides; ``cos``, ``sin`` float32 ``[B or 1, L, C / 2]``, contiguous."""
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    batch, length, slots, groups, repeats, size = x_BLKGRC.shape
    heads = slots * groups * repeats
    block_h = min(32, triton.next_power_of_2(heads))
    rotate_kernel[(batch * length, triton.cdiv(heads, block_h))](
        x_BLKGRC, out_BLKGRC, cos, sin, *x_BLKGRC.stride()[:5], *out_BLKGRC.stride()[:5],
        cos.stride(0) if cos.shape[0] > 1 else 0, length, heads,
        GROUPS=groups, REPEATS=repeats, HALF=size // 2, BLOCK_H=block_h, BLOCK_C=triton.next_power_of_2(size // 2),
    )
