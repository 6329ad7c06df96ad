"""Router logits in, chosen experts and weights out, in one launch; :mod:`moe_kernels.router.op` is its reference.

A warp owns a row, so every reduction over experts stays within a warp. Legend: T rows, E experts, K chosen per row,
R rows of one program, C columns of its tile: experts, each group padded to a power of two; G groups.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.overlap import overlaps

EARLY_ROWS = 128
"""Up to so many rows the next kernel may start at once. Programs that wait take up room on an SM, which the scheduler
then avoids: route and plan took 6.8 instead of 5.3 us at T 512 on an H200."""
INT32_VALUES = 2**31
"""Kernels count the elements of a row in int32."""
NAN_RANK = tl.constexpr(0x7FFFFFFF)
NEVER = tl.constexpr(-0x80000000)
"""Below the rank of every number: -inf has -0x7F800001."""


@triton.jit
def _rank(value):
    """float32 to the int32 that compares the same way: -inf < ... < -0.0 = 0.0 < ... < inf < NaN.

    A warp reduces integers in one instruction (REDUX), floats in five shuffles.
    Example: 1.0 is 0x3F800000 and stays; -1.0 is 0xBF800000 and becomes 0xC07FFFFF, below every positive number.
    """
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return tl.where(value != value, NAN_RANK, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _value(rank):
    """Inverse of :func:`_rank`, but for the sign of zero and of NaN."""
    return (rank ^ ((rank >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _first_largest(rank_RC, column_C):
    """Largest rank of each row and the lowest column that has it. ``[[3, 7, 7]]`` gives 7 and 1."""
    best_R = tl.max(rank_RC, 1)
    return best_R, tl.min(tl.where(rank_RC == best_R[:, None], column_C[None, :], 0x7FFFFFFF), 1)


@triton.jit
def _softmax(logit_RC, real_RC):
    """exp(x - max x) / sum exp(x - max x) over the real columns, 0 elsewhere. One NaN makes its row NaN."""
    largest_R = _value(tl.max(tl.where(real_RC, _rank(logit_RC), NEVER), 1))
    power_RC = tl.where(real_RC, tl.exp(logit_RC - largest_R[:, None]), 0.0)
    return power_RC * (1.0 / tl.sum(power_RC, 1))[:, None]


@triton.jit
def _outside_best_groups(rank_RC, R: tl.constexpr, GROUPS_PAD: tl.constexpr, WIDTH: tl.constexpr,
                         WIDTH_PAD: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2_SUM: tl.constexpr):
    """``rank_RC`` with NEVER outside the TOP_GROUPS groups whose largest value (or two largest, summed) is largest.

    Example: groups of 2, values ``[[5, 1, 4, 3]]``, TOP_GROUPS 1: by maximum 5 > 4 keeps the first group, by sum
    6 < 7 the second.
    """
    rank_RGW = tl.reshape(rank_RC, [R, GROUPS_PAD, WIDTH_PAD])
    group_RG = tl.max(rank_RGW, 2)
    group_G = tl.arange(0, GROUPS_PAD)
    if TOP2_SUM and WIDTH > 1:
        inside_W = tl.arange(0, WIDTH_PAD)
        first_RG = tl.min(tl.where(rank_RGW == group_RG[:, :, None], inside_W[None, None, :], WIDTH_PAD), 2)
        second_RG = tl.max(tl.where(inside_W[None, None, :] == first_RG[:, :, None], NEVER, rank_RGW), 2)
        group_RG = tl.where(group_RG == NEVER, NEVER, _rank(_value(group_RG) + _value(second_RG)))
    kept_RG = tl.zeros([R, GROUPS_PAD], tl.int32)
    for _ in range(TOP_GROUPS):
        _, best_R = _first_largest(group_RG, group_G)
        here_RG = group_G[None, :] == best_R[:, None]
        kept_RG = tl.where(here_RG, 1, kept_RG)
        group_RG = tl.where(here_RG, NEVER, group_RG)
    kept_RGW = tl.where(kept_RG[:, :, None] != 0, rank_RGW, NEVER)
    return tl.reshape(kept_RGW, [R, GROUPS_PAD * WIDTH_PAD])


@triton.jit(do_not_specialize=["rows"])
def _route_kernel(
    logits, bias, keep, ids, weights, rows, stride_t, stride_e, scale,
    K: tl.constexpr, K_PAD: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2_SUM: tl.constexpr, SIGMOID: tl.constexpr,
    CHOOSE_FIRST: tl.constexpr, RENORMALISE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr,
    R: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr,
):
    """ids[t] = the K largest of choice[t], largest first, ties to the lowest expert; weights[t] = score there.

    score = softmax(logits) or sigmoid(logits), choice = score + bias outside of which groups exclude; CHOOSE_FIRST:
    choice = logits + bias, and the score is taken over the K chosen logits. The arg max is iterated: at K <= 8 that
    is shorter than any sort of a row.

    Example: logits [0, ln 2, 0, ln 4], K 2: scores [1/8, 2/8, 1/8, 4/8]; ids 3, 1; weights 0.5, 0.25.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
    row_R = tl.program_id(0) * R + tl.arange(0, R)
    inside_R = row_R < rows
    column_C = tl.arange(0, GROUPS_PAD * WIDTH_PAD)
    expert_C = column_C // WIDTH_PAD * WIDTH + column_C % WIDTH_PAD
    real_C = (column_C // WIDTH_PAD < GROUPS) & (column_C % WIDTH_PAD < WIDTH)
    real_RC = inside_R[:, None] & real_C[None, :]
    at_RC = row_R.to(tl.int64)[:, None] * stride_t + expert_C[None, :] * stride_e
    logit_RC = tl.load(logits + at_RC, mask=real_RC, other=0.0).to(tl.float32)

    score_RC = logit_RC
    if not CHOOSE_FIRST:
        if SIGMOID:
            score_RC = tl.sigmoid(logit_RC)
        else:
            score_RC = _softmax(logit_RC, real_C[None, :])
    rank_RC = _rank(score_RC)
    score_rank_RC = rank_RC
    if HAS_BIAS:
        rank_RC = _rank(score_RC + tl.load(bias + expert_C, mask=real_C, other=0.0).to(tl.float32)[None, :])
    rank_RC = tl.where(real_C[None, :], rank_RC, NEVER)
    if TOP_GROUPS < GROUPS:
        rank_RC = _outside_best_groups(rank_RC, R, GROUPS_PAD, WIDTH, WIDTH_PAD, TOP_GROUPS, TOP2_SUM)

    slot_K = tl.arange(0, K_PAD)
    chosen_RK = tl.zeros([R, K_PAD], tl.int32)
    weight_RK = tl.zeros([R, K_PAD], tl.float32)
    for slot in range(K):
        best_R, chosen_R = _first_largest(rank_RC, column_C)
        here_RC = column_C[None, :] == chosen_R[:, None]
        if HAS_BIAS:
            best_R = tl.max(tl.where(here_RC, score_rank_RC, NEVER), 1)
        rank_RC = tl.where(here_RC, NEVER, rank_RC)
        here_1K = slot_K[None, :] == slot
        chosen_RK = tl.where(here_1K, chosen_R[:, None], chosen_RK)
        weight_RK = tl.where(here_1K, _value(best_R)[:, None], weight_RK)

    real_1K = slot_K[None, :] < K
    if CHOOSE_FIRST:
        if SIGMOID:
            weight_RK = tl.sigmoid(weight_RK)
        else:
            weight_RK = _softmax(weight_RK, real_1K)
    if RENORMALISE:
        # The reference's epsilon: a row whose scores all vanish must not divide by zero.
        total_R = tl.sum(tl.where(real_1K, weight_RK, 0.0), 1) + 1e-20
        weight_RK = weight_RK / total_R[:, None]
    weight_RK = weight_RK * scale
    chosen_RK = chosen_RK // WIDTH_PAD * WIDTH + chosen_RK % WIDTH_PAD
    if HAS_KEEP:
        kept_R1 = (tl.load(keep + row_R, mask=inside_R, other=0) != 0)[:, None]
        weight_RK = tl.where(kept_R1, weight_RK, 0.0)
        chosen_RK = tl.where(kept_R1, chosen_RK, -1)
    out_RK = row_R.to(tl.int64)[:, None] * K + slot_K[None, :]
    if PDL and not EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(ids + out_RK, chosen_RK.to(ids.dtype.element_ty), mask=inside_R[:, None] & real_1K)
    tl.store(weights + out_RK, weight_RK, mask=inside_R[:, None] & real_1K)


def launch(
    logits_TE: Tensor,
    *,
    top_k: int,
    sigmoid: bool,
    choose_first: bool,
    renormalise: bool,
    bias_E: Tensor | None,
    groups: int,
    top_groups: int,
    top2_sum: bool,
    scale: float,
    keep_T: Tensor | None,
    ids_dtype: torch.dtype,
    pdl: bool | None = None,
    shape: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """One launch, none if there is no row. Arguments as :func:`moe_kernels.route` checks them.

    Args:
        pdl: start before the kernel that makes the logits ends; by default where the device can.
        shape: rows and warps of a program.
    """
    rows, experts = logits_TE.shape
    ids_TK = torch.empty(rows, top_k, dtype=ids_dtype, device=logits_TE.device)
    weights_TK = torch.empty(rows, top_k, dtype=torch.float32, device=logits_TE.device)
    if rows == 0:
        return ids_TK, weights_TK
    logits_TE = near(logits_TE)
    if top_groups == groups:
        groups = top_groups = 1
    width = experts // groups
    rows_per_program, warps = shape or _shape(groups, experts)
    pdl = overlaps(logits_TE.device) if pdl is None else pdl
    _route_kernel[(triton.cdiv(rows, rows_per_program),)](
        logits_TE, bias_E.contiguous() if bias_E is not None else logits_TE,
        keep_T.contiguous().view(torch.uint8) if keep_T is not None else logits_TE, ids_TK, weights_TK,
        rows, logits_TE.stride(0), logits_TE.stride(1), float(scale),
        K=top_k, K_PAD=triton.next_power_of_2(top_k), GROUPS=groups, GROUPS_PAD=triton.next_power_of_2(groups),
        WIDTH=width, WIDTH_PAD=triton.next_power_of_2(width), TOP_GROUPS=top_groups, TOP2_SUM=top2_sum,
        SIGMOID=sigmoid, CHOOSE_FIRST=choose_first, RENORMALISE=renormalise, HAS_BIAS=bias_E is not None,
        HAS_KEEP=keep_T is not None, R=rows_per_program, PDL=pdl, EARLY=rows <= EARLY_ROWS,
        num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return ids_TK, weights_TK


def near(logits_TE: Tensor) -> Tensor:
    """Return the tensor, or a copy if its experts lie so far from each other that int32 offsets wrap."""
    far = (logits_TE.shape[1] - 1) * logits_TE.stride(1) >= INT32_VALUES
    return logits_TE.contiguous() if far else logits_TE


def _shape(groups: int, experts: int) -> tuple[int, int]:
    """Rows and warps of a program: a row must stay within one warp.

    A warp spans 128 columns at 4 values per lane; a wider row would be dealt to several of a program's warps, and
    groups are dealt again. So these get programs of one warp: 3.8 instead of 6.5 us for DeepSeek-V3's router at T 512.
    """
    return (4, 4) if groups == 1 and experts <= 128 else (1, 1)
