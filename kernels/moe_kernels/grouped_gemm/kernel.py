"""Rows grouped by expert times each expert's matrix, on Hopper: gathered rows in, scattered rows out, no copies.

One tile is ``BLOCK_M`` rows of one expert times ``BLOCK_N`` output columns. Weights come through TMA, gathered rows
through cp.async (Hopper's TMA cannot gather rows), rows that already lie grouped through TMA too. Tiles that share
rows and weights run next to each other, so both are read from HBM about once.
Legend: S pairs, N grouped rows, K slots, E experts, O output columns, I input columns, M row tiles.
"""

import triton
import triton.language as tl

from moe_kernels.activations.kernel import activate


@triton.jit
def tile_of(pid, row_tiles, COLUMN_TILES, GROUP_M: tl.constexpr):
    """Row tile and column tile of a program: rows fastest within bands of GROUP_M row tiles.

    Example: GROUP_M 2, 3 row tiles, 2 column tiles: (0,0) (1,0) (0,1) (1,1) (2,0) (2,1).
    """
    band = pid // (GROUP_M * COLUMN_TILES)
    first = band * GROUP_M
    height = tl.minimum(row_tiles - first, GROUP_M)
    inside = pid - first * COLUMN_TILES
    return first + inside % height, inside // height


@triton.jit
def source_rows(order_S, rows, ROWS: tl.constexpr, SLOTS: tl.constexpr):
    """Stored rows behind grouped rows. ``rows`` must be rows that some expert owns.

    Example: order ``[2, 0, 3, 1]``, SLOTS 2: grouped row 2 is pair 3, token 1.
    """
    if ROWS == "token":
        return tl.load(order_S + rows) // SLOTS
    elif ROWS == "pair":
        return tl.load(order_S + rows)
    else:
        tl.static_assert(ROWS == "grouped", "unknown layout of rows")
        return rows


@triton.jit
def _weight_tile(w, expert, row, column, stride_e, stride_o, O, I,
                 BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TRANSPOSE: tl.constexpr, TMA: tl.constexpr,
                 EVEN: tl.constexpr):
    """``[BLOCK_K, BLOCK_N]`` of w[expert]^T, or of w[expert] itself if TRANSPOSE.

    ``row`` counts the stored rows of the expert (0..O), ``column`` the stored columns (0..I).
    """
    if TMA:
        tile = w.load([expert * O + row, column])
    else:
        if TRANSPOSE:
            rows = row + tl.arange(0, BLOCK_K)
            columns = column + tl.arange(0, BLOCK_N)
        else:
            rows = row + tl.arange(0, BLOCK_N)
            columns = column + tl.arange(0, BLOCK_K)
        at = w + expert.to(tl.int64) * stride_e + rows.to(tl.int64)[:, None] * stride_o + columns[None, :]
        if EVEN:
            tile = tl.load(at)
        else:
            tile = tl.load(at, mask=(rows < O)[:, None] & (columns < I)[None, :], other=0.0)
    if TRANSPOSE:
        return tile
    else:
        return tile.T


@triton.jit
def _grouped_gemm_tile(
    pid, row_tiles, x, w, out, order_S, ends_E, tile_expert_M, tile_row_M, bias, row_scale,
    stride_x, stride_e, stride_o, stride_out, stride_bias, O, I, WIDTH, COLUMN_TILES, first_expert,
    SLOTS: tl.constexpr, GATHER: tl.constexpr, SCATTER: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, TRANSPOSE: tl.constexpr, X_TMA: tl.constexpr, W_TMA: tl.constexpr,
    EVEN: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    row_tile, column_tile = tile_of(pid, row_tiles, COLUMN_TILES, GROUP_M)
    expert = tl.load(tile_expert_M + row_tile)
    matrix = expert - first_expert
    first = tl.load(tile_row_M + row_tile)
    end = tl.load(ends_E + expert)
    column = column_tile * BLOCK_N
    # The reduction runs over I, or over O where the transposed weight is used.
    depth = O if TRANSPOSE else I
    rows = first + tl.arange(0, BLOCK_M)
    columns = column + tl.arange(0, BLOCK_N)
    if not X_TMA:
        # Rows past the end repeat the last one, so that no load needs a mask.
        sources = source_rows(order_S, tl.minimum(rows, end - 1), GATHER, SLOTS)
        x_at = x + sources.to(tl.int64)[:, None] * stride_x + tl.arange(0, BLOCK_K)[None, :]
    # Gate and up in one product of twice the width: TMA brings both blocks as one operand, and Hopper's widest matrix
    # instruction reads the rows once for both. Without TMA they are two products.
    JOINED: tl.constexpr = GATED and W_TMA
    acc = tl.zeros((BLOCK_M, 2 * BLOCK_N if JOINED else BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in tl.range(0, depth, BLOCK_K, num_stages=STAGES):
        if X_TMA:
            a = x.load([first, k])
        elif EVEN:
            a = tl.load(x_at + k)
        else:
            a = tl.load(x_at + k, mask=(k + tl.arange(0, BLOCK_K))[None, :] < depth, other=0.0)
        if JOINED:
            b = w.load([matrix, 0, column, k]).reshape(2 * BLOCK_N, BLOCK_K).T
        elif TRANSPOSE:
            b = _weight_tile(w, matrix, k, column, stride_e, stride_o, O, I, BLOCK_N, BLOCK_K, TRANSPOSE, W_TMA, EVEN)
        else:
            b = _weight_tile(w, matrix, column, k, stride_e, stride_o, O, I, BLOCK_N, BLOCK_K, TRANSPOSE, W_TMA, EVEN)
        if UPCAST:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        if GATED and not JOINED:
            c = _weight_tile(w, matrix, WIDTH + column, k, stride_e, stride_o, O, I, BLOCK_N, BLOCK_K, TRANSPOSE,
                             W_TMA, EVEN)
            if UPCAST:
                c = c.to(tl.float32)
            up = tl.dot(a, c, up, input_precision=PRECISION)
    if JOINED:
        acc, up = acc.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1).split()
    inside = columns < WIDTH
    valid = rows < end
    if SCATTER or HAS_SCALE:
        pairs = tl.load(order_S + rows, mask=valid, other=0)
    if HAS_SCALE:
        scale = tl.load(row_scale + pairs, mask=valid, other=0.0)
        acc = acc * scale[:, None]
        up = up * scale[:, None]
    if HAS_BIAS:
        bias_at = bias + expert.to(tl.int64) * stride_bias + columns
        acc += tl.load(bias_at, mask=inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias_at + WIDTH, mask=inside, other=0.0).to(tl.float32)[None, :]
    result = activate(acc, up, ACT).to(out.dtype.element_ty)
    targets = pairs if SCATTER else rows
    out_at = out + targets.to(tl.int64)[:, None] * stride_out + columns[None, :]
    tl.store(out_at, result, mask=valid[:, None] & inside[None, :])


@triton.jit
def grouped_gemm_kernel(
    x, w, out, order_S, ends_E, tile_expert_M, tile_row_M, tile_count_1, bias, row_scale,
    stride_x, stride_e, stride_o, stride_out, stride_bias, O, I, WIDTH, COLUMN_TILES, first_expert, held,
    SLOTS: tl.constexpr, GATHER: tl.constexpr, SCATTER: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, TRANSPOSE: tl.constexpr, X_TMA: tl.constexpr, W_TMA: tl.constexpr,
    PART: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, PROGRAMS: tl.constexpr, PDL: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """out[p] = ACT(scale[p] x[row(p)] w[e]^T + bias[e]) for each grouped row p of expert e.

    PROGRAMS 0: one tile per program. Else that many programs walk all tiles (persistent). PART: w holds ``held``
    experts from ``first_expert`` on; tiles of others are left out.
    GATED: w has WIDTH gate rows and then WIDTH up rows, out WIDTH columns.

    Example: 2 experts, ends ``[1, 3]``, order ``[2, 0, 1]``, K = 1, GATHER "token": grouped row 0 is x[2] times
    expert 0, rows 1 and 2 are x[0] and x[1] times expert 1.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row_tiles = tl.load(tile_count_1)
    if PROGRAMS == 0:
        pid = tl.program_id(0)
        mine = pid < row_tiles * COLUMN_TILES
        if PART:
            row_tile, _ = tile_of(pid, row_tiles, COLUMN_TILES, GROUP_M)
            expert = tl.load(tile_expert_M + row_tile, mask=mine, other=-1)
            mine = mine & (expert >= first_expert) & (expert < first_expert + held)
        if mine:
            _grouped_gemm_tile(
                pid, row_tiles, x, w, out, order_S, ends_E, tile_expert_M, tile_row_M, bias, row_scale,
                stride_x, stride_e, stride_o, stride_out, stride_bias, O, I, WIDTH, COLUMN_TILES, first_expert,
                SLOTS, GATHER, SCATTER, ACT, GATED, HAS_BIAS, HAS_SCALE, TRANSPOSE, X_TMA, W_TMA, EVEN, UPCAST,
                PRECISION, STAGES, GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K,
            )
    else:
        for pid in tl.range(tl.program_id(0), row_tiles * COLUMN_TILES, PROGRAMS, flatten=True):
            _grouped_gemm_tile(
                pid, row_tiles, x, w, out, order_S, ends_E, tile_expert_M, tile_row_M, bias, row_scale,
                stride_x, stride_e, stride_o, stride_out, stride_bias, O, I, WIDTH, COLUMN_TILES, first_expert,
                SLOTS, GATHER, SCATTER, ACT, GATED, HAS_BIAS, HAS_SCALE, TRANSPOSE, X_TMA, W_TMA, EVEN, UPCAST,
                PRECISION, STAGES, GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K,
            )


@triton.jit
def clear_absent_kernel(
    out, order_S, ends_E, pairs, WIDTH,
    LAST: tl.constexpr, SCATTER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Zeros for the grouped rows from ``ends_E[LAST]`` on, which no expert takes; usually there are none.

    Example: ends ``[1, 3]``, 4 pairs, order ``[2, 0, 1, 3]``: row 3 of out becomes 0.
    """
    first = tl.program_id(0) * ROWS
    taken = tl.load(ends_E + LAST)
    if first + ROWS > taken:
        rows = first + tl.arange(0, ROWS)
        absent = (rows >= taken) & (rows < pairs)
        targets = tl.load(order_S + rows, mask=absent, other=0) if SCATTER else rows
        for column in range(0, WIDTH, BLOCK):
            columns = column + tl.arange(0, BLOCK)
            at = out + targets.to(tl.int64)[:, None] * WIDTH + columns[None, :]
            zeros = tl.zeros((ROWS, BLOCK), dtype=out.dtype.element_ty)
            tl.store(at, zeros, mask=absent[:, None] & (columns < WIDTH)[None, :])
