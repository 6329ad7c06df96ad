"""Grouped rows times experts' matrices with the operands swapped: for few rows per expert, and for quantised weights.

The weights fill the 64 rows of Hopper's matrix instruction and the tokens are its columns, as in the small-T launches;
but which rows an expert has comes from a plan. Quantised weights are unpacked into registers, which is where the
instruction may take its first operand from. Legend: S pairs, E experts, I input columns, M row tiles, N weight rows.
"""

import triton
import triton.language as tl

from moe_kernels.activations.kernel import activate
from moe_kernels.grouped_gemm.kernel import source_rows
from moe_kernels.small.tiles_kernel import products, row_of, slot_of


@triton.jit(do_not_specialize=["magic"])
def swapped_gemm_kernel(
    x, w, out, scales, zeros, order_S, ends_E, tile_expert_M, tile_row_M, tile_count_1, bias, row_scale,
    stride_x, stride_out, stride_bias, I, G, WIDTH, magic,
    SLOTS: tl.constexpr, GATHER: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr, OUT_ARRANGED: tl.constexpr, BITS: tl.constexpr, CODES: tl.constexpr,
    GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, HAS_ZEROS: tl.constexpr, MIXED: tl.constexpr, WORDS: tl.constexpr,
    WARPS: tl.constexpr, TMA: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, EVICT_FIRST: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """out[p] = ACT(scale[p] x[row(p)] w[e]^T + bias[e]) for each grouped row p of expert e, w possibly quantised.

    OUT_ARRANGED: columns of out lie as :func:`slot_of` says, for a following product with quantised weights.

    Example: as in ``grouped_gemm_kernel``: 2 experts, ends ``[1, 3]``, order ``[2, 0, 1]``, K = 1: grouped row 0 is
    x[2] times expert 0, rows 1 and 2 are x[0] and x[1] times expert 1.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # Bands of GROUP_M row tiles, rows fastest: neighbours share weights. A division by anything but a constant would
    # take the conversion unit, and start every program late.
    row_tile = tl.program_id(1) * GROUP_M + tl.program_id(0) % GROUP_M
    column_tile = tl.program_id(0) // GROUP_M
    if row_tile < tl.load(tile_count_1):
        expert = tl.load(tile_expert_M + row_tile)
        first = tl.load(tile_row_M + row_tile)
        end = tl.load(ends_E + expert)
        column = column_tile * BLOCK_N
        rows = first + tl.arange(0, BLOCK_M)
        valid = rows < end
        sources = source_rows(order_S, tl.minimum(rows, end - 1), GATHER, SLOTS)
        matrix_row = expert.to(tl.int64) * (2 * WIDTH if GATED else WIDTH) + column
        gate, up = products(
            x, sources, valid, stride_x, w, scales, zeros, magic, matrix_row, WIDTH, WIDTH - column, 0, I, I, G, GATED,
            BITS, CODES, GROUP, SCALE_ROWS, HAS_ZEROS, MIXED, WORDS, WARPS, TMA, EVEN_N, EVEN_K, EVICT_FIRST, UPCAST,
            PRECISION, STAGES, BLOCK_N, BLOCK_M, BLOCK_K,
        )
        columns = column + row_of(tl.arange(0, BLOCK_N), WARPS, WORDS)
        inside = columns < WIDTH
        if HAS_SCALE:
            pairs = tl.load(order_S + rows, mask=valid, other=0)
            scale = tl.load(row_scale + pairs, mask=valid, other=0.0)
            gate *= scale[None, :]
            up *= scale[None, :]
        if HAS_BIAS:
            bias_at = bias + expert.to(tl.int64) * stride_bias + columns
            gate += tl.load(bias_at, mask=inside, other=0.0).to(tl.float32)[:, None]
            if GATED:
                up += tl.load(bias_at + WIDTH, mask=inside, other=0.0).to(tl.float32)[:, None]
        places = slot_of(columns) if OUT_ARRANGED else columns
        out_at = out + rows.to(tl.int64)[None, :] * stride_out + places[:, None]
        result = activate(gate, up, ACT).to(out.dtype.element_ty)
        tl.store(out_at, result, mask=inside[:, None] & valid[None, :])


@triton.jit
def arrange_kernel(x, out, stride_x, D, BLOCK: tl.constexpr):
    """out[t, slot_of(d)] = x[t, d]: the order in which words of quantised weights meet their columns.

    Example: x[t] = 0, 1, 2, ...: out[t] begins 0, 2, 16, 18, 32, 34, 48, 50, 1, 3.
    """
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.program_id(0).to(tl.int64)
    inside = columns < D
    values = tl.load(x + token * stride_x + columns, mask=inside, other=0.0)
    tl.store(out + token * D + slot_of(columns), values, mask=inside)
