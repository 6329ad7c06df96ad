"""What both launches of the small-T layer share: which rows an expert has, and a block of its weights times those rows.

Products run with the operands swapped: the weights' rows fill the 64 rows that Hopper's matrix instruction wants, the
few tokens are its columns, so that 16 tokens cost no more arithmetic than one.
Legend: S pairs (token, slot), K slots, E experts, N a block of the weight's rows, M a block of tokens, I input columns.

Quantised weights are unpacked a 32-bit word at a time, where they lie (WORDS): a thread reads 16 bytes of a row and
turns them into the registers of the matrix instruction, so it holds other columns, and other rows, than the
instruction counts. For rows :func:`row_of` makes up for it at the end; for columns the activations lie in the same
order beforehand, :func:`slot_of`. Unpacking then takes 1.4 instructions per int4 weight, and no exchange between
threads; the H200's bandwidth leaves time for about four. Small floats (E4M3, E2M1) are moved into the fields of a
bfloat16, whose exponent has another bias; one product makes up for it, and for E2M1 it is also the product with the
scale of 32 columns.
"""

import triton
import triton.language as tl

from moe_kernels.quant.decode_kernel import code_values, int4_halves, int8_values, scale_values

RUN = tl.constexpr(128)
"""Input columns in one run of the int4 layout: low nibbles are its first 64 columns, high nibbles the rest."""
WORDS_WIDE = tl.constexpr(16)
"""Words of a row that are unpacked together: four threads times 16 bytes. Loads of wider tiles are laid out over the
threads in a way that no renaming turns into the instruction's."""
E4M3_UNIT = tl.constexpr(0x7B80)
"""2^120 as a bfloat16: 1.0 in E4M3's fields, read as a bfloat16, is 2^-120."""
E2M1_REST = tl.constexpr(2.0**63)
"""E2M1's fields are 2^-126 of their value. Scales make up for 2^63 of it, so that factors are bfloat16s for every scale
from 2^-127 to 2^64; the sums make up for the rest."""


@triton.jit
def local_experts(ids, local, keep, pairs, S, IDS, E, SLOTS: tl.constexpr, HAS_LOCAL: tl.constexpr,
                  HAS_KEEP: tl.constexpr):
    """Expert of each pair in this process, int32; -1 if it is elsewhere, its token is masked out, or it is past S.

    Example: ids ``[5, 2, 9]``, local table ``[-1, -1, 0, -1, -1, 1]``, E 2: ``[1, 0, -1]``.
    """
    inside = pairs < S
    expert = tl.load(ids + pairs, mask=inside, other=-1)
    if HAS_LOCAL:
        known = (expert >= 0) & (expert < IDS)
        expert = tl.load(local + expert, mask=known, other=-1)
    if HAS_KEEP:
        kept = tl.load(keep + pairs // SLOTS, mask=inside, other=0)
        expert = tl.where(kept != 0, expert, -1)
    return tl.where((expert >= 0) & (expert < E), expert, -1).to(tl.int32)


@triton.jit
def slot_of(column):
    """Where a column of activations lies within its run of 64 if the weights it meets are read in WORDS.

    Bits 54 of a column's number name the thread of four that reads its byte, 32 the word, 1 the half of a register, 0
    the register; the matrix instruction expects the same value at bits 320541.
    Example: columns 0, 1, 2, 3, 4, 16, 64 lie at 0, 8, 1, 9, 16, 2, 64.
    """
    word = column // 4 % 4 * 16 + column % 2 * 8
    return column // 64 * 64 + word + column // 16 % 4 * 2 + column // 2 % 2


@triton.jit
def row_of(row, WARPS: tl.constexpr, WORDS: tl.constexpr):
    """Which row of a weight block a row of its product is; the same one unless WORDS.

    Warp w reads rows 8w..8w+7 of every 8 WARPS rows; the instruction counts the octets that a warp read first and
    second as its rows 16w..16w+15. Example: WARPS 4: product rows 0, 8, 16, 64 are rows 0, 32, 8, 64.
    """
    if WORDS:
        block = row // (16 * WARPS) * (16 * WARPS)
        return block + row // 8 % 2 * (8 * WARPS) + row // 16 % WARPS * 8 + row % 8
    else:
        return row


@triton.jit
def _two(bits, minus, DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    """A word's halves as numbers, low half first, less ``minus`` (a word's halves too)."""
    low = (bits & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)
    high = (bits >> 16).to(tl.uint16).to(DTYPE, bitcast=True)
    low_minus = (minus & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)
    high_minus = (minus >> 16).to(tl.uint16).to(DTYPE, bitcast=True)
    if UPCAST:
        return tl.join((low.to(tl.float32) - low_minus.to(tl.float32)).to(DTYPE),
                       (high.to(tl.float32) - high_minus.to(tl.float32)).to(DTYPE))
    else:
        return tl.join(low - low_minus, high - high_minus)


@triton.jit
def _code_pair(word, magic, BITS: tl.constexpr, DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    """Codes in the low bits of a word's halves to ``[..., 2]`` numbers, exactly; ``dequant_triton`` has the argument.

    magic: 0x64006400 (float16) or 0x43004300 (bfloat16), which is no constant on purpose: an instruction can take one
    constant, the mask, so ``word & mask | magic`` is one instruction.
    """
    if BITS == 4:
        bits = (word & 0x000F000F) | magic
        minus = tl.full(word.shape, 0x64086408 if DTYPE == tl.float16 else 0x43084308, tl.uint32)
    elif DTYPE == tl.float16:
        bits = (word & 0x00FF00FF) | magic
        minus = tl.full(word.shape, 0x64806480, tl.uint32)
    else:
        # 7 mantissa bits: the eighth bit of the code chooses between 128 and 256 to subtract.
        bits = (word & 0x007F007F) | magic
        minus = (word & 0x00800080) ^ (magic | 0x00800080)
    return _two(bits, minus, DTYPE, UPCAST)


@triton.jit
def _times(bits, factor, UPCAST: tl.constexpr):
    """A word's halves as bfloat16s, low half first, each times ``factor``. The interpreter converts no subnormal
    bfloat16s, so there they become float32s by their bits.
    """
    if UPCAST:
        low = (bits << 16).to(tl.float32, bitcast=True) * factor.to(tl.float32)
        high = (bits & 0xFFFF0000).to(tl.float32, bitcast=True) * factor.to(tl.float32)
        return tl.join(low.to(tl.bfloat16), high.to(tl.bfloat16))
    else:
        low = (bits & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        high = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        return tl.join(low * factor, high * factor)


@triton.jit
def _float_pair(word, factor, CODES: tl.constexpr, UPCAST: tl.constexpr):
    """Small floats in the low bits of a word's halves to ``[..., 2]`` bfloat16s times ``factor``.

    Example: e2m1 codes 3 (1.5) and 10 (-1.0): fields 0x00C0 and 0x8080, which are 1.5 and -1.0 times 2^-126.
    """
    if CODES == "e4m3":
        bits = ((word & 0x007F007F) << 4) | ((word & 0x00800080) << 8)
    else:
        bits = ((word & 0x00070007) << 6) | ((word & 0x00080008) << 12)
    return _times(bits, factor, UPCAST)


@triton.jit
def _pair(word, magic, factor, BITS: tl.constexpr, CODES: tl.constexpr, DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    if CODES == "int":
        return _code_pair(word, magic, BITS, DTYPE, UPCAST)
    else:
        return _float_pair(word, factor, CODES, UPCAST)


@triton.jit
def _group_factors(two_N, WORDS_N: tl.constexpr):
    """``[N, words]`` bfloat16 factors of E2M1's fields from the E8M0 scales of two groups of 32 columns, the first in
    the low byte: 2^(s - 64). Words 0 to 7 are the first group's.
    """
    first = (((two_N & 0xFF) + 63) << 7).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    second = ((((two_N >> 8) & 0xFF) + 63) << 7).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.where((tl.arange(0, WORDS_N) < WORDS_N // 2)[None, :], first[:, None], second[:, None])


@triton.jit
def _numbers(tile, magic, low_scales, high_scales, BITS: tl.constexpr, CODES: tl.constexpr, WORDS: tl.constexpr,
             WARPS: tl.constexpr, DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    """A stored tile to ``[N, columns]`` of DTYPE; if WORDS in the order of row_of and slot_of. Without scales, but for
    E2M1, whose columns 0..63 have the two groups' scales in each of ``low_scales``, the others in ``high_scales``.
    """
    if BITS == 16:
        return tile
    elif WORDS:
        word = tile.to(tl.uint32, bitcast=True)
        N: tl.constexpr = tile.shape[0]
        factor = tl.full([1, 1], E4M3_UNIT, tl.uint16).to(tl.bfloat16, bitcast=True)
        if CODES == "e2m1":
            factor = _group_factors(low_scales, WORDS_WIDE)
        # [N, words, half, register]: bytes 0 and 2 of a word, then bytes 1 and 3.
        low = tl.join(_pair(word, magic, factor, BITS, CODES, DTYPE, UPCAST),
                      _pair(word >> 8, magic, factor, BITS, CODES, DTYPE, UPCAST))
        # Rows become (block, octet, warp, row), words (thread, word).
        if BITS == 4:
            word = word >> 4
            if CODES == "e2m1":
                factor = _group_factors(high_scales, WORDS_WIDE)
            high = tl.join(_pair(word, magic, factor, BITS, CODES, DTYPE, UPCAST),
                           _pair(word >> 8, magic, factor, BITS, CODES, DTYPE, UPCAST))
            both = tl.join(low, high).reshape(N // (16 * WARPS), 2, WARPS, 8, 4, 4, 2, 2, 2)
            return both.permute(0, 2, 1, 3, 8, 5, 7, 4, 6).reshape(N, 128)
        else:
            low = low.reshape(N // (16 * WARPS), 2, WARPS, 8, 4, 4, 2, 2)
            return low.permute(0, 2, 1, 3, 5, 7, 4, 6).reshape(N, 64)
    elif BITS == 4:
        low, high = int4_halves(tile, DTYPE)
        return tl.join(low, high).permute(0, 2, 1).reshape(tile.shape[0], 2 * tile.shape[1])
    else:
        return int8_values(tile, DTYPE)


@triton.jit
def _spread(parts_NG, COLUMNS: tl.constexpr):
    """[N, G] to [N, COLUMNS], each group's number at all of its columns. Example: 2 groups, 4 columns: a a b b."""
    N: tl.constexpr = parts_NG.shape[0]
    G: tl.constexpr = parts_NG.shape[1]
    return tl.reshape(tl.broadcast_to(parts_NG[:, :, None], [N, G, COLUMNS // G]), [N, COLUMNS])


@triton.jit
def _mixed_numbers(tile, scales, zeros, row, column, scale_ok, G, BITS: tl.constexpr, CODES: tl.constexpr,
                   GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, HAS_ZEROS: tl.constexpr, DTYPE: tl.constexpr):
    """A stored tile of any kind of codes to ``[N, columns]`` of DTYPE with scales: float32 until the last rounding.

    Example: int4, scales 0.5 for columns 0..31 and 2 for 32..63, zero 8, codes 9 everywhere: 0.5 and 2.
    """
    N: tl.constexpr = tile.shape[0]
    COLUMNS: tl.constexpr = tile.shape[1] * 8 // BITS
    codes = tile
    if BITS == 4:
        codes = tl.join(tile & 15, tile >> 4).permute(0, 2, 1).reshape(N, COLUMNS)
    GROUPS: tl.constexpr = COLUMNS // GROUP if GROUP > 0 and GROUP < COLUMNS else 1
    rows = (row + tl.arange(0, N)) // SCALE_ROWS
    groups = (column // GROUP if GROUP > 0 else 0) + tl.arange(0, GROUPS)
    at = rows.to(tl.int64)[:, None] * G + groups[None, :]
    ok = scale_ok[:, None] & (groups < G)[None, :]
    scale = _spread(scale_values(tl.load(scales + at, mask=ok, other=0), CODES), COLUMNS)
    zero = 8.0 if BITS == 4 else 128.0
    if HAS_ZEROS:
        zero = _spread(tl.load(zeros + at, mask=ok, other=0).to(tl.float32), COLUMNS)
    return (code_values(codes, zero, CODES) * scale).to(DTYPE)


@triton.jit
def _weight_tile(w, row, column, rows_left, I, TMA: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
                 EVICT_FIRST: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr):
    """``[BLOCK_N, COLUMNS]`` stored elements of the matrix ``[rows, I]``; zeros past its last column."""
    if TMA:
        return w.load([row.to(tl.int32), column])
    else:
        rows = tl.arange(0, BLOCK_N)
        columns = column + tl.arange(0, COLUMNS)
        at = w + (row + rows)[:, None] * I + columns[None, :]
        policy: tl.constexpr = "evict_first" if EVICT_FIRST else ""
        if EVEN_N and EVEN_K:
            return tl.load(at, eviction_policy=policy)
        else:
            mask = (rows < rows_left)[:, None] & (columns < I)[None, :]
            return tl.load(at, mask=mask, other=0, eviction_policy=policy)


@triton.jit
def _add(acc_NM, weight_NK, x_MK, scale_N, GROUPED: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """acc + weight x^T, the product times the scale of its row if GROUPED."""
    if UPCAST:
        weight_NK = weight_NK.to(tl.float32)
        x_MK = x_MK.to(tl.float32)
    if GROUPED:
        part_NM = tl.dot(weight_NK, x_MK.T, input_precision=PRECISION)
        return acc_NM + part_NM * scale_N.to(tl.float32)[:, None]
    else:
        return tl.dot(weight_NK, x_MK.T, acc_NM, input_precision=PRECISION)


@triton.jit
def _two_pairs(scales_at, pair, G, ok):
    """E8M0 scales of a run of 128 columns: those of its first 64, two to an int16, and those of the others (0 where the
    row ends before). ``scales_at`` ``[N]``: where each row's begin; G: int16s in a row.
    """
    low = tl.load(scales_at + pair, mask=ok & (pair < G), other=0)
    return low, tl.load(scales_at + pair + 1, mask=ok & (pair + 1 < G), other=0)


@triton.jit
def products(
    x, sources_M, valid_M, stride_x, w, scales, zeros, magic, row, up_rows, rows_left, k_from, k_to, I, G,
    GATED: tl.constexpr, BITS: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr,
    HAS_ZEROS: tl.constexpr, MIXED: tl.constexpr, WORDS: tl.constexpr, WARPS: tl.constexpr,
    TMA: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, EVICT_FIRST: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Weight rows times tokens over columns k_from..k_to: ``[BLOCK_N, BLOCK_M]`` float32, scaled; a second one for
    the rows ``up_rows`` further on if GATED. Rows come in the order of :func:`row_of`.

    row: first row in the matrix ``[E * O, I]``; the first ``rows_left`` rows of the block count, the rest hold
    anything. sources_M: rows of x, columns that are not valid_M come out as 0. GROUP: columns per scale, 0 if a row
    has one. G: scales per row. MIXED: any kind of codes and scales, without the shortcuts of those that are unpacked
    by words or in tiles of their own. E2M1 by words has its scales two to an int16.
    Example: w ``[[1, 2], [3, 4]]``, x ``[[10, 20]]``: ``[[50], [110]]``.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    PAIRED: tl.constexpr = WORDS and CODES == "e2m1"
    GROUPED: tl.constexpr = GROUP > 0 and BITS < 16 and not MIXED and not PAIRED
    # Columns per stored element: 1, or those of a byte or a word.
    PACKED: tl.constexpr = 1 if BITS == 16 else (32 if WORDS else 8) // BITS
    STEP: tl.constexpr = WORDS_WIDE * PACKED if WORDS else (RUN if BITS == 4 else BLOCK_K)
    columns = tl.arange(0, STEP)
    # Of a row as it is stored: the last run of 4 bits may be partly padding.
    stored = tl.cdiv(I, RUN) * (RUN // PACKED) if (MIXED or PAIRED) and BITS == 4 else I // PACKED
    x_at = x + sources_M.to(tl.int64)[:, None] * stride_x + columns[None, :]
    gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    scale = valid_M
    scale_up = valid_M
    low_scales = valid_M
    high_scales = valid_M
    low_up = valid_M
    high_up = valid_M
    if BITS < 16:
        rows = row_of(tl.arange(0, BLOCK_N), WARPS, WORDS)
        scale_ok = rows < rows_left
        scales_at = scales + (row + rows) // SCALE_ROWS * G
        up_at = scales + (row + up_rows + rows) // SCALE_ROWS * G if SCALE_ROWS > 1 else scales_at + up_rows * G
        if GROUPED:
            scale = tl.load(scales_at + k_from // GROUP, mask=scale_ok, other=0.0)
            if GATED:
                scale_up = tl.load(up_at + k_from // GROUP, mask=scale_ok, other=0.0)
    if PAIRED:
        # Rows as they are stored: factors meet the words before the product.
        paired = tl.arange(0, BLOCK_N)
        paired_ok = paired < rows_left
        paired_at = scales + (row + paired) * G
        low_scales, high_scales = _two_pairs(paired_at, k_from // 64, G, paired_ok)
        if GATED:
            low_up, high_up = _two_pairs(paired_at + up_rows * G, k_from // 64, G, paired_ok)
    for k in tl.range(k_from, k_to, BLOCK_K, num_stages=STAGES):
        for piece in tl.static_range(BLOCK_K // STEP):
            at = k + piece * STEP
            # Weights first: their copies need not wait for the list of tokens.
            tile = _weight_tile(w, row, at // PACKED, rows_left, stored, TMA, EVEN_N, EVEN_K, EVICT_FIRST, BLOCK_N,
                                STEP // PACKED)
            if GATED:
                tile_up = _weight_tile(w, row + up_rows, at // PACKED, rows_left, stored, TMA, EVEN_N, EVEN_K,
                                       EVICT_FIRST, BLOCK_N, STEP // PACKED)
            if EVEN_K:
                tokens = tl.load(x_at + at, mask=valid_M[:, None], other=0.0)
            else:
                tokens = tl.load(x_at + at, mask=valid_M[:, None] & (at + columns < I)[None, :], other=0.0)
            if GROUPED:
                # The next step's scales travel while this one computes.
                following = (at + STEP) // GROUP
                scale_next = tl.load(scales_at + following, mask=scale_ok & (at + STEP < k_to), other=0.0)
            if PAIRED:
                more = paired_ok & (at + STEP < k_to)
                low_next, high_next = _two_pairs(paired_at, (at + STEP) // 64, G, more)
            if MIXED:
                numbers = _mixed_numbers(tile, scales, zeros, row, at, scale_ok, G, BITS, CODES, GROUP, SCALE_ROWS,
                                         HAS_ZEROS, DTYPE)
            else:
                numbers = _numbers(tile, magic, low_scales, high_scales, BITS, CODES, WORDS, WARPS, DTYPE, UPCAST)
            gate = _add(gate, numbers, tokens, scale, GROUPED, UPCAST, PRECISION)
            if GROUPED:
                scale = scale_next
            if PAIRED:
                low_scales, high_scales = low_next, high_next
            if GATED:
                if GROUPED:
                    scale_next = tl.load(up_at + following, mask=scale_ok & (at + STEP < k_to), other=0.0)
                if PAIRED:
                    low_next, high_next = _two_pairs(paired_at + up_rows * G, (at + STEP) // 64, G, more)
                if MIXED:
                    numbers = _mixed_numbers(tile_up, scales, zeros, row + up_rows, at, scale_ok, G, BITS, CODES,
                                             GROUP, SCALE_ROWS, HAS_ZEROS, DTYPE)
                else:
                    numbers = _numbers(tile_up, magic, low_up, high_up, BITS, CODES, WORDS, WARPS, DTYPE, UPCAST)
                up = _add(up, numbers, tokens, scale_up, GROUPED, UPCAST, PRECISION)
                if GROUPED:
                    scale_up = scale_next
                if PAIRED:
                    low_up, high_up = low_next, high_next
    if BITS < 16 and GROUP == 0 and not MIXED:
        gate *= tl.load(scales_at, mask=scale_ok, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up *= tl.load(scales_at + up_rows, mask=scale_ok, other=0.0).to(tl.float32)[:, None]
    if PAIRED:
        gate *= E2M1_REST
        up *= E2M1_REST
    return gate, up
