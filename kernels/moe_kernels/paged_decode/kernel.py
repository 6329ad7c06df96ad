"""Kernels of :mod:`moe_kernels.paged_decode.op`: a program per sequence, key head and part of the sequence, then a sum.

The queries of a key head share a tile, so keys and values are read once; below 16 of them the rest of the tile is
empty, which costs nothing as reading decides. How a sequence is cut follows from its length on the device: the
grid is the same for every length.
Legend: as in :mod:`moe_kernels.paged_decode.op`; L positions of a tile.
"""

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels import backend
from moe_kernels.paged_attention.kernel import LOG2_E

SHORTEST = tl.constexpr(128)
"""Positions of a part, at least: less does not pay for its sum."""
LONGEST = tl.constexpr(2048)
"""And at most, as long as there are parts left: one long sequence among short ones shall not be the last to end."""
MAX_PARTS = 64
_SPARE_PARTS = 8
"""Where there are programs enough without cutting."""
_PROGRAMS_PER_SM = 4
_TILE_BYTES = 16_384
_CPU_SMS = 8


@triton.jit
def part_length(visible, wanted, parts):
    """Positions of each part but the last: ``visible`` over ``wanted`` within the bounds above, ``parts`` at most."""
    even = tl.minimum(tl.cdiv(visible, wanted), LONGEST)
    return tl.maximum(tl.maximum(even, SHORTEST), tl.cdiv(visible, parts))


@triton.jit(do_not_specialize=["window", "wanted", "stride_m"])
def paged_decode_kernel(
    q, k, v, blocks_SM, kv_len_S, sinks, out, sums, logs, scale, window, wanted, stride_s, stride_n, stride_m, J,
    G: tl.constexpr, H: tl.constexpr, B: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_L: tl.constexpr, SINKS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One part (axis 2) of what the queries of a key head (axis 1) of a sequence (axis 0) see, by online softmax
    (Milakov and Gimelshein 2018) in base 2. A sink weighs in the first part as a position without a value does, so that
    it is there once. A sequence of one part goes to ``out``; of several, each part's mean of the
    values goes to ``sums`` [S, N, parts, H] and the logarithm of its weight to ``logs`` [S, N, parts].

    Example: 300 positions, wanted 2: parts of 150, positions 0..149 and 150..299; wanted 8: 128, 128 and 44.
    """
    sequence, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    parts = tl.num_programs(2)
    length = tl.load(kv_len_S + sequence).to(tl.int32)
    first = tl.maximum(length - window, 0)
    each = part_length(length - first, wanted, parts)
    used = tl.cdiv(length - first, each)
    start = first + part * each
    end = tl.minimum(start + each, length)
    if part < tl.maximum(used, 1):
        queries, columns = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_H)
        asked = (queries < G)[:, None] & (columns < H)[None, :]
        q_at = q + sequence * stride_s + (head * G + queries)[:, None] * stride_n + columns[None, :]
        q_GH = tl.load(q_at, mask=asked, other=0.0).to(DTYPE)
        top_G = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        total_G = tl.zeros((BLOCK_G,), tl.float32)
        if SINKS:
            if part == 0:
                top_G = tl.load(sinks + head * G + queries, mask=queries < G, other=0.0).to(tl.float32) * LOG2_E
                total_G += 1.0
        sum_GH = tl.zeros((BLOCK_G, BLOCK_H), tl.float32)
        for at in range(start, end, BLOCK_L):
            position = at + tl.arange(0, BLOCK_L)
            inside = position < end
            block = tl.load(blocks_SM + sequence * stride_m + position // B, mask=inside, other=0).to(tl.int64)
            row = ((block * B + position % B) * J + head) * H
            k_HL = tl.load(
                k + row[None, :] + columns[:, None], mask=inside[None, :] & (columns < H)[:, None], other=0.0
            )
            score_GL = tl.dot(q_GH, k_HL.to(DTYPE), input_precision="ieee") * scale
            score_GL = tl.where(inside[None, :], score_GL, float("-inf"))
            higher_G = tl.maximum(top_G, tl.max(score_GL, axis=1))
            weight_GL = tl.exp2(score_GL - higher_G[:, None])
            fade_G = tl.exp2(top_G - higher_G)
            v_LH = tl.load(
                v + row[:, None] + columns[None, :], mask=inside[:, None] & (columns < H)[None, :], other=0.0
            )
            sum_GH = sum_GH * fade_G[:, None]
            sum_GH += tl.dot(weight_GL.to(DTYPE), v_LH.to(DTYPE), input_precision="ieee")
            total_G = total_G * fade_G + tl.sum(weight_GL, axis=1)
            top_G = higher_G
        mean_GH = sum_GH / tl.where(used == 0, 1.0, total_G)[:, None]
        row_G = (sequence * J + head) * G + queries
        if used <= 1:
            tl.store(out + row_G[:, None] * H + columns[None, :], mean_GH.to(out.dtype.element_ty), mask=asked)
        else:
            place_G = row_G * parts + part
            tl.store(sums + place_G[:, None] * H + columns[None, :], mean_GH, mask=asked)
            tl.store(logs + place_G, top_G + tl.log2(total_G), mask=queries < G)


@triton.jit(do_not_specialize=["window", "wanted", "parts"])
def sum_parts_kernel(
    sums, logs, kv_len_S, out, window, wanted, parts, N,
    H: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The parts of one query head (axis 1) of a sequence (axis 0) by their weights: sum 2^log mean / sum 2^log.

    Example: means 2 and 5, logarithms 0 and 1: (1 x 2 + 2 x 5) / 3 = 4.
    """
    sequence = tl.program_id(0).to(tl.int64)
    length = tl.load(kv_len_S + sequence).to(tl.int32)
    visible = tl.minimum(length, window)
    used = tl.cdiv(visible, part_length(visible, wanted, parts))
    if used > 1:
        row = sequence * N + tl.program_id(1)
        number, columns = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_H)
        log_P = tl.load(logs + row * parts + number, mask=number < used, other=float("-inf"))
        top = tl.max(log_P, axis=0)
        whole = tl.sum(tl.exp2(log_P - top), axis=0)
        sum_H = tl.zeros((BLOCK_H,), tl.float32)
        for at in range(0, used, TILE):
            part = at + tl.arange(0, TILE)
            weight_T = tl.exp2(tl.load(logs + row * parts + part, mask=part < used, other=float("-inf")) - top)
            mean_at = sums + (row * parts + part)[:, None] * H + columns[None, :]
            mean_TH = tl.load(mean_at, mask=(part < used)[:, None] & (columns < H)[None, :], other=0.0)
            sum_H += tl.sum(weight_T[:, None] * mean_TH, axis=0)
        tl.store(out + row * H + columns, (sum_H / whole).to(out.dtype.element_ty), mask=columns < H)


def launch(
    q_SNH: Tensor,
    k_PBJH: Tensor,
    v_PBJH: Tensor,
    blocks_SM: Tensor,
    kv_len_S: Tensor,
    sinks_N: Tensor | None,
    scale: float,
    window: int,
) -> Tensor:
    sequences, heads, head_dim = q_SNH.shape
    _, block_size, kv_heads, _ = k_PBJH.shape
    blocks_SM, kv_len_S = blocks_SM.contiguous(), kv_len_S.contiguous()
    out_SNH = torch.empty(q_SNH.shape, dtype=q_SNH.dtype, device=q_SNH.device)
    positions = min(blocks_SM.shape[1] * block_size, window)
    wanted, parts = cut(sequences * kv_heads, positions, multiprocessors(q_SNH.device))
    shape = (sequences, heads, parts if parts > 1 else 0)
    sums = torch.empty(*shape, head_dim, dtype=torch.float32, device=q_SNH.device)
    logs = torch.empty(shape, dtype=torch.float32, device=q_SNH.device)
    block_h = max(16, triton.next_power_of_2(head_dim))
    sinks = q_SNH if sinks_N is None else sinks_N.contiguous()
    paged_decode_kernel[(sequences, kv_heads, parts)](
        q_SNH, k_PBJH, v_PBJH, blocks_SM, kv_len_S, sinks, out_SNH, sums, logs, scale * math.log2(math.e), window,
        wanted, q_SNH.stride(0), q_SNH.stride(1), blocks_SM.shape[1], kv_heads, SINKS=sinks_N is not None,
        G=heads // kv_heads, H=head_dim, B=block_size, BLOCK_G=max(16, triton.next_power_of_2(heads // kv_heads)),
        BLOCK_H=block_h, DTYPE=product_dtype(q_SNH.dtype), **tiles_for(block_h, q_SNH.element_size()),
    )  # fmt: skip
    if parts > 1:
        sum_parts_kernel[(sequences, heads)](
            sums, logs, kv_len_S, out_SNH, window, wanted, parts, heads,
            H=head_dim, BLOCK_H=block_h, BLOCK_P=triton.next_power_of_2(parts), TILE=8, num_warps=2,
        )  # fmt: skip
    return out_SNH


def cut(programs: int, positions: int, sms: int) -> tuple[int, int]:
    """Return into how many parts a sequence with so many positions should be cut, and how many there is room for.

    >>> cut(4, 32_768, 132), cut(1024, 32_768, 132), cut(4, 100, 132)
    ((64, 64), (1, 8), (1, 1))
    """
    room = max(1, math.ceil(positions / SHORTEST.value))
    wanted = min(MAX_PARTS, room, math.ceil(_PROGRAMS_PER_SM * sms / programs))
    return wanted, min(room, max(wanted, _SPARE_PARTS))


def tiles_for(block_h: int, itemsize: int) -> dict[str, int]:
    """Positions of a tile, warps and stages: what shared memory holds, and registers where float32 is multiplied."""
    length = min(128, max(16, _TILE_BYTES // (block_h * itemsize)))
    return {"BLOCK_L": length, "num_warps": 8 if itemsize == 4 and block_h >= 128 else 4, "num_stages": 3}


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _CPU_SMS


def product_dtype(dtype: torch.dtype) -> tl.dtype:
    if backend.upcast(dtype):
        return tl.float32
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]
