"""The counting sort behind :func:`moe_kernels.plan.op` as kernels; :mod:`moe_kernels.plan.op` is its reference.

Positions come from prefix sums, never from atomics. Pairs that no expert takes sort last, as those of expert E.
Legend: S pairs, B pairs of one block, E experts, X experts padded to a power of two, C blocks, W experts of one
program, M tiles.
"""

import triton
import triton.language as tl


@triton.jit
def _experts_of(ids, table, keep, arrival, rows, known, E: tl.constexpr, SLOTS: tl.constexpr, SLOT_FIRST: tl.constexpr,
                HAS_TABLE: tl.constexpr, HAS_KEEP: tl.constexpr):
    """Pairs that arrive at ``arrival`` and their experts: 0..E-1, E if none takes the pair, E + 1 past the last.

    Example: SLOTS 2, 3 rows, SLOT_FIRST: arrivals 0..5 are the pairs 0, 2, 4, 1, 3, 5.
    """
    # As a multiple of SLOTS the bound lets the compiler load several ids at once.
    inside = arrival < rows * SLOTS
    pair = arrival
    if SLOT_FIRST:
        pair = arrival % rows * SLOTS + arrival // rows
    expert = tl.load(ids + pair, mask=inside, other=-1)
    taken = (expert >= 0) & (expert < known)
    if HAS_KEEP:
        taken = taken & (tl.load(keep + pair // SLOTS, mask=inside, other=0) != 0)
    expert = tl.where(taken, expert, -1).to(tl.int32)
    if HAS_TABLE:
        expert = tl.load(table + expert, mask=taken, other=-1)
        taken = (expert >= 0) & (expert < E)
    return pair, tl.where(inside, tl.where(taken, expert, E), E + 1)


@triton.jit
def _put(pair, expert, position, first, mask, order, place, limited, capacity, E: tl.constexpr, LIMIT: tl.constexpr):
    """Write pairs to their positions; with LIMIT, who is served: ``expert`` of a pair fewer than ``capacity`` positions
    after its expert's ``first``, else -1."""
    if LIMIT:
        served = (position - first < capacity) & (expert < E)
        tl.store(limited + pair, tl.where(served, expert, -1), mask=mask)
    else:
        tl.store(order + position, pair, mask=mask)
        tl.store(place + pair, tl.where(expert < E, position, -1), mask=mask)


@triton.jit
def _note_served(served, served_before, dropped, LIMIT: tl.constexpr, LIMITED: tl.constexpr):
    """A first pass (LIMIT) notes how many pairs have an expert; what the second serves less has been dropped."""
    if LIMIT:
        tl.store(served_before, served)
    else:
        if LIMITED:
            tl.store(dropped, tl.load(served_before) - served)
        else:
            tl.store(dropped, 0)


@triton.jit
def _write_tiles(rows_X, part, parts, tile_expert, tile_row, tile_count, M, X: tl.constexpr, BLOCK_ROWS: tl.constexpr,
                 PAD: tl.constexpr):
    """The tiles of experts with ``rows_X`` rows: every ``parts``-th of each expert, from its ``part``-th on.

    Example: rows [3, 0, 1], BLOCK_ROWS 2: tiles [2, 0, 1] start at 0, 2, 2 and rows at 0, 3, 3. Expert 0 writes row 0
    to tile 0 and row 2 to tile 1, expert 2 row 3 to tile 2; from tile 3 on there is -1.
    """
    expert_X = tl.arange(0, X)
    tiles_X = (rows_X + BLOCK_ROWS - 1) // BLOCK_ROWS
    tile_X = tl.cumsum(tiles_X, 0) - tiles_X
    row_X = tl.cumsum(rows_X, 0) - rows_X
    count = tl.sum(tiles_X, 0)
    for tile in range(part, tl.max(tiles_X, 0), parts):
        tl.store(tile_expert + tile_X + tile, expert_X, mask=tile < tiles_X)
        tl.store(tile_row + tile_X + tile, row_X + tile * BLOCK_ROWS, mask=tile < tiles_X)
    for first in range(count + part * PAD, M, parts * PAD):
        tile_P = first + tl.arange(0, PAD)
        tl.store(tile_expert + tile_P, -1, mask=tile_P < M)
        tl.store(tile_row + tile_P, -1, mask=tile_P < M)
    if part == 0:
        tl.store(tile_count, count)


@triton.jit(do_not_specialize=["rows", "M", "capacity", "known"])
def small_kernel(
    ids, table, keep, order, place, ends, tile_expert, tile_row, tile_count, dropped, served_before, limited,
    rows, M, known, capacity, E: tl.constexpr, X: tl.constexpr, SLOTS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    SLOT_FIRST: tl.constexpr, HAS_TABLE: tl.constexpr, HAS_KEEP: tl.constexpr, LIMIT: tl.constexpr,
    LIMITED: tl.constexpr, B: tl.constexpr, ONE_BLOCK: tl.constexpr, PAD: tl.constexpr, PDL: tl.constexpr,
    EARLY: tl.constexpr,
):
    """place[p] = |{q: e(q) < e(p)}| + |{q < p: e(q) = e(p)}|, order its inverse; program e writes the pairs of e.

    Programs 0..E-1 are the experts', program E that of pairs nobody takes; those after it list tiles.

    Example: e = [1, 0, 1, 2, 0, 1], E 2. Program 1 counts two pairs of expert 0 and writes order[2, 3, 4] = 0, 2, 5,
    place[0, 2, 5] = 2, 3, 4 and ends[1] = 5; program 2 writes order[5] = 3 and place[3] = -1.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    inside_B = tl.arange(0, B)
    if program <= E:
        if ONE_BLOCK:
            pair_B, expert_B = _experts_of(
                ids, table, keep, inside_B, rows, known, E, SLOTS, SLOT_FIRST, HAS_TABLE, HAS_KEEP)
            if PDL and not EARLY:
                tl.extra.cuda.gdc_launch_dependents()
            before = tl.sum((expert_B < program).to(tl.int32), 0)
            mine_B = expert_B == program
            position_B = before + tl.cumsum(mine_B.to(tl.int32), 0) - 1
            _put(pair_B, program, position_B, before, mine_B, order, place, limited, capacity, E, LIMIT)
            after = before + tl.sum(mine_B.to(tl.int32), 0)
        else:
            lower_B = tl.zeros([B], tl.int32)
            for first in range(0, rows * SLOTS, B):
                _pair_B, expert_B = _experts_of(
                    ids, table, keep, first + inside_B, rows, known, E, SLOTS, SLOT_FIRST, HAS_TABLE, HAS_KEEP)
                lower_B += (expert_B < program).to(tl.int32)
            if PDL and not EARLY:
                tl.extra.cuda.gdc_launch_dependents()
            before = tl.sum(lower_B, 0)
            after = before
            for first in range(0, rows * SLOTS, B):
                pair_B, expert_B = _experts_of(
                    ids, table, keep, first + inside_B, rows, known, E, SLOTS, SLOT_FIRST, HAS_TABLE, HAS_KEEP)
                mine_B = expert_B == program
                position_B = after + tl.cumsum(mine_B.to(tl.int32), 0) - 1
                _put(pair_B, program, position_B, before, mine_B, order, place, limited, capacity, E, LIMIT)
                after += tl.sum(mine_B.to(tl.int32), 0)
        if program == E:
            _note_served(before, served_before, dropped, LIMIT, LIMITED)
        elif not LIMIT:
            tl.store(ends + program, after)
    else:
        rows_X = tl.zeros([X], tl.int32)
        for first in range(0, rows * SLOTS, B):
            _pair_B, expert_B = _experts_of(
                ids, table, keep, first + inside_B, rows, known, E, SLOTS, SLOT_FIRST, HAS_TABLE, HAS_KEEP)
            rows_X += tl.histogram(expert_B, X, mask=expert_B < E)
        if PDL and not EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        part, parts = program - E - 1, tl.num_programs(0) - E - 1
        _write_tiles(rows_X, part, parts, tile_expert, tile_row, tile_count, M, X, BLOCK_ROWS, PAD)


@triton.jit(do_not_specialize=["rows", "known"])
def count_kernel(
    ids, table, keep, ranked, lower, rows, known, E: tl.constexpr, X: tl.constexpr, SLOTS: tl.constexpr,
    SLOT_FIRST: tl.constexpr, HAS_TABLE: tl.constexpr, HAS_KEEP: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr,
):
    """lower[b, e] = pairs of block b with an expert below e, for e = 0..E + 1; ranked[i] = expert x B + rank of the
    i-th pair to arrive, where rank = pairs of its expert and block that came before.

    Ranks compare every pair of the block with every other: on 132 SMs that is less work than sorting the block.

    Example: B 4, E 2, experts [1, 0, 1, 2, 0, 1]: lower [[0, 1, 3, 4], [0, 1, 2, 2]], ranks [0, 0, 1, 0, 0, 0].
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(0)
    inside_B = tl.arange(0, B)
    arrival_B = block * B + inside_B
    _pair_B, expert_B = _experts_of(ids, table, keep, arrival_B, rows, known, E, SLOTS, SLOT_FIRST, HAS_TABLE, HAS_KEEP)
    earlier_BB = (expert_B[:, None] == expert_B[None, :]) & (inside_B[:, None] < inside_B[None, :])
    rank_B = tl.sum(earlier_BB.to(tl.int32), 0)
    tl.store(ranked + arrival_B, expert_B * B + rank_B, mask=arrival_B < rows * SLOTS)
    at_X = lower + block * (E + 2) + tl.arange(0, X)
    count_X = tl.histogram(expert_B, X, mask=expert_B < E)
    tl.store(at_X, tl.cumsum(count_X, 0) - count_X, mask=tl.arange(0, X) < E)
    tl.store(lower + block * (E + 2) + E, tl.sum(count_X, 0))
    tl.store(lower + block * (E + 2) + E + 1, tl.minimum(rows * SLOTS - block * B, B))


@triton.jit
def _lower_of(lower, block_C, expert_W, blocks, E: tl.constexpr):
    """Rows ``block_C`` of ``lower`` for experts and for those after them: counts below, counts up to them."""
    real_CW = (block_C < blocks)[:, None] & (expert_W <= E)[None, :]
    at_CW = lower + block_C[:, None] * (E + 2) + expert_W[None, :]
    return tl.load(at_CW, mask=real_CW, other=0), tl.load(at_CW + 1, mask=real_CW, other=0), real_CW


@triton.jit(do_not_specialize=["blocks"])
def scan_kernel(
    lower, starts, ends, dropped, served_before, blocks, E: tl.constexpr, LIMIT: tl.constexpr, LIMITED: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, PDL: tl.constexpr,
):
    """starts[b, e] = |pairs of lower experts| + |pairs of e in earlier blocks|, for W experts, and their ends.

    Example: lower [[0, 1, 3, 4], [0, 1, 2, 2]]: pairs of lower experts [0, 2, 5], pairs per block [[1, 2, 1],
    [1, 1, 0]]: starts [[0, 2, 5], [1, 4, 6]], ends [2, 5].
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert_W = tl.program_id(0) * W + tl.arange(0, W)
    start_W = tl.zeros([W], tl.int32)
    for first in range(0, blocks, C):
        below_CW, _, _ = _lower_of(lower, first + tl.arange(0, C), expert_W, blocks, E)
        start_W += tl.sum(below_CW, 0)
    if tl.program_id(0) == E // W:
        _note_served(tl.sum(tl.where(expert_W == E, start_W, 0), 0), served_before, dropped, LIMIT, LIMITED)
    for first in range(0, blocks, C):
        block_C = first + tl.arange(0, C)
        below_CW, up_to_CW, real_CW = _lower_of(lower, block_C, expert_W, blocks, E)
        count_CW = up_to_CW - below_CW
        start_CW = start_W[None, :] + tl.cumsum(count_CW, 0) - count_CW
        tl.store(starts + block_C[:, None] * (E + 1) + expert_W[None, :], start_CW, mask=real_CW)
        start_W += tl.sum(count_CW, 0)
    tl.store(ends + expert_W, start_W, mask=expert_W < E)


@triton.jit(do_not_specialize=["rows", "M", "capacity", "placing"])
def place_kernel(
    ranked, starts, ends, order, place, tile_expert, tile_row, tile_count, limited, rows, M, capacity, placing,
    E: tl.constexpr, X: tl.constexpr, SLOTS: tl.constexpr, BLOCK_ROWS: tl.constexpr, SLOT_FIRST: tl.constexpr,
    LIMIT: tl.constexpr, B: tl.constexpr, N: tl.constexpr, PAD: tl.constexpr, PDL: tl.constexpr,
):
    """position = starts[b, e] + rank, for N pairs of blocks of B; the programs from ``placing`` on list tiles.

    Example: ranked pair 5 of block 1 with expert 1 and rank 0, starts [[0, 2, 5], [1, 4, 6]]: order[4] = 5.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    if program < placing:
        arrival_N = program * N + tl.arange(0, N)
        inside_N = arrival_N < rows * SLOTS
        ranked_N = tl.load(ranked + arrival_N, mask=inside_N, other=0)
        expert_N = ranked_N // B
        start_N = tl.load(starts + arrival_N // B * (E + 1) + expert_N, mask=inside_N, other=0)
        first_N = tl.zeros([N], tl.int32)
        if LIMIT:
            first_N = tl.load(starts + expert_N, mask=inside_N, other=0)
        pair_N = arrival_N
        if SLOT_FIRST:
            pair_N = arrival_N % rows * SLOTS + arrival_N // rows
        _put(pair_N, expert_N, start_N + ranked_N % B, first_N, inside_N, order, place, limited, capacity, E, LIMIT)
    else:
        expert_X = tl.arange(0, X)
        end_X = tl.load(ends + expert_X, mask=expert_X < E, other=0)
        start_X = tl.load(ends + expert_X - 1, mask=(expert_X > 0) & (expert_X < E), other=0)
        part, parts = program - placing, tl.num_programs(0) - placing
        _write_tiles(end_X - start_X, part, parts, tile_expert, tile_row, tile_count, M, X, BLOCK_ROWS, PAD)
