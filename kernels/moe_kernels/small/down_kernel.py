"""Second launch of the small-T layer: hidden rows in, the weighted sum of the experts' outputs out.

Legend: S pairs (token, slot), K slots, T tokens, C candidates, B column blocks, F expert width, D hidden size.
"""

import triton
import triton.language as tl

from moe_kernels.small.tiles_kernel import local_experts, products, row_of


@triton.jit
def _sum_slots(
    parts, y, ids, local, keep, weights, token, column, T, S, IDS, E, D,
    SLOTS: tl.constexpr, HAS_LOCAL: tl.constexpr, HAS_KEEP: tl.constexpr, WEIGHTED: tl.constexpr,
    SPLIT_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """y[t] = sum over slots, in slot order, of weight[p] x sum over splits of parts[split, p], for BLOCK_T tokens.

    Slots without an expert here are never read: nobody wrote them.
    """
    tokens = token + tl.arange(0, BLOCK_T)
    columns = column + tl.arange(0, BLOCK_N)
    inside = columns < D
    total = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for slot in tl.static_range(SLOTS):
        pairs = tokens * SLOTS + slot
        here = local_experts(ids, local, keep, pairs, S, IDS, E, SLOTS, HAS_LOCAL, HAS_KEEP) >= 0
        mask = here[:, None] & inside[None, :]
        at = parts + pairs.to(tl.int64)[:, None] * D + columns[None, :]
        part = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
        for split in tl.static_range(1, SPLIT_K):
            split_at = at + tl.cast(S, tl.int64) * D * split
            part += tl.load(split_at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
        if WEIGHTED:
            part *= tl.load(weights + pairs, mask=here, other=0.0)[:, None]
        total += part
    y_at = y + tokens.to(tl.int64)[:, None] * D + columns[None, :]
    tl.store(y_at, total.to(y.dtype.element_ty), mask=(tokens < T)[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["T", "S", "IDS", "E"])
def small_combine_kernel(
    parts, y, ids, local, keep, weights, T, S, IDS, E, D,
    SLOTS: tl.constexpr, HAS_LOCAL: tl.constexpr, HAS_KEEP: tl.constexpr, WEIGHTED: tl.constexpr,
    SPLIT_K: tl.constexpr, PDL: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """The sum over slots as a launch of its own: one program per BLOCK_T tokens and BLOCK_N columns.

    Example: T 1, K 2, SPLIT_K 1, parts ``[[3], [5]]``, weights ``[[0.5, 2]]``: y ``[[11.5]]``; ids ``[[0, -1]]``: 1.5.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    _sum_slots(
        parts, y, ids, local, keep, weights, tl.program_id(0) * BLOCK_T, tl.program_id(1) * BLOCK_N, T, S, IDS, E, D,
        SLOTS, HAS_LOCAL, HAS_KEEP, WEIGHTED, SPLIT_K, BLOCK_T, BLOCK_N,
    )


@triton.jit(do_not_specialize=["T", "S", "IDS", "E", "G", "magic"])
def small_down_kernel(
    h, w, parts, y, order_S, first_C, count_C, total_1, arrived_B, ids, local, keep, weights, scales, zeros,
    bias, T, S, IDS, E, D, F, G, DEPTH, magic,
    SLOTS: tl.constexpr, BY_PAIR: tl.constexpr, HAS_LOCAL: tl.constexpr, HAS_KEEP: tl.constexpr,
    HAS_BIAS: tl.constexpr, WEIGHTED: tl.constexpr, BITS: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr, HAS_ZEROS: tl.constexpr, MIXED: tl.constexpr, WORDS: tl.constexpr, WARPS: tl.constexpr,
    TMA: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, EVICT_FIRST: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
    COMBINE_IN_LAUNCH: tl.constexpr, SPLIT_K: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """parts[split, p] = W_down[e][:, split] h[p][split] (+ bias[e] in split 0); y[t] = sum of its slots' parts.

    One program: one block of columns of y, one candidate expert, one of SPLIT_K runs of DEPTH columns of F. Column
    blocks run slowest, so that most sums hide behind the products of later blocks. COMBINE_IN_LAUNCH: the programs of a
    column block count their pairs into ``arrived_B``; whoever completes ``total_1`` x SPLIT_K finds all
    parts written and sums them in slot order, so the result does not depend on who came last. Otherwise y is left to
    ``small_combine_kernel``.

    Example: E 2, D = F = 1, h ``[[2], [3]]`` (T 1, K 2), W_down ``[[[10]], [[100]]]``, ids ``[[0, 1]]``, weights
    ``[[1, 0.5]]``: parts ``[[20], [300]]``, y ``[[170]]``.
    """
    candidate = tl.program_id(0) // SPLIT_K
    split = tl.program_id(0) % SPLIT_K
    block = tl.program_id(1)
    column = block * BLOCK_N
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    count = tl.load(count_C + candidate)
    total = tl.load(total_1)
    # With no pair here at all nobody would come last: the first program of the block writes the zeros.
    last = (total == 0) & (candidate == 0) & (split == 0)
    if count > 0:
        first = tl.load(first_C + candidate)
        columns = column + row_of(tl.arange(0, BLOCK_N), WARPS, WORDS)
        inside = columns < D
        expert = candidate
        if BY_PAIR:
            expert = local_experts(ids, local, keep, candidate, S, IDS, E, SLOTS, HAS_LOCAL, HAS_KEEP)
        row = expert.to(tl.int64) * D + column
        for start in tl.range(0, count, BLOCK_M):
            members = start + tl.arange(0, BLOCK_M)
            valid = members < count
            pair_M = tl.load(order_S + first + members, mask=valid, other=0)
            part, _ = products(
                h, pair_M, valid, F, w, scales, zeros, magic, row, 0, D - column, split * DEPTH,
                tl.minimum(split * DEPTH + DEPTH, F), F, G, False, BITS, CODES, GROUP, SCALE_ROWS, HAS_ZEROS,
                MIXED, WORDS, WARPS, TMA, EVEN_N, EVEN_K, EVICT_FIRST, UPCAST, PRECISION, STAGES, BLOCK_N, BLOCK_M,
                BLOCK_K,
            )
            if HAS_BIAS:
                if split == 0:
                    part += tl.load(bias + row - column + columns, mask=inside, other=0.0).to(tl.float32)[:, None]
            place_M = tl.cast(split, tl.int64) * S + pair_M
            part_at = parts + place_M[None, :] * D + columns[:, None]
            tl.store(part_at, part.to(parts.dtype.element_ty), mask=inside[:, None] & valid[None, :])
        if COMBINE_IN_LAUNCH:
            # All threads' parts are written before the one thread that counts releases them.
            tl.debug_barrier()
            before = tl.atomic_add(arrived_B + block, count, sem="acq_rel", scope="gpu")
            last = before + count == total * SPLIT_K
    if COMBINE_IN_LAUNCH:
        if last:
            for token in tl.range(0, T, BLOCK_T):
                _sum_slots(
                    parts, y, ids, local, keep, weights, token, column, T, S, IDS, E, D, SLOTS, HAS_LOCAL, HAS_KEEP,
                    WEIGHTED, SPLIT_K, BLOCK_T, BLOCK_N,
                )
