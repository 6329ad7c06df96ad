"""Few rows times a quantised matrix, whose codes become numbers in registers.

The operands are swapped: rows of the weight fill the matrix instruction's first operand, which may come from registers,
and rows of x are its columns. A piece is so many columns that lie next to each other in what is loaded: in 4 bits the
run of 128 gives two pieces, its low and its high nibbles, which meet their columns of x without an exchange between
threads. Where a group has all columns of a piece the codes are multiplied as whole numbers, or as FP8's, exactly, and
the sums are scaled. Columns of the weight may be divided among programs, whose sums a second launch adds in order.
Legend: T and M rows, O and N output columns, I input columns, G groups of a row, C columns of a piece.
"""

import triton
import triton.language as tl

from moe_kernels.quant.decode_kernel import _minus, code_values, int8_values, scale_values

RUN = tl.constexpr(128)
HALF = tl.constexpr(64)


@triton.jit
def _exact(code, zero, BITS: tl.constexpr, CODES: tl.constexpr, HAS_ZEROS: tl.constexpr, DTYPE: tl.constexpr):
    """Codes of 8 bits, or nibbles, to numbers of DTYPE, exactly; of FP8 a 256th, to be made up for by the scale.

    zero: [N, 1], or anything without HAS_ZEROS. In 4 bits and 16-bit types code and zero point are or-ed into numbers
    whose last place is worth 1, as ``decode_kernel`` says.
    Example: e4m3 0x38 is 1.0: 0x1C00 as a float16 is 2^-8. Nibble 3, zero point 8, bfloat16: 131 less 136.
    """
    wide = code.to(tl.uint16)
    if CODES == "e4m3":
        return (((wide & 0x7F) << 7) | ((wide & 0x80) << 8)).to(tl.float16, bitcast=True).to(DTYPE)
    elif BITS == 4 and DTYPE != tl.float32:
        unit: tl.constexpr = 0x6400 if DTYPE == tl.float16 else 0x4300
        middle = zero.to(tl.uint16) if HAS_ZEROS else tl.full((1, 1), 8, tl.uint16)
        return _minus(wide | unit, tl.broadcast_to(middle | unit, wide.shape), DTYPE)
    elif HAS_ZEROS or BITS == 4:
        return code_values(code, zero.to(tl.float32) if HAS_ZEROS else 8.0, "int").to(DTYPE)
    else:
        return int8_values(code, DTYPE)


@triton.jit
def _scales(parts, rows, inside, column, G, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, C: tl.constexpr):
    """Scales or zero points as they are stored, ``[N, 1]`` or one for each of C columns, from ``column`` on."""
    GROUPS: tl.constexpr = C // GROUP if GROUP > 0 and GROUP < C else 1
    groups = (column // GROUP if GROUP > 0 else 0) + tl.arange(0, GROUPS)
    at = (rows // SCALE_ROWS).to(tl.int64)[:, None] * G + groups[None, :]
    found = tl.load(parts + at, mask=inside[:, None] & (groups < G)[None, :], other=0)
    if GROUPS == 1:
        return found
    else:
        N: tl.constexpr = found.shape[0]
        return tl.reshape(tl.broadcast_to(found[:, :, None], [N, GROUPS, C // GROUPS]), [N, C])


@triton.jit
def _piece(
    acc_NM, code, x, scales, zeros, rows, inside, at_M, valid_M, column, I, G, BITS: tl.constexpr, CODES: tl.constexpr,
    GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, HAS_ZEROS: tl.constexpr, EVEN_K: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr, C: tl.constexpr,
):
    """acc + codes [N, C] of the columns from ``column`` on times x^T, scaled."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    WHOLE: tl.constexpr = (GROUP == 0 or GROUP >= C) and CODES != "e2m1"
    columns = column + tl.arange(0, C)
    mask = valid_M[:, None] if EVEN_K else valid_M[:, None] & (columns < I)[None, :]
    x_MC = tl.load(x + at_M[:, None] + columns[None, :], mask=mask, other=0.0)
    zero = valid_M
    if HAS_ZEROS:
        zero = _scales(zeros, rows, inside, column, G, GROUP, SCALE_ROWS, C)
    scale = scale_values(_scales(scales, rows, inside, column, G, GROUP, SCALE_ROWS, C), CODES)
    if WHOLE:
        number_NC = _exact(code, zero, BITS, CODES, HAS_ZEROS, DTYPE)
        scale = scale * 256.0 if CODES == "e4m3" else scale
    else:
        middle = zero.to(tl.float32) if HAS_ZEROS else (8.0 if BITS == 4 else 128.0)
        number_NC = (code_values(code, middle, CODES) * scale).to(DTYPE)
    if UPCAST:
        number_NC = number_NC.to(tl.float32)
        x_MC = x_MC.to(tl.float32)
    if WHOLE:
        return acc_NM + tl.dot(number_NC, x_MC.T, input_precision=PRECISION) * scale
    else:
        return tl.dot(number_NC, x_MC.T, acc_NM, input_precision=PRECISION)


@triton.jit
def quantised_linear_kernel(
    x, w, scales, zeros, bias, out, stride_x, T, O, I, G, depth,
    HAS_BIAS: tl.constexpr, BITS: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr,
    HAS_ZEROS: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """out[p, t] = x[t] w^T over columns p * depth .. (p + 1) * depth - 1, + bias if there is one, in out's dtype.

    Example: w ``[[1, 2], [3, 4]]``, x ``[[10, 20]]``, depth 1: out ``[[[10, 30]], [[40, 80]]]``.
    """
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows_of_x = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    part = tl.program_id(2)
    inside, valid_M = rows < O, rows_of_x < T
    at_M = tl.minimum(rows_of_x, T - 1).to(tl.int64) * stride_x
    BYTES: tl.constexpr = HALF if BITS == 4 else BLOCK_K
    stored = tl.cdiv(I, RUN) * HALF if BITS == 4 else I
    byte = tl.arange(0, BYTES)
    row_at = w + rows.to(tl.int64)[:, None] * stored + byte[None, :]
    acc_NM = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for column in tl.range(part * depth, tl.minimum((part + 1) * depth, I), BLOCK_K, num_stages=STAGES):
        first = column // 2 if BITS == 4 else column
        if EVEN_N and (EVEN_K or BITS == 4):
            code = tl.load(row_at + first)
        else:
            code = tl.load(row_at + first, mask=inside[:, None] & (first + byte < stored)[None, :], other=0)
        if BITS == 4:
            acc_NM = _piece(
                acc_NM, code & 15, x, scales, zeros, rows, inside, at_M, valid_M, column, I, G, BITS, CODES, GROUP,
                SCALE_ROWS, HAS_ZEROS, EVEN_K, UPCAST, PRECISION, BYTES,
            )
            acc_NM = _piece(
                acc_NM, code >> 4, x, scales, zeros, rows, inside, at_M, valid_M, column + HALF, I, G, BITS, CODES,
                GROUP, SCALE_ROWS, HAS_ZEROS, EVEN_K, UPCAST, PRECISION, BYTES,
            )
        else:
            acc_NM = _piece(
                acc_NM, code, x, scales, zeros, rows, inside, at_M, valid_M, column, I, G, BITS, CODES, GROUP,
                SCALE_ROWS, HAS_ZEROS, EVEN_K, UPCAST, PRECISION, BYTES,
            )
    if HAS_BIAS:
        acc_NM += tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)[:, None]
    at = out + (part.to(tl.int64) * T + rows_of_x)[None, :] * O + rows[:, None]
    tl.store(at, acc_NM.to(out.dtype.element_ty), mask=inside[:, None] & valid_M[None, :])


@triton.jit
def sum_products_kernel(parts, bias, out, size, O, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """out[t, o] = the sum of parts[p, t, o], p = 0 first, + bias[o]; ``size`` is T x O.

    Example: parts ``[[[10, 30]], [[40, 80]]]``, bias ``[1, 2]``: ``[[51, 112]]``.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.load(parts + at, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * size + at, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + at % O, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
