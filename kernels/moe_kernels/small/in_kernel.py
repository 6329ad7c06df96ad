"""First launch of the small-T layer: tokens in, activated hidden rows out, with no sort before it.

Every program finds its expert's pairs itself from the router's ids, and leaves what it found for the second launch.
Legend: S pairs (token, slot), K slots, E experts, C candidates, F expert width, D hidden size.
"""

import triton
import triton.language as tl

from moe_kernels.activations.kernel import activate
from moe_kernels.small.tiles_kernel import local_experts, products, row_of, slot_of


@triton.jit
def _find_pairs(expert_S, expert, candidate, pairs, BY_PAIR: tl.constexpr):
    """How many pairs are the candidate's, how many lie before them in expert order, and which they are.

    BY_PAIR: an expert belongs to the first pair that chose it. The three counts share one reduction, 10 bits each.
    """
    same = expert_S == expert
    before = ((expert_S >= 0) & (expert_S < expert)).to(tl.int32)
    if BY_PAIR:
        earlier = (same & (pairs < candidate)).to(tl.int32)
        sums = tl.sum(same.to(tl.int32) + before * 1024 + earlier * 1048576)
        mine = same & (expert >= 0) & (sums < 1048576)
        return tl.where((expert >= 0) & (sums < 1048576), sums % 1024, 0), sums // 1024 % 1024, mine
    else:
        sums = tl.sum(same.to(tl.int32) + before * 4096)
        return sums % 4096, sums // 4096, same


@triton.jit
def _write_lists(
    order_S, first_C, count_C, total_1, arrived_B, expert_S, candidate, pairs, count, first, rank, mine, COUNTERS,
    BLOCK_C: tl.constexpr,
):
    """Candidate's part of the lists that the launches share; the first candidate's program writes what all share."""
    tl.store(first_C + candidate, first)
    tl.store(count_C + candidate, count)
    tl.store(order_S + first + rank, pairs, mask=mine)
    if candidate == 0:
        tl.store(total_1, tl.sum((expert_S >= 0).to(tl.int32)))
        counters = tl.arange(0, BLOCK_C)
        tl.store(arrived_B + counters, tl.zeros((BLOCK_C,), tl.int32), mask=counters < COUNTERS)


@triton.jit(do_not_specialize=["T", "C", "S", "IDS", "E", "COUNTERS"])
def small_lists_kernel(
    x, out, order_S, first_C, count_C, total_1, arrived_B, ids, local, keep, stride_x, T, C, D, S, IDS, E, COUNTERS,
    SLOTS: tl.constexpr, BY_PAIR: tl.constexpr, HAS_LOCAL: tl.constexpr, HAS_KEEP: tl.constexpr, PDL: tl.constexpr,
    ARRANGE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """The lists of ``small_in_kernel`` as a launch of its own, for many pairs: each is looked at once per candidate
    and not once per program. ARRANGE: out[t, slot_of(d)] = x[t, d] besides.

    Example of ARRANGE: x[t] = 0, 1, 2, ...: out[t] begins 0, 2, 16, 18, 32, 34, 48, 50, 1, 3.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    candidate = tl.program_id(0)
    if candidate < C:
        pairs = tl.arange(0, BLOCK_S)
        expert_S = local_experts(ids, local, keep, pairs, S, IDS, E, SLOTS, HAS_LOCAL, HAS_KEEP)
        expert = candidate
        if BY_PAIR:
            expert = local_experts(ids, local, keep, candidate, S, IDS, E, SLOTS, HAS_LOCAL, HAS_KEEP)
        count, first, mine = _find_pairs(expert_S, expert, candidate, pairs, BY_PAIR)
        rank = tl.cumsum(mine.to(tl.int32), 0) - 1
        _write_lists(
            order_S, first_C, count_C, total_1, arrived_B, expert_S, candidate, pairs, count, first, rank, mine,
            COUNTERS, BLOCK_C,
        )
    if ARRANGE:
        token = tl.program_id(0).to(tl.int64)
        if token < T:
            for start in tl.range(0, D, BLOCK_D):
                columns = start + tl.arange(0, BLOCK_D)
                values = tl.load(x + token * stride_x + columns, mask=columns < D, other=0.0)
                tl.store(out + token * D + slot_of(columns), values, mask=columns < D)


@triton.jit(do_not_specialize=["S", "IDS", "E", "G", "COUNTERS", "magic"])
def small_in_kernel(
    x, w, h, order_S, first_C, count_C, total_1, arrived_B, ids, local, keep, weights, scales, zeros,
    bias, stride_x, S, IDS, E, F, D, G, COUNTERS, magic,
    SLOTS: tl.constexpr, BY_PAIR: tl.constexpr, HAS_LOCAL: tl.constexpr, HAS_KEEP: tl.constexpr, ACT: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, H_ARRANGED: tl.constexpr, LISTED: tl.constexpr,
    BITS: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, HAS_ZEROS: tl.constexpr,
    MIXED: tl.constexpr, WORDS: tl.constexpr, WARPS: tl.constexpr, TMA: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, EVICT_FIRST: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """h[p] = ACT(weight[p] (W_in[e] x[p // K]) + bias[e]) for each pair p whose expert e is here; weight 1 unless
    SCALED. H_ARRANGED: columns of h lie as :func:`slot_of` says.

    One program: one block of columns of h for one candidate expert. LISTED: which pairs are the candidate's is already
    written down. Otherwise it looks itself and writes besides h, for the second launch,
    ``order_S[first_C[c] : first_C[c] + count_C[c]]``, the pairs of candidate c in ascending order, ``total_1``, the
    number of pairs here, and zeros into ``arrived_B``.

    Example: ids ``[[1, 0], [1, -1]]``, candidates 0 and 1 are the experts: order ``[1, 0, 2]``, first ``[0, 1]``,
    count ``[1, 2]``, total 3; h[3] is not written. BY_PAIR: candidates are the pairs 0..3, first ``[1, 0, ...]``,
    count ``[2, 1, 0, 0]``.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    column = tl.program_id(0) * BLOCK_N
    candidate = tl.program_id(1)
    # Few pairs: ranks are inverted in registers. Many: the list is read back from where it was written.
    IN_REGISTERS: tl.constexpr = not LISTED and BLOCK_S * BLOCK_M <= 8192
    expert = candidate
    if BY_PAIR:
        expert = local_experts(ids, local, keep, candidate, S, IDS, E, SLOTS, HAS_LOCAL, HAS_KEEP)
    if LISTED:
        count = tl.load(count_C + candidate)
        first = tl.load(first_C + candidate)
    else:
        pairs = tl.arange(0, BLOCK_S)
        expert_S = local_experts(ids, local, keep, pairs, S, IDS, E, SLOTS, HAS_LOCAL, HAS_KEEP)
        count, first, mine = _find_pairs(expert_S, expert, candidate, pairs, BY_PAIR)
        rank = tl.cumsum(mine.to(tl.int32), 0) - 1
        if column == 0:
            _write_lists(
                order_S, first_C, count_C, total_1, arrived_B, expert_S, candidate, pairs, count, first, rank, mine,
                COUNTERS, BLOCK_C,
            )
        if not IN_REGISTERS:
            # All programs of an expert write the same list to the same place, and each reads its own writes.
            tl.store(order_S + first + rank, pairs, mask=mine)
            tl.debug_barrier()
    if count > 0:
        row = expert.to(tl.int64) * (2 * F if GATED else F) + column
        columns = column + row_of(tl.arange(0, BLOCK_N), WARPS, WORDS)
        inside = columns < F
        for start in tl.range(0, count, BLOCK_M):
            members = start + tl.arange(0, BLOCK_M)
            valid = members < count
            if IN_REGISTERS:
                found = mine[None, :] & (rank[None, :] == members[:, None])
                pair_M = tl.sum(tl.where(found, pairs[None, :], 0), axis=1)
            else:
                pair_M = tl.load(order_S + first + members, mask=valid, other=0, cache_modifier=".cg")
            gate, up = products(
                x, pair_M // SLOTS, valid, stride_x, w, scales, zeros, magic, row, F, F - column, 0, D, D, G, GATED,
                BITS, CODES, GROUP, SCALE_ROWS, HAS_ZEROS, MIXED, WORDS, WARPS, TMA, EVEN_N, EVEN_K, EVICT_FIRST,
                UPCAST, PRECISION, STAGES, BLOCK_N, BLOCK_M, BLOCK_K,
            )
            if SCALED:
                weight_M = tl.load(weights + pair_M, mask=valid, other=0.0)
                gate *= weight_M[None, :]
                up *= weight_M[None, :]
            if HAS_BIAS:
                bias_at = bias + row - column + columns
                gate += tl.load(bias_at, mask=inside, other=0.0).to(tl.float32)[:, None]
                if GATED:
                    up += tl.load(bias_at + F, mask=inside, other=0.0).to(tl.float32)[:, None]
            places = slot_of(columns) if H_ARRANGED else columns
            h_at = h + pair_M.to(tl.int64)[None, :] * F + places[:, None]
            tl.store(h_at, activate(gate, up, ACT).to(h.dtype.element_ty), mask=inside[:, None] & valid[None, :])
