"""Kernel of :mod:`moe_kernels.paged_latent.op`: a program per row, group of heads and part of the sequence, then a sum.

All heads read the same latents, so a tile of them is loaded once for a group of heads, as keys and as values. How a
sequence is cut, and how parts are summed, is as in :mod:`moe_kernels.paged_decode.kernel`.
Legend: as in :mod:`moe_kernels.paged_latent.op`; R = Z - C, L positions of a tile.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.paged_decode.kernel import cut, multiprocessors, part_length, product_dtype, sum_parts_kernel

EVERYTHING = 2**31 - 1
"""A window that hides nothing."""
SPARE_PARTS = 2
"""Where there are programs enough without cutting. Sums of all heads are large: 256 rows of 128 heads take 134 MB."""


@triton.jit(do_not_specialize=["wanted", "stride_m", "N"])
def paged_latent_kernel(
    q, latents, blocks_SM, kv_len_S, out, sums, logs, scale, wanted, stride_m, N,
    Z: tl.constexpr, C: tl.constexpr, B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One part (axis 2) of what a group of heads (axis 1) of a row (axis 0) sees, by online softmax (Milakov and
    Gimelshein 2018) in base 2: scores are a product of the C numbers that are the value, too, and one of the R others.
    A row of one part goes to ``out``; of several, each part's mean of the values goes to ``sums`` [S, N, parts, C] and
    the logarithm of its weight to ``logs`` [S, N, parts].

    Example: 300 positions, wanted 2: parts of 150, positions 0..149 and 150..299; wanted 8: 128, 128 and 44.
    """
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(2), tl.num_programs(2)
    length = tl.load(kv_len_S + row).to(tl.int32)
    each = part_length(length, wanted, parts)
    used = tl.cdiv(length, each)
    start = part * each
    end = tl.minimum(start + each, length)
    if part < tl.maximum(used, 1):
        heads = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        columns, others = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
        asked = (heads < N)[:, None] & (columns < C)[None, :]
        q_at = q + (row * N + heads)[:, None] * Z
        q_NC = tl.load(q_at + columns[None, :], mask=asked, other=0.0).to(DTYPE)
        q_NR = tl.load(q_at + C + others[None, :], mask=(heads < N)[:, None] & (others < Z - C)[None, :], other=0.0).to(
            DTYPE
        )
        top_N = tl.full((BLOCK_N,), float("-inf"), tl.float32)
        total_N = tl.zeros((BLOCK_N,), tl.float32)
        sum_NC = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
        for at in range(start, end, BLOCK_L):
            position = at + tl.arange(0, BLOCK_L)
            inside = position < end
            block = tl.load(blocks_SM + row * stride_m + position // B, mask=inside, other=0).to(tl.int64)
            place = latents + (block * B + position % B) * Z
            c_LC = tl.load(
                place[:, None] + columns[None, :], mask=inside[:, None] & (columns < C)[None, :], other=0.0
            ).to(DTYPE)
            r_LR = tl.load(
                place[:, None] + C + others[None, :], mask=inside[:, None] & (others < Z - C)[None, :], other=0.0
            ).to(DTYPE)
            score_NL = tl.dot(q_NC, tl.trans(c_LC), input_precision="ieee")
            score_NL = tl.dot(q_NR, tl.trans(r_LR), score_NL, input_precision="ieee") * scale
            score_NL = tl.where(inside[None, :], score_NL, float("-inf"))
            higher_N = tl.maximum(top_N, tl.max(score_NL, axis=1))
            weight_NL = tl.exp2(score_NL - higher_N[:, None])
            fade_N = tl.exp2(top_N - higher_N)
            sum_NC = tl.dot(weight_NL.to(DTYPE), c_LC, sum_NC * fade_N[:, None], input_precision="ieee")
            total_N = total_N * fade_N + tl.sum(weight_NL, axis=1)
            top_N = higher_N
        mean_NC = sum_NC / tl.where(used == 0, 1.0, total_N)[:, None]
        row_N = row * N + heads
        if used <= 1:
            tl.store(out + row_N[:, None] * C + columns[None, :], mean_NC.to(out.dtype.element_ty), mask=asked)
        else:
            place_N = row_N * parts + part
            tl.store(sums + place_N[:, None] * C + columns[None, :], mean_NC, mask=asked)
            tl.store(logs + place_N, top_N + tl.log2(total_N), mask=heads < N)


def launch(q_SNZ: Tensor, latents_PBZ: Tensor, blocks_SM: Tensor, kv_len_S: Tensor, rank: int, scale: float) -> Tensor:
    rows, heads, size = q_SNZ.shape
    blocks_SM, kv_len_S = blocks_SM.contiguous(), kv_len_S.contiguous()
    out_SNC = q_SNZ.new_empty(rows, heads, rank)
    tiles = tiles_for(heads, rank, size - rank, q_SNZ.element_size())
    groups = triton.cdiv(heads, tiles["BLOCK_N"])
    positions = blocks_SM.shape[1] * latents_PBZ.shape[1]
    wanted, parts = cut(rows * groups, positions, multiprocessors(q_SNZ.device))
    parts = min(parts, max(wanted, SPARE_PARTS))
    shape = (rows, heads, parts if parts > 1 else 0)
    sums = torch.empty(*shape, rank, dtype=torch.float32, device=q_SNZ.device)
    logs = torch.empty(shape, dtype=torch.float32, device=q_SNZ.device)
    paged_latent_kernel[(rows, groups, parts)](
        q_SNZ, latents_PBZ, blocks_SM, kv_len_S, out_SNC, sums, logs, scale * math.log2(math.e), wanted,
        blocks_SM.shape[1], heads, Z=size, C=rank, B=latents_PBZ.shape[1], DTYPE=product_dtype(q_SNZ.dtype), **tiles,
    )  # fmt: skip
    if parts > 1:
        sum_parts_kernel[(rows, heads)](
            sums, logs, kv_len_S, out_SNC, EVERYTHING, wanted, parts, heads,
            H=rank, BLOCK_H=tiles["BLOCK_C"], BLOCK_P=triton.next_power_of_2(parts), TILE=8, num_warps=2,
        )  # fmt: skip
    return out_SNC


def tiles_for(heads: int, rank: int, others: int, itemsize: int) -> dict[str, int]:
    """Return heads and positions of a program, columns of both products, warps and stages.

    64 heads fill Hopper's tensor cores, and a tile of latents serves them all; what more positions, fewer warps or two
    stages would take of registers spills (triton 3.7 for sm_90: 147 KB of shared memory with 64 heads, 94 with 16).
    """
    block_c, block_r = (max(16, triton.next_power_of_2(columns)) for columns in (rank, max(others, 1)))
    block_n = min(64 if itemsize == 2 else 16, max(16, triton.next_power_of_2(heads)))
    length = {16: 64, 32: 64, 64: 32}[block_n] if itemsize == 2 else 16
    return {
        "BLOCK_N": block_n, "BLOCK_C": block_c, "BLOCK_R": block_r, "BLOCK_L": length,
        "num_warps": 4 if block_n == 16 else 8, "num_stages": 3 if block_n == 64 else 2,
    }  # fmt: skip
