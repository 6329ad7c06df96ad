"""Kernel of :mod:`moe_kernels.qk_norm_rope.op`: a program takes some heads of a row, all queries, all keys or values.

It holds the two elements of each pair in two tiles, low and high, so that a pair that is turned lies in one thread.
What is not turned is in two tiles, too, after the pairs.
Legend: as in :mod:`moe_kernels.qk_norm_rope.op`; here C is the heads of a program, and I = H / 2 the columns of a tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.overlap import overlaps

_HEADS = 8
"""Heads of a program, where they do not depend on each other."""


@triton.jit
def _clamp(value, limit):
    # Written with where: NaN compares false and passes through.
    return tl.where(value > limit, limit, tl.where(value < -limit, -limit, value))


@triton.jit
def _store(at, low_CI, high_CI, apart_1I, mask):
    tl.store(at, low_CI.to(at.dtype.element_ty), mask=mask)
    tl.store(at + apart_1I, high_CI.to(at.dtype.element_ty), mask=mask)


@triton.jit
def qk_norm_rope_kernel(
    qkv, weight, cos, sin, slots, q_out, k_out, v_out, k_cache, v_cache, stride_t, cos_t, sin_t, SLOTS, clip, eps,
    N: tl.constexpr, J: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr, CLIP: tl.constexpr, KV: tl.constexpr,
    Q_PARTS: tl.constexpr, K_PARTS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_I: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Axis 0: the row. Axis 1: Q_PARTS programs of BLOCK_C query heads each, then K_PARTS of key heads, then K_PARTS of
    value heads. NORM: "", "head" (over a row of the tile) or "projection" (over the whole tile, which is one part).

    PAIRS of a head are turned. Column i of the low tile is element i, and its partner in the high one is PAIRS elements
    behind; from column PAIRS on it is element PAIRS + i, and the other HALF - PAIRS behind. If INTERLEAVED, they are
    elements 2i and 2i + 1 in any column.

    Example: N 32, J 4, BLOCK_C 8: programs 0..3 take queries, 4 the keys, 5 the values. HALF 4, PAIRS 1: the low tile
    holds elements 0, 2, 3, 4, the high one 1, 5, 6, 7.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head_C, column_I = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_I)
    inside_I = column_I < HALF
    dtype = qkv.dtype.element_ty
    is_query, is_value = part < Q_PARTS, part >= Q_PARTS + K_PARTS
    first = tl.where(is_query, 0, tl.where(is_value, N + J, N))  # the row's first head of this kind
    count = tl.where(is_query, N, J)
    head_C += tl.where(is_query, part, (part - Q_PARTS) % K_PARTS) * BLOCK_C
    mask_CI = (head_C < count)[:, None] & inside_I[None, :]
    turned_I = column_I < PAIRS
    if INTERLEAVED:
        element_I, apart_1I = 2 * column_I, 1
    elif PAIRS == HALF:
        element_I, apart_1I = column_I, HALF
    else:
        element_I = tl.where(turned_I, column_I, PAIRS + column_I)
        apart_1I = tl.where(turned_I, PAIRS, HALF - PAIRS)[None, :]
    within_CI = head_C[:, None] * (2 * HALF) + element_I[None, :]
    from_CI = first * (2 * HALF) + within_CI
    low_CI = tl.load(qkv + row * stride_t + from_CI, mask=mask_CI, other=0.0).to(tl.float32)
    high_CI = tl.load(qkv + row * stride_t + from_CI + apart_1I, mask=mask_CI, other=0.0).to(tl.float32)
    slot = tl.load(slots + row)
    cached_CI = mask_CI & (slot >= 0) & (slot < SLOTS)
    cache_at = slot * (J * 2 * HALF) + within_CI
    kept_at = row * (J * 2 * HALF) + within_CI
    if is_value:
        if CLIP:
            low_CI, high_CI = _clamp(low_CI, clip), _clamp(high_CI, clip)
        low_CI, high_CI = low_CI.to(dtype).to(tl.float32), high_CI.to(dtype).to(tl.float32)
        _store(v_cache + cache_at, low_CI, high_CI, apart_1I, cached_CI)
        if KV:
            _store(v_out + kept_at, low_CI, high_CI, apart_1I, mask_CI)
    else:
        if NORM != "":
            low_weight_CI = tl.load(weight + from_CI, mask=mask_CI, other=0.0).to(tl.float32)
            high_weight_CI = tl.load(weight + from_CI + apart_1I, mask=mask_CI, other=0.0).to(tl.float32)
        if NORM == "projection":
            square = tl.sum(tl.sum(low_CI * low_CI + high_CI * high_CI, axis=1), axis=0)
            scale = tl.rsqrt(square / (count * (2 * HALF)) + eps)
            low_CI = (low_CI * scale * low_weight_CI).to(dtype).to(tl.float32)
            high_CI = (high_CI * scale * high_weight_CI).to(dtype).to(tl.float32)
        if CLIP:
            low_CI = _clamp(low_CI, clip).to(dtype).to(tl.float32)
            high_CI = _clamp(high_CI, clip).to(dtype).to(tl.float32)
        if NORM == "head":
            square_C = tl.sum(low_CI * low_CI + high_CI * high_CI, axis=1)
            scale_C1 = tl.rsqrt(square_C / (2 * HALF) + eps)[:, None]
            low_CI = ((low_CI * scale_C1).to(dtype).to(tl.float32) * low_weight_CI).to(dtype).to(tl.float32)
            high_CI = ((high_CI * scale_C1).to(dtype).to(tl.float32) * high_weight_CI).to(dtype).to(tl.float32)
        cos_1I = tl.load(cos + row * cos_t + column_I, mask=turned_I, other=0.0)[None, :]
        sin_1I = tl.load(sin + row * sin_t + PAIRS + column_I, mask=turned_I, other=0.0)[None, :]
        turned_low_CI = low_CI * cos_1I - high_CI * sin_1I
        turned_high_CI = high_CI * cos_1I + low_CI * sin_1I
        if PAIRS < HALF:  # not by a factor of 1 and one of 0: NaN would reach its neighbour
            turned_low_CI = tl.where(turned_I[None, :], turned_low_CI, low_CI)
            turned_high_CI = tl.where(turned_I[None, :], turned_high_CI, high_CI)
        turned_low_CI, turned_high_CI = turned_low_CI.to(dtype), turned_high_CI.to(dtype)
        if is_query:
            _store(q_out + row * (N * 2 * HALF) + within_CI, turned_low_CI, turned_high_CI, apart_1I, mask_CI)
        else:
            _store(k_cache + cache_at, turned_low_CI, turned_high_CI, apart_1I, cached_CI)
            if KV:
                _store(k_out + kept_at, turned_low_CI, turned_high_CI, apart_1I, mask_CI)


def launch(
    qkv_TO: Tensor, cos_T1R: Tensor, sin_T1R: Tensor, k_PBJH: Tensor, v_PBJH: Tensor, slots_T: Tensor, *,
    norm: str, weight_CH: Tensor | None, eps: float, clip: float | None, kv: bool, interleaved: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:  # fmt: skip
    rows, (kv_heads, size) = len(qkv_TO), k_PBJH.shape[2:]
    heads = qkv_TO.shape[1] // size - 2 * kv_heads
    q_TNH = torch.empty((rows, heads, size), dtype=qkv_TO.dtype, device=qkv_TO.device)
    kept_shape = (rows, kv_heads, size) if kv else (0,)
    k_TJH, v_TJH = (torch.empty(kept_shape, dtype=qkv_TO.dtype, device=qkv_TO.device) for _ in "kv")
    norm = "" if weight_CH is None else norm
    cos_T1R, sin_T1R = (angles if angles.stride(2) == 1 else angles.contiguous() for angles in (cos_T1R, sin_T1R))
    most, pairs = max(heads, kv_heads), cos_T1R.shape[2] // 2
    block_c = triton.next_power_of_2(most if norm == "projection" else min(_HEADS, most))
    block_i = triton.next_power_of_2(size // 2)
    q_parts, k_parts = triton.cdiv(heads, block_c), triton.cdiv(kv_heads, block_c)
    pdl = overlaps(qkv_TO.device)
    qk_norm_rope_kernel[(rows, q_parts + 2 * k_parts)](
        qkv_TO, qkv_TO if weight_CH is None else weight_CH.contiguous(), cos_T1R, sin_T1R, slots_T.contiguous(),
        q_TNH, k_TJH, v_TJH, k_PBJH, v_PBJH,
        qkv_TO.stride(0), cos_T1R.stride(0), sin_T1R.stride(0), k_PBJH.shape[0] * k_PBJH.shape[1],
        0.0 if clip is None else float(clip), float(eps),
        N=heads, J=kv_heads, HALF=size // 2, PAIRS=pairs, INTERLEAVED=interleaved,
        NORM=norm, CLIP=clip is not None, KV=kv,
        Q_PARTS=q_parts, K_PARTS=k_parts, BLOCK_C=block_c, BLOCK_I=block_i, PDL=pdl,
        num_warps=warps_for(block_c * block_i), launch_pdl=pdl,
    )  # fmt: skip
    return q_TNH, (k_TJH, v_TJH) if kv else None


def warps_for(block: int) -> int:
    """So many that each thread has 8 elements of each half, 16 bytes of a half type; a program has at most 16.

    >>> warps_for(8 * 64), warps_for(8 * 16), warps_for(64 * 128)
    (2, 1, 16)
    """
    return min(16, max(1, block // 256))
