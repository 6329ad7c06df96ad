"""Layers whose weights are FP8 in groups of 128 columns, on FP8 tensor cores: activations are rounded to FP8 as well.

Rows are rounded with a scale for each 128 columns of a row, a power of two, before each of both products; a product
multiplies codes by codes, 128 columns at a time, and adds each sum to a float32 one with both scales (DeepSeek-V3's
recipe, section 3.3.2 of its report, but for its scales, which are any floats).
Legend: N rows, S pairs, K slots, E experts, O output columns, I input columns, G groups of 128 columns, M row tiles.
"""

import triton
import triton.language as tl

from moe_kernels.activations.kernel import activate
from moe_kernels.grouped_gemm.kernel import source_rows, tile_of
from moe_kernels.quant.decode_kernel import INTERPRETED

GROUP = tl.constexpr(128)
"""Columns that share a scale, of rows as of weights."""


@triton.jit
def _e4m3(numbers):
    """float32 to the nearest E4M3, half to even. The interpreter drops what the mantissa carries into the exponent, so
    it is given numbers that have a code: rounded to 3 bits of mantissa, below 2^-6 to multiples of 2^-9.
    """
    if INTERPRETED:
        bits = numbers.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        numbers = tl.where(tl.abs(numbers) < 0.015625, (numbers + 24576.0) - 24576.0, normal)
    return numbers.to(tl.float8e4nv)


@triton.jit
def round_rows_kernel(x, codes, scales_GN, rows, stride_x, I, stride_codes, BLOCK: tl.constexpr):
    """codes[n, i] = e4m3(x[n, i] / s), s = scales[g, n] the least power of two with which row n's group g fits into
    448; codes past column I are 0. A group of zeros has the least normal number. NaN or infinity makes its scale NaN.

    Example: a group's largest magnitude 450 has scale 2: 450 becomes 224, the code of 225's nearest number.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    inside = row < rows
    at = x + row.to(tl.int64)[:, None] * stride_x + column[None, :]
    numbers = tl.load(at, mask=inside[:, None] & (column < I)[None, :], other=0.0).to(tl.float32)
    # Magnitudes order as their bits do, those of infinity and NaN above all. 448 is 1.75 x 2^8: what exceeds 1.75 in
    # the mantissa carries into the exponent.
    largest = tl.max(numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    exponent = tl.maximum(((largest + 0x1FFFFF) >> 23) - 8, 1)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    scale = tl.where(largest < 0x7F800000, exponent << 23, 0x7FC00000).to(tl.float32, bitcast=True)
    code = _e4m3(numbers * inverse[:, None])
    tl.store(codes + row.to(tl.int64)[:, None] * stride_codes + column[None, :], code, mask=inside[:, None])
    tl.store(scales_GN + tl.program_id(1).to(tl.int64) * rows + row, scale, mask=inside)


@triton.jit
def _row_scales(scales, matrix_row, k, G, rows_left, SCALE_ROWS: tl.constexpr, UNIFORM: tl.constexpr,
                BLOCK_N: tl.constexpr):
    """Of the weight rows from ``matrix_row`` on, at columns from k on: one number if UNIFORM, else ``[1, BLOCK_N]``."""
    if UNIFORM:
        return tl.load(scales + (matrix_row // SCALE_ROWS) * G + k // GROUP).to(tl.float32)
    else:
        rows = tl.arange(0, BLOCK_N)
        at = scales + ((matrix_row + rows) // SCALE_ROWS) * G + k // GROUP
        return tl.load(at, mask=rows < rows_left, other=0.0).to(tl.float32)[None, :]


@triton.jit
def rounded_gemm_kernel(
    x, x_scales_GN, w, w_scales, out, order_S, ends_E, tile_expert_M, tile_row_M, tile_count_1, bias, row_scale,
    rows_x, stride_x, stride_out, stride_bias, I, G, WIDTH, COLUMN_TILES,
    SLOTS: tl.constexpr, GATHER: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr, SCALE_ROWS: tl.constexpr, UNIFORM: tl.constexpr, STAGES: tl.constexpr,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """out[p] = ACT(scale[p] x[row(p)] w[e]^T + bias[e]) for each grouped row p of expert e, both as codes and scales.

    x: as :func:`round_rows_kernel` leaves it, ``rows_x`` rows. UNIFORM: the rows of a tile share their scales.

    Example: as in ``grouped_gemm_kernel``: 2 experts, ends ``[1, 3]``, order ``[2, 0, 1]``, K = 1: grouped row 0 is
    x[2] times expert 0, rows 1 and 2 are x[0] and x[1] times expert 1.
    """
    row_tiles = tl.load(tile_count_1)
    if tl.program_id(0) < row_tiles * COLUMN_TILES:
        row_tile, column_tile = tile_of(tl.program_id(0), row_tiles, COLUMN_TILES, GROUP_M)
        expert = tl.load(tile_expert_M + row_tile)
        first = tl.load(tile_row_M + row_tile)
        end = tl.load(ends_E + expert)
        column = column_tile * BLOCK_N
        rows = first + tl.arange(0, BLOCK_M)
        valid = rows < end
        # Rows past the end repeat the last one, so that no load needs a mask.
        sources = source_rows(order_S, tl.minimum(rows, end - 1), GATHER, SLOTS)
        x_at = x + sources.to(tl.int64)[:, None] * stride_x + tl.arange(0, GROUP)[None, :]
        x_scales_at = x_scales_GN + sources
        matrix_row = expert * (2 * WIDTH if GATED else WIDTH) + column
        rows_left = WIDTH - column
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(0, I, GROUP, num_stages=STAGES):
            tile = tl.load(x_at + k)
            x_scale = tl.load(x_scales_at)[:, None]
            x_scales_at += rows_x
            sums = tl.dot(tile, w.load([matrix_row, k]).T)
            scale = x_scale * _row_scales(w_scales, matrix_row, k, G, rows_left, SCALE_ROWS, UNIFORM, BLOCK_N)
            if GATED:
                # Before the first sums are used: both products are under way at once.
                below = matrix_row + WIDTH
                sums_up = tl.dot(tile, w.load([below, k]).T)
                scale_up = x_scale * _row_scales(w_scales, below, k, G, rows_left, SCALE_ROWS, UNIFORM, BLOCK_N)
                up += sums_up * scale_up
            gate += sums * scale
        columns = column + tl.arange(0, BLOCK_N)
        inside = columns < WIDTH
        if HAS_SCALE:
            pairs = tl.load(order_S + rows, mask=valid, other=0)
            scale = tl.load(row_scale + pairs, mask=valid, other=0.0)[:, None]
            gate *= scale
            up *= scale
        if HAS_BIAS:
            bias_at = bias + expert.to(tl.int64) * stride_bias + columns
            gate += tl.load(bias_at, mask=inside, other=0.0).to(tl.float32)[None, :]
            if GATED:
                up += tl.load(bias_at + WIDTH, mask=inside, other=0.0).to(tl.float32)[None, :]
        out_at = out + rows.to(tl.int64)[:, None] * stride_out + columns[None, :]
        result = activate(gate, up, ACT).to(out.dtype.element_ty)
        tl.store(out_at, result, mask=valid[:, None] & inside[None, :])
