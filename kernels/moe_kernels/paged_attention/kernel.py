"""Kernels of :mod:`moe_kernels.paged_attention.op`: programs that go through a work list, then a merge of parts.

How many programs run, and all sizes, depend on the tiling and the room of the list alone: a CUDA graph holds a launch
while the list changes. The list's format: :mod:`moe_kernels.paged_attention.planner`.
Legend: as in :mod:`moe_kernels.paged_attention.op`; a line is a query head of a row: M lines of a tile, the G heads of
a row next to each other, L positions.
"""

import triton
import triton.language as tl

from moe_kernels.paged_attention import planner, trees

HEADER = tl.constexpr(planner.HEADER)
ITEM = tl.constexpr(planner.ITEM)
MERGED = tl.constexpr(planner.MERGED)
SEEN = tl.constexpr(trees.SEEN)
MOST = tl.constexpr(trees.MOST)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def unit_of(turn, program, programs):
    """Which unit a program takes in its ``turn``: there and back, so that who had the longest of a turn has the
    shortest of the next.

    Example: 3 programs: program 0 takes units 0, 5, 6, 11; program 2 takes 2, 3, 8, 9.
    """
    return turn * programs + tl.where(turn % 2 == 0, program, programs - 1 - program)


@triton.jit
def capped(score, cap):
    """cap x tanh(score / cap)."""
    faded = tl.exp2(score * (-2.0 * LOG2_E / cap))
    return cap * ((1.0 - faded) / (1.0 + faded))


@triton.jit
def in_tree(position_L, first_M, known_M, low_M, high_M):
    """Whether a line sees a place: one that is known, from its first one on, or that of an ancestor, by the bits of two
    words (:mod:`moe_kernels.paged_attention.trees`).

    Example: known 3, low 0b101: places up to 2, 3 and 5.
    """
    node_ML = position_L[None, :] - known_M[:, None]
    word_ML = tl.where(node_ML < 32, low_M[:, None], high_M[:, None])
    ancestor_ML = (node_ML >= 0) & (node_ML < MOST) & ((word_ML >> (node_ML & 31) & 1) == 1)
    return ancestor_ML | ((node_ML < 0) & (position_L[None, :] >= first_M[:, None]))


@triton.jit
def look(
    at, top_M, total_M, sum_MH, q_MH, position_M, known_M, low_M, high_M, k, v, blocks, oldest, end, window, head,
    scale, cap, J,
    H: tl.constexpr, B: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_L: tl.constexpr, SOFTCAP: tl.constexpr,
    EDGE: tl.constexpr, TREES: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The tile's lines meet the positions from ``at`` on, by online softmax (Milakov and Gimelshein 2018) in base 2.
    Without ``EDGE`` every line sees all of them. Positions outside of ``oldest .. end`` are not read. No line sees
    them: ``end`` is the end of a tile or of what the last row sees. With ``TREES`` ``position_M`` is the first place
    that a line sees.
    """
    position_L, columns = at + tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_H)
    read_L = (position_L < end) & (position_L >= oldest)
    held_H = columns < H
    if EDGE:
        block_L = tl.load(blocks + position_L // B, mask=read_L, other=0).to(tl.int64)
    else:
        block_L = tl.load(blocks + position_L // B).to(tl.int64)
    row_L = ((block_L * B + position_L % B) * J + head) * H
    k_at, v_at = k + row_L[None, :] + columns[:, None], v + row_L[:, None] + columns[None, :]
    if EDGE:
        k_HL = tl.load(k_at, mask=read_L[None, :] & held_H[:, None], other=0.0)
    elif H < BLOCK_H:
        k_HL = tl.load(k_at, mask=held_H[:, None], other=0.0)
    else:
        k_HL = tl.load(k_at)
    score_ML = tl.dot(q_MH, k_HL.to(DTYPE), input_precision="ieee") * scale
    if SOFTCAP:
        score_ML = capped(score_ML, cap)
    score_ML *= LOG2_E
    if EDGE:
        if TREES:
            seen_ML = in_tree(position_L, position_M, known_M, low_M, high_M)
        else:
            seen_ML = (position_L[None, :] <= position_M[:, None])
            seen_ML &= (position_L[None, :] > position_M[:, None] - window)
        score_ML = tl.where(seen_ML, score_ML, float("-inf"))
    higher_M = tl.maximum(top_M, tl.max(score_ML, axis=1))
    base_M = tl.where(higher_M == float("-inf"), 0.0, higher_M) if EDGE else higher_M
    weight_ML = tl.exp2(score_ML - base_M[:, None])
    fade_M = tl.exp2(top_M - base_M)
    if EDGE:
        v_LH = tl.load(v_at, mask=read_L[:, None] & held_H[None, :], other=0.0)
    elif H < BLOCK_H:
        v_LH = tl.load(v_at, mask=held_H[None, :], other=0.0)
    else:
        v_LH = tl.load(v_at)
    sum_MH = sum_MH * fade_M[:, None]
    sum_MH += tl.dot(weight_ML.to(DTYPE), v_LH.to(DTYPE), input_precision="ieee")
    return higher_M, total_M * fade_M + tl.sum(weight_ML, axis=1), sum_MH


@triton.jit
def attend(
    q, k, v, blocks_SM, item, head, sinks, seen, out, sums, logs, scale, cap, window, stride_t, stride_n, stride_m, J,
    G: tl.constexpr, H: tl.constexpr, B: tl.constexpr, LINES: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_L: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, INNER: tl.constexpr, TREES: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """One item and key head. With ``INNER`` tiles that every line sees as a whole go without masks, before the rest."""
    row, rows, position = tl.load(item + 1).to(tl.int64), tl.load(item + 2), tl.load(item + 3)
    begin, end, slot = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6).to(tl.int64)
    blocks = blocks_SM + tl.load(item).to(tl.int64) * stride_m
    line_M, columns = tl.arange(0, LINES), tl.arange(0, BLOCK_H)
    row_M, head_M = line_M // G, head * G + line_M % G
    asked_M, position_M = line_M < rows * G, position + row_M
    asked_MH = asked_M[:, None] & (columns < H)[None, :]
    q_at = q + (row + row_M)[:, None] * stride_t + head_M[:, None] * stride_n + columns[None, :]
    q_MH = tl.load(q_at, mask=asked_MH, other=0.0).to(DTYPE)
    top_M = tl.full((LINES,), float("-inf"), tl.float32)
    total_M = tl.zeros((LINES,), tl.float32)
    sum_MH = tl.zeros((LINES, BLOCK_H), tl.float32)
    if SINKS:
        if slot < 0:
            top_M = tl.load(sinks + head_M, mask=asked_M, other=0.0).to(tl.float32) * LOG2_E
            total_M += 1.0
    oldest, known = tl.maximum(position - window + 1, 0), position + 1
    known_M, low_M, high_M = position_M, position_M, position_M
    if TREES:
        seen_M = seen + (row + row_M) * SEEN
        position_M = tl.load(seen_M, mask=asked_M, other=2147483647)
        known_M = tl.load(seen_M + 1, mask=asked_M, other=0)
        low_M, high_M = tl.load(seen_M + 2, mask=asked_M, other=0), tl.load(seen_M + 3, mask=asked_M, other=0)
        oldest, known = tl.min(position_M, axis=0), tl.load(seen + row * SEEN + 1)
    # What all lines see: from the window of the last row to what the first one knows.
    inner, after = begin, begin
    if INNER:
        inner = tl.cdiv(tl.maximum(position + rows - window, begin), BLOCK_L) * BLOCK_L
        after = tl.maximum(tl.minimum(known, end) // BLOCK_L * BLOCK_L, inner)
        for at in range(inner, after, BLOCK_L):
            top_M, total_M, sum_MH = look(
                at, top_M, total_M, sum_MH, q_MH, position_M, known_M, low_M, high_M, k, v, blocks, oldest, end, window,
                head, scale, cap, J, H=H, B=B, BLOCK_H=BLOCK_H, BLOCK_L=BLOCK_L, SOFTCAP=SOFTCAP, EDGE=False,
                TREES=TREES, DTYPE=DTYPE,
            )  # fmt: skip
    before = (tl.minimum(inner, end) - begin + BLOCK_L - 1) // BLOCK_L
    edges = before + tl.cdiv(tl.maximum(end - after, 0), BLOCK_L)
    for edge in range(edges):
        at = tl.where(edge < before, begin + edge * BLOCK_L, after + (edge - before) * BLOCK_L)
        top_M, total_M, sum_MH = look(
            at, top_M, total_M, sum_MH, q_MH, position_M, known_M, low_M, high_M, k, v, blocks, oldest, end, window,
            head, scale, cap, J, H=H, B=B, BLOCK_H=BLOCK_H, BLOCK_L=BLOCK_L, SOFTCAP=SOFTCAP, EDGE=True, TREES=TREES,
            DTYPE=DTYPE,
        )  # fmt: skip
    total_M = tl.where(total_M == 0.0, 1.0, total_M)  # a line that sees nothing of a part: 0, of weight 2^-inf
    mean_MH = sum_MH / total_M[:, None]
    heads = J * G
    if slot < 0:
        out_at = out + ((row + row_M) * heads + head_M)[:, None] * H + columns[None, :]
        tl.store(out_at, mean_MH.to(out.dtype.element_ty), mask=asked_MH)
    else:
        place_M = (slot + row_M) * heads + head_M
        tl.store(sums + place_M[:, None] * H + columns[None, :], mean_MH, mask=asked_MH)
        tl.store(logs + place_M, top_M + tl.log2(total_M), mask=asked_M)


@triton.jit(do_not_specialize=["scale", "cap", "window", "seen_at", "stride_m"])
def paged_attention_kernel(
    q, k, v, blocks_SM, words, sinks, out, sums, logs, scale, cap, window, seen_at, stride_t, stride_n, stride_m, J,
    G: tl.constexpr, H: tl.constexpr, B: tl.constexpr, NARROW: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_L: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, TREES: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """All items for all J key heads: a unit is an item for one of them. What an item sees as a whole goes to ``out``;
    of a part, the mean of the values goes to ``sums`` [slots, N, H] and the logarithm of its weight to ``logs``.

    Example: an item of 3 rows at positions 4, 5, 6, lines of G = 2: line 3 is head 1 of the row at 5, which sees 0..5.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    units = tl.load(words) * J
    for turn in range(tl.cdiv(units, programs)):
        unit = unit_of(turn, program, programs)
        if unit < units:
            item, head = words + HEADER + unit // J * ITEM, unit % J
            if WIDE:
                if tl.load(item + 7) != 0:
                    attend(
                        q, k, v, blocks_SM, item, head, sinks, words + seen_at, out, sums, logs, scale, cap, window,
                        stride_t, stride_n, stride_m, J, G=G, H=H, B=B, LINES=WIDE, BLOCK_H=BLOCK_H, BLOCK_L=BLOCK_L,
                        SOFTCAP=SOFTCAP, SINKS=SINKS, INNER=True, TREES=TREES, DTYPE=DTYPE,
                    )  # fmt: skip
                else:
                    attend(
                        q, k, v, blocks_SM, item, head, sinks, words + seen_at, out, sums, logs, scale, cap, window,
                        stride_t, stride_n, stride_m, J, G=G, H=H, B=B, LINES=NARROW, BLOCK_H=BLOCK_H, BLOCK_L=BLOCK_L,
                        SOFTCAP=SOFTCAP, SINKS=SINKS, INNER=False, TREES=TREES, DTYPE=DTYPE,
                    )  # fmt: skip
            else:
                attend(
                    q, k, v, blocks_SM, item, head, sinks, words + seen_at, out, sums, logs, scale, cap, window,
                    stride_t, stride_n, stride_m, J, G=G, H=H, B=B, LINES=NARROW, BLOCK_H=BLOCK_H, BLOCK_L=BLOCK_L,
                    SOFTCAP=SOFTCAP, SINKS=SINKS, INNER=False, TREES=TREES, DTYPE=DTYPE,
                )  # fmt: skip


@triton.jit(do_not_specialize=["merged_at"])
def merge_parts_kernel(
    words, sinks, sums, logs, out, merged_at, N,
    H: tl.constexpr, BLOCK_H: tl.constexpr, TILE: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """The parts of each row and head by their weights, in order: sum 2^log mean / sum 2^log; a sink weighs in the
    latter.

    Example: means 2 and 5, logarithms 0 and 1: (1 x 2 + 2 x 5) / 3 = 4; with a sink of logarithm 0: 12 / 4 = 3.
    """
    for unit in range(tl.program_id(0), tl.load(words + 1) * N, tl.num_programs(0)):
        entry, head = words + merged_at + unit // N * MERGED, unit % N
        row, first = tl.load(entry).to(tl.int64), tl.load(entry + 1).to(tl.int64)
        step, parts = tl.load(entry + 2), tl.load(entry + 3)
        part_P, columns = tl.arange(0, TILE), tl.arange(0, BLOCK_H)
        top = tl.full((), float("-inf"), tl.float32)
        whole = tl.zeros((), tl.float32)
        sum_H = tl.zeros((BLOCK_H,), tl.float32)
        if SINKS:
            top = tl.load(sinks + head).to(tl.float32) * LOG2_E
            whole += 1.0
        for at in range(0, parts, TILE):
            place_P = (first + (at + part_P) * step) * N + head
            there_P = at + part_P < parts
            log_P = tl.load(logs + place_P, mask=there_P, other=float("-inf"))
            mean_at = sums + place_P[:, None] * H + columns[None, :]
            mean_PH = tl.load(mean_at, mask=there_P[:, None] & (columns < H)[None, :], other=0.0)
            higher = tl.maximum(top, tl.max(log_P, axis=0))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weight_P, fade = tl.exp2(log_P - base), tl.exp2(top - base)
            sum_H = sum_H * fade + tl.sum(weight_P[:, None] * mean_PH, axis=0)
            whole = whole * fade + tl.sum(weight_P, axis=0)
            top = higher
        tl.store(out + (row * N + head) * H + columns, (sum_H / whole).to(out.dtype.element_ty), mask=columns < H)
