"""An expert layer for one row or a few, in two launches that read each weight once: no sort, no tensor cores.

1. gate, up and activation: one program per (pair, block of F) writes h. 2. down and combine: one program per (row,
block of D) reads every slot's share, weighs it and adds in slot order. At so few rows the bytes of the weights decide,
so a program only has to keep enough of them in flight: 16 bytes per load, the next tile already on its way. Pairs that
chose the same expert run next to each other and share its weights through L2.

Tiles are ``[N, J, Q]``: N output rows, J parts of each (gate and up, or slots), Q chunks of 16 bytes along a weight
row, at least one per thread. A chunk is V numbers, or V words of packed codes. One thread loads both a chunk and the
columns of x that it meets, so nothing is exchanged before the last sum.
Legend: T rows, K slots, S = T x K pairs, D hidden size, F expert width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.activations.kernel import activate
from moe_kernels.activations.op import Activation, gated
from moe_kernels.quant.decode_kernel import (
    code_values,
    float_fields,
    int4_offset,
    int4_products,
    int8_products,
    scale_values,
)
from moe_kernels.quant.weight import QuantisedWeight, kind_flags

P16, P256 = 0x41800000, 0x43800000
"""Patterns of 16.0 and 256.0 for the sums of codes. Runtime arguments on purpose: a register lets one LOP3 mask a code
and or the pattern around it, where two constants would take two."""
FIELDS_HALF = tl.constexpr(2.0**63)
"""Of what :func:`float_fields` lacks, the part that x makes up for: a product alone would be subnormal."""


@triton.jit
def _load(at, rows, depth, MASK: tl.constexpr):
    """MASK 0: all of it; 1: the ``rows`` that are inside; 2: also only the ``depth`` that is."""
    if MASK == 2:
        return tl.load(at, mask=rows & depth, other=0)
    elif MASK == 1:
        return tl.load(at, mask=rows, other=0)
    else:
        return tl.load(at)


@triton.jit
def _split4(tile):
    """[N, J, Q, 4] -> four tiles [N, J, Q], from registers of the same thread."""
    pairs = tl.reshape(tile, [tile.shape[0], tile.shape[1], tile.shape[2], 2, 2])
    even, odd = tl.split(pairs)
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _fours(x_J, q, FIRST: tl.constexpr, depth, inside_J, MASK: tl.constexpr, BITS: tl.constexpr, J: tl.constexpr,
           Q: tl.constexpr, COLUMNS: tl.constexpr = False):
    """Four neighbouring columns of x for each chunk, from the chunk's FIRST-th on, as four float32 tiles [1, J, Q].

    BITS 4: a run of 128 columns is 4 chunks of 16 low nibbles (the run's columns 0..63) and 16 high ones (64..127).
    depth: chunks of x, or its columns if COLUMNS.
    """
    i = tl.arange(0, 4 * Q)
    chunk = q + i // 4
    if BITS == 4:
        column = chunk // 4 * 128 + chunk % 4 * 16 + FIRST + i % 4
    else:
        column = chunk * 16 + FIRST + i % 4
    within = (column < depth if COLUMNS else chunk < depth)[None, None, :]
    tile = _load(x_J[None, :, None] + column[None, None, :], inside_J[None, :, None], within, MASK)
    a, b, c, d = _split4(tl.reshape(tile, [1, J, Q, 4]))
    return a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)


@triton.jit
def _chunk_products(w, x_J, q, depth, inside_J, p16, p256, MASK: tl.constexpr, BITS: tl.constexpr, N: tl.constexpr,
                    J: tl.constexpr, Q: tl.constexpr, V: tl.constexpr, XJ: tl.constexpr):
    """Sum over each chunk of weight x input, float32 [N, J, Q]; codes still without their scale.

    ``x_J``: where the XJ input rows start, one for all J parts or one for each. ``q``: the first chunk.
    """
    if BITS >= 16:
        column = q * V + tl.arange(0, Q * V)
        within = (column < depth)[None, None, :]
        x = _load(x_J[None, :, None] + column[None, None, :], inside_J[None, :, None], within, MASK)
        return tl.sum(tl.reshape(w.to(tl.float32) * x.to(tl.float32), [N, J, Q, V]), 3)
    else:
        acc = tl.zeros([N, J, Q], tl.float32)
        words = _split4(tl.reshape(w, [N, J, Q, V]))
        for k in tl.static_range(4):
            # A word's sum starts at minus its offset, so that the offsets of a chunk never add up.
            a, b, c, d = _fours(x_J, q, 4 * k, depth, inside_J, MASK, BITS, XJ, Q)
            if BITS == 8:
                acc += int8_products(words[k], p256, -384.0 * ((a + b) + (c + d)), a, b, c, d)
            else:
                e, f, g, h = _fours(x_J, q, 4 * k + 64, depth, inside_J, MASK, BITS, XJ, Q)
                acc += int4_products(words[k], p16, p256, int4_offset(a, b, c, d, e, f, g, h), a, b, c, d, e, f, g, h)
        return acc


@triton.jit
def _tile(w_NJ, scale_NJ, inside_NJ, q, depth, MASK: tl.constexpr, BITS: tl.constexpr, GROUP_CHUNKS: tl.constexpr,
          N: tl.constexpr, J: tl.constexpr, Q: tl.constexpr, V: tl.constexpr):
    """Weights ``[N, J, Q * V]`` as stored, from chunk q on, and the scales of their groups ``[N, J, Q]`` (1 without).

    Scales are read in pairs: an index that runs along the chunks gives them the layout of the weights, so that no
    thread has to hand its scale to another.
    """
    at = q * V + tl.arange(0, Q * V)
    within = (at < depth) if BITS >= 16 else (q + tl.arange(0, Q * V) // V < depth)
    w = _load(w_NJ[:, :, None] + at[None, None, :], inside_NJ[:, :, None], within[None, None, :], MASK)
    if GROUP_CHUNKS > 0:
        i = tl.arange(0, 2 * Q)
        group = (q + i // 2) // (2 * GROUP_CHUNKS) * 2 + i % 2
        real = (group < depth // GROUP_CHUNKS)[None, None, :]
        pairs = _load(scale_NJ[:, :, None] + group[None, None, :], inside_NJ[:, :, None], real, MASK)
        even, odd = tl.split(tl.reshape(pairs, [N, J, Q, 2]))
        is_odd = (q + tl.arange(0, Q)) // GROUP_CHUNKS % 2 == 1
        scale = tl.where(is_odd[None, None, :], odd, even).to(tl.float32)
    else:
        scale = 1.0
    return w, scale


@triton.jit
def _sums(w_NJ, scale_NJ, x_J, inside_NJ, inside_J, depth, p16, p256, MASK: tl.constexpr, BITS: tl.constexpr,
          GROUP_CHUNKS: tl.constexpr, WAIT: tl.constexpr, STAGES: tl.constexpr, N: tl.constexpr, J: tl.constexpr,
          Q: tl.constexpr, V: tl.constexpr, XJ: tl.constexpr):
    """Each weight row (pointers ``w_NJ``) times its input row, float32 [N, J]; scales per channel are yet to come.

    STAGES 1: load and use; 2: one tile ahead in registers; more: that many in shared memory. WAIT: x is not there yet;
    with STAGES 2 the first weights are asked for before it is waited for.
    """
    acc = tl.zeros([N, J, Q], tl.float32)
    steps = tl.cdiv(depth, Q * V if BITS >= 16 else Q)
    if STAGES == 2:
        w, scale = _tile(w_NJ, scale_NJ, inside_NJ, 0, depth, MASK, BITS, GROUP_CHUNKS, N, J, Q, V)
        if WAIT:
            tl.extra.cuda.gdc_wait()
        for step in range(steps - 1):
            q = step * Q
            ahead = _tile(w_NJ, scale_NJ, inside_NJ, q + Q, depth, MASK, BITS, GROUP_CHUNKS, N, J, Q, V)
            acc += scale * _chunk_products(w, x_J, q, depth, inside_J, p16, p256, MASK, BITS, N, J, Q, V, XJ)
            w, scale = ahead
        q = (steps - 1) * Q
        acc += scale * _chunk_products(w, x_J, q, depth, inside_J, p16, p256, MASK, BITS, N, J, Q, V, XJ)
    else:
        if WAIT:
            tl.extra.cuda.gdc_wait()
        for step in tl.range(0, steps, num_stages=STAGES):
            w, scale = _tile(w_NJ, scale_NJ, inside_NJ, step * Q, depth, MASK, BITS, GROUP_CHUNKS, N, J, Q, V)
            acc += scale * _chunk_products(w, x_J, step * Q, depth, inside_J, p16, p256, MASK, BITS, N, J, Q, V, XJ)
    return tl.sum(acc, 2)


@triton.jit
def _mixed_sums(w_NJ, scales, zeros, block_NJ, x_J, inside_NJ, inside_J, depth, columns, BITS: tl.constexpr,
                CODES: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, WAIT: tl.constexpr,
                STAGES: tl.constexpr, N: tl.constexpr, J: tl.constexpr, Q: tl.constexpr, XJ: tl.constexpr):
    """:func:`_sums` of any kind of codes, with all scales: value by value, where ``_sums`` has its shortcuts.

    ``block_NJ``: where the scales of a row begin. ``depth``: chunks of a row, of which the last may be partly padding;
    ``columns``: of x. The 16 columns of a chunk, or of either half of one in 4 bits, share a scale.
    """
    acc = tl.zeros([N, J, Q], tl.float32)
    if WAIT:
        tl.extra.cuda.gdc_wait()
    for step in tl.range(0, tl.cdiv(depth, Q), num_stages=STAGES):
        q = step * Q
        chunk = q + tl.arange(0, Q)
        at = q * 4 + tl.arange(0, 4 * Q)
        w = _load(w_NJ[:, :, None] + at[None, None, :], inside_NJ[:, :, None], (at < depth * 4)[None, None, :], 2)
        words = _split4(tl.reshape(w, [N, J, Q, 4]))
        for half in tl.static_range(2 if BITS == 4 else 1):
            first = chunk // 4 * 128 + chunk % 4 * 16 + 64 * half if BITS == 4 else chunk * 16
            block = block_NJ[:, :, None] + (first // GROUP if GROUP > 0 else first * 0)[None, None, :]
            real = (first < columns)[None, None, :]
            part = tl.zeros([N, J, Q], tl.float32)
            total = tl.zeros([1, XJ, Q], tl.float32)
            for k in tl.static_range(4):
                fours = _fours(x_J, q, 4 * k + 64 * half, columns, inside_J, 2, BITS, XJ, Q, True)
                for byte in tl.static_range(4):
                    if CODES == "int":
                        code = (words[k] >> (8 * byte + 4 * half)) & (15 if BITS == 4 else 255)
                        part += code_values(code, 0.0, CODES) * fours[byte]
                        total += fours[byte]
                    else:
                        part += float_fields(words[k], 8 * byte + 4 * half, CODES) * (fours[byte] * FIELDS_HALF)
            if CODES == "e4m3":
                part *= 2.0**57
            elif CODES == "e2m1":
                part *= FIELDS_HALF
            else:
                zero = 8.0 if BITS == 4 else 128.0
                if HAS_ZEROS:
                    zero = _load(zeros + block, inside_NJ[:, :, None], real, 2).to(tl.float32)
                part -= zero * total
            acc += part * scale_values(_load(scales + block, inside_NJ[:, :, None], real, 2), CODES)
    return tl.sum(acc, 2)


@triton.jit(do_not_specialize=["experts", "p16", "p256"])
def gemv_in_kernel(
    x, w, scales, zeros, bias, ids, weights, h, experts, width, depth, columns, stride_x, stride_e, stride_o, scale_e,
    scale_o, stride_bias, p16, p256,
    SLOTS: tl.constexpr, ACT: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, WEIGH: tl.constexpr,
    BITS: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, HAS_ZEROS: tl.constexpr,
    MIXED: tl.constexpr, GROUP_CHUNKS: tl.constexpr, SCALE_STEP: tl.constexpr, MASK: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr, N: tl.constexpr, Q: tl.constexpr, V: tl.constexpr,
):
    """h[p] = ACT(gate, up) with (gate, up) = weight[p] (WEIGH, else 1) x W_in[ids[p]] x[p // SLOTS] + bias.

    The rows of pairs whose expert is elsewhere are not written. Of ids, weights and x nothing may still be under way.
    ``scale_e``, ``scale_o`` count SCALE_STEP scales: 2 says to the compiler that pairs of scales are aligned.

    Example: SLOTS 1, one expert, D = F = 1, x 2, gate weight 1, up weight 3, "swiglu": silu(2) x 6 = h = 10.5696.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(0)
    expert = tl.load(ids + pair).to(tl.int64)
    if (expert >= 0) & (expert < experts):
        n = tl.program_id(1) * N + tl.arange(0, N)
        part = tl.arange(0, PARTS)
        row_NJ = n[:, None] + part[None, :] * width
        inside_NJ = (n < width)[:, None] & (part < PARTS)[None, :]
        x_J = (pair // SLOTS).to(tl.int64) * stride_x + tl.zeros([1], tl.int64)
        scale_NJ = scales + (expert * scale_e + row_NJ.to(tl.int64) * scale_o) * SCALE_STEP
        w_NJ = w + expert * stride_e + row_NJ.to(tl.int64) * stride_o
        inside_J = tl.full([1], 1, tl.int1)
        if MIXED:
            block_NJ = expert * scale_e + (row_NJ // SCALE_ROWS).to(tl.int64) * scale_o
            sum_NJ = _mixed_sums(w_NJ, scales, zeros, block_NJ, x + x_J, inside_NJ, inside_J, depth, columns, BITS,
                                 CODES, GROUP, HAS_ZEROS, False, STAGES, N, PARTS, Q, 1)
        else:
            sum_NJ = _sums(w_NJ, scale_NJ, x + x_J, inside_NJ, inside_J, depth, p16, p256, MASK, BITS, GROUP_CHUNKS,
                           False, STAGES, N, PARTS, Q, V, 1)
        if BITS < 16 and GROUP_CHUNKS == 0 and not MIXED:
            sum_NJ *= tl.load(scale_NJ, mask=inside_NJ, other=0.0).to(tl.float32)
        if WEIGH:
            sum_NJ *= tl.load(weights + pair).to(tl.float32)
        if HAS_BIAS:
            sum_NJ += tl.load(bias + expert * stride_bias + row_NJ, mask=inside_NJ, other=0.0).to(tl.float32)
        gate = tl.sum(tl.where(part[None, :] == 0, sum_NJ, 0.0), 1)
        up = tl.sum(tl.where(part[None, :] == 1, sum_NJ, 0.0), 1)
        out = activate(gate, up, ACT).to(h.dtype.element_ty)
        tl.store(h + pair.to(tl.int64) * width + n, out, mask=n < width)


@triton.jit(do_not_specialize=["experts", "p16", "p256"])
def gemv_down_kernel(
    h, w, scales, zeros, bias, ids, weights, y, experts, hidden, depth, columns, stride_h, stride_e, stride_o, scale_e,
    scale_o, stride_bias, p16, p256,
    SLOTS: tl.constexpr, J: tl.constexpr, HAS_BIAS: tl.constexpr, WEIGH: tl.constexpr, BITS: tl.constexpr,
    CODES: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, HAS_ZEROS: tl.constexpr, MIXED: tl.constexpr,
    GROUP_CHUNKS: tl.constexpr, SCALE_STEP: tl.constexpr, MASK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
    N: tl.constexpr, Q: tl.constexpr, V: tl.constexpr,
):
    """y[t] = sum over slots, slot 0 first, of weight[t, k] (WEIGH, else 1) x (W_down[ids[t, k]] h[t, k] + bias).

    MASK is at least 1, because an expert may be elsewhere.
    ids and weights are read before the wait: the kernel that wrote them was over before the one that writes h began.

    Example: D = F = 1, h 10.5696 and 1, down 5 for both experts, weights 0.5 and 2: 26.424 + 10 = 36.424.
    """
    row = tl.program_id(0)
    n = tl.program_id(1) * N + tl.arange(0, N)
    slot = tl.arange(0, J)
    expert_J = tl.load(ids + row * SLOTS + slot, mask=slot < SLOTS, other=-1)
    here_J = (expert_J >= 0) & (expert_J < experts)
    expert_J = tl.where(here_J, expert_J, 0).to(tl.int64)
    inside_NJ = here_J[None, :] & (n < hidden)[:, None]
    h_J = (row * SLOTS + slot).to(tl.int64) * stride_h
    scale_NJ = scales + (expert_J[None, :] * scale_e + n.to(tl.int64)[:, None] * scale_o) * SCALE_STEP
    w_NJ = w + expert_J[None, :] * stride_e + n.to(tl.int64)[:, None] * stride_o
    if MIXED:
        block_NJ = expert_J[None, :] * scale_e + (n // SCALE_ROWS).to(tl.int64)[:, None] * scale_o
        sum_NJ = _mixed_sums(w_NJ, scales, zeros, block_NJ, h + h_J, inside_NJ, here_J, depth, columns, BITS, CODES,
                             GROUP, HAS_ZEROS, PDL, STAGES, N, J, Q, J)
    else:
        sum_NJ = _sums(w_NJ, scale_NJ, h + h_J, inside_NJ, here_J, depth, p16, p256, MASK, BITS, GROUP_CHUNKS, PDL,
                       STAGES, N, J, Q, V, J)
    if BITS < 16 and GROUP_CHUNKS == 0 and not MIXED:
        sum_NJ *= tl.load(scale_NJ, mask=inside_NJ, other=0.0).to(tl.float32)
    if HAS_BIAS:
        at = bias + expert_J[None, :] * stride_bias + n[:, None]
        sum_NJ += tl.load(at, mask=inside_NJ, other=0.0).to(tl.float32)
    if WEIGH:
        weight_J = tl.load(weights + row * SLOTS + slot, mask=here_J, other=0.0).to(tl.float32)
        sum_NJ *= weight_J[None, :]
    total_N = tl.zeros([N], tl.float32)
    for k in tl.static_range(SLOTS):
        total_N += tl.sum(tl.where((slot == k) & here_J, sum_NJ, 0.0), 1)
    tl.store(y + row.to(tl.int64) * hidden + n, total_N.to(y.dtype.element_ty), mask=n < hidden)


def gemv_moe(
    x_TD: Tensor,
    w_in: Tensor | QuantisedWeight,
    w_down: Tensor | QuantisedWeight,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    activation: Activation,
    bias_in: Tensor | None = None,
    bias_down: Tensor | None = None,
    weights_on: str = "output",
    tiles: Mapping[str, int],
) -> Tensor:
    """``y_TD`` as :func:`moe_kernels.fused_moe` defines it, of arguments that it has checked. Two launches.

    Args:
        tiles: for the first launch BLOCK_N (columns of h per program), BLOCK_K (columns of x per step), num_warps,
            num_stages (1: no weights ahead of their use, 2: a tile ahead in registers, more: that many through shared
            memory) and optionally maxnreg. The same with the prefix ``DOWN_`` for the second launch; without them it
            takes the first's. PDL (0 or 1): the second launch may begin, and ask for weights, before the first is over.
            Fast where every thread has chunks of x to itself: BLOCK_K x bits / 128 >= 32 x num_warps.
    """
    rows, slots = ids_TK.shape
    hidden, width = w_down.shape[1:]
    if not rows * slots * hidden * width:
        return x_TD.new_zeros(rows, hidden)
    on_input = weights_on == "input"
    routes = ids_TK.contiguous(), weights_TK.contiguous()
    h_SF = launch_in(x_TD, w_in, bias_in, *routes, activation=activation, weigh=on_input, tiles=tiles)
    return launch_down(h_SF, w_down, bias_down, *routes, weigh=not on_input, tiles=tiles)


def launch_in(
    x_TD: Tensor, w_in: Tensor | QuantisedWeight, bias: Tensor | None, ids_TK: Tensor, weights_TK: Tensor, *,
    activation: Activation, weigh: bool, tiles: Mapping[str, int],
) -> Tensor:
    """``h_SF``; rows of absent pairs are left as they were."""
    rows, slots = ids_TK.shape
    parts = 2 if gated(activation) else 1
    width = w_in.shape[1] // parts
    h_SF = x_TD.new_empty(rows * slots, width)
    operands, flags = _operands(x_TD, w_in, bias, tiles, "", width)
    gemv_in_kernel[(rows * slots, triton.cdiv(width, flags["N"]))](
        *operands[:5], ids_TK, weights_TK, h_SF, w_in.shape[0], width, *operands[5:],
        SLOTS=slots, ACT=activation, PARTS=parts, WEIGH=weigh, **flags,
    )  # fmt: skip
    return h_SF


def launch_down(
    h_SF: Tensor, w_down: Tensor | QuantisedWeight, bias: Tensor | None, ids_TK: Tensor, weights_TK: Tensor, *,
    weigh: bool, tiles: Mapping[str, int],
) -> Tensor:
    """``y_TD``."""
    rows, slots = ids_TK.shape
    hidden = w_down.shape[1]
    y_TD = h_SF.new_empty(rows, hidden)
    operands, flags = _operands(h_SF, w_down, bias, tiles, "DOWN_", hidden)
    flags["MASK"] = max(flags["MASK"], 1)
    gemv_down_kernel[(rows, triton.cdiv(hidden, flags["N"]))](
        *operands[:5], ids_TK, weights_TK, y_TD, w_down.shape[0], hidden, *operands[5:],
        SLOTS=slots, J=triton.next_power_of_2(slots), WEIGH=weigh, launch_pdl=flags["PDL"], **flags,
    )  # fmt: skip
    return y_TD


def _operands(
    x_RI: Tensor, w: Tensor | QuantisedWeight, bias: Tensor | None, tiles: Mapping[str, int], prefix: str, columns: int
) -> tuple[tuple[Tensor | int, ...], dict[str, Any]]:
    """x, weights, scales, zeros, bias, then depth, columns, strides and patterns as both kernels take them; flags."""
    choice = {**tiles, **{name.removeprefix(prefix): value for name, value in tiles.items() if name.startswith(prefix)}}
    x_RI = x_RI.contiguous()
    if isinstance(w, QuantisedWeight):
        raw, scales, bits, group, per_thread = w.packed.view(torch.int32), w.scales, w.bits, w.group, 4
    else:
        raw, scales, bits, group, per_thread = w, w, w.element_size() * 8, 0, 16 // w.element_size()
    in_features = w.shape[2]
    numbers = 128 // bits  # of a chunk of 16 bytes
    chunks = raw.shape[2] // 4 if bits < 16 else triton.cdiv(in_features, numbers)
    mixed = isinstance(w, QuantisedWeight) and not w.plain
    q = min(max(choice["BLOCK_K"] // numbers, 1), triton.next_power_of_2(chunks))
    n = min(choice["BLOCK_N"], triton.next_power_of_2(columns))
    # Scales are read in pairs of groups, so the last pair of an odd row is cut off too.
    cut = in_features % (q * numbers) or q * numbers < 2 * group
    flags = {
        "HAS_BIAS": bias is not None, "BITS": bits, **kind_flags(w), "MIXED": mixed,
        "GROUP_CHUNKS": 0 if mixed else group // numbers, "STAGES": choice["num_stages"],
        "MASK": 2 if cut else int(columns % n != 0), "PDL": bool(choice.get("PDL", 0)),
        "N": n, "Q": q, "V": per_thread, "num_warps": choice["num_warps"],
    }  # fmt: skip
    if choice.get("maxnreg", 0):
        flags["maxnreg"] = choice["maxnreg"]
    step = 2 if group and not mixed and scales.shape[2] % 2 == 0 else 1
    flags["SCALE_STEP"] = step
    strides = (x_RI.stride(0), raw.stride(0), raw.stride(1), scales.stride(0) // step, scales.stride(1) // step)
    bias = x_RI if bias is None else bias.contiguous()
    zeros = scales if isinstance(w, Tensor) or w.zeros is None else w.zeros
    sizes = (chunks if bits < 16 else in_features, in_features)
    return (x_RI, raw, scales, zeros, bias, *sizes, *strides, bias.stride(0), P16, P256), flags
