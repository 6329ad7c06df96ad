"""Kernels of :mod:`moe_kernels.training.pair_rows.op`.

Both are bound by memory; neither adds atomically. Legend: T tokens, K slots, S = T x K pairs, E experts, C columns.
"""

import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.grouped_gemm.kernel import source_rows


@triton.jit
def group_rows_kernel(
    rows, out, gates_S, order_S, ends_E, stride, C, E, SLOTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """out[r] = gate[pair(r)] rows[row(r)] for grouped rows r that an expert owns, zeros for the others.

    Example: K = 2, order ``[1, 0]``, rows ``[[3]]`` by token, gates ``[10, 100]``: out = ``[[300], [30]]``.
    """
    position = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    owned = position < tl.load(ends_E + E - 1)
    row = source_rows(order_S, position, ROWS, SLOTS).to(tl.int64)
    gate = tl.load(gates_S + tl.load(order_S + position), mask=owned, other=0.0).to(tl.float32)
    tile = tl.load(rows + row * stride + columns, mask=(columns < C) & owned, other=0.0).to(tl.float32)
    tl.store(out + position.to(tl.int64) * C + columns, (gate * tile).to(out.dtype.element_ty), mask=columns < C)


@triton.jit
def _pair_row(pair, place, ends_E, E, ROWS: tl.constexpr, SLOTS: tl.constexpr, BLOCK_E: tl.constexpr):
    if ROWS == "token":
        return pair // SLOTS
    elif ROWS == "pair":
        return pair
    elif ROWS == "grouped":
        return place
    else:
        tl.static_assert(ROWS == "expert", "unknown layout of rows")
        experts = tl.arange(0, BLOCK_E)
        ends = tl.load(ends_E + experts, mask=experts < E, other=2147483647)
        return tl.sum((ends <= place).to(tl.int32))


@triton.jit
def pair_dots_kernel(
    a, b, out_S, place_S, ends_E, stride_a, stride_b, C, E, SLOTS: tl.constexpr, A_ROWS: tl.constexpr,
    B_ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr,
):
    """out[p] = a[row(p)] . b[row(p)], 0 for a dropped pair; ROWS "expert" means the row of the pair's expert.

    Example: a ``[[1, 2]]``, b ``[[3, 4]]``: 1 x 3 + 2 x 4 = 11.
    """
    pair = tl.program_id(0)
    place = tl.load(place_S + pair)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    if place >= 0:
        a_row = _pair_row(pair, place, ends_E, E, A_ROWS, SLOTS, BLOCK_E).to(tl.int64)
        b_row = _pair_row(pair, place, ends_E, E, B_ROWS, SLOTS, BLOCK_E).to(tl.int64)
        for first in range(0, C, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            left = tl.load(a + a_row * stride_a + columns, mask=columns < C, other=0.0).to(tl.float32)
            right = tl.load(b + b_row * stride_b + columns, mask=columns < C, other=0.0).to(tl.float32)
            total += left * right
    tl.store(out_S + pair, tl.sum(total, 0).to(out_S.dtype.element_ty))


def launch_group_rows(
    rows: Tensor, out_SC: Tensor, gates_TK: Tensor, order_S: Tensor, ends_E: Tensor, *, slots: int, layout: str,
    block: int = 1024,
) -> None:
    assert rows.is_contiguous()
    assert gates_TK.is_contiguous()
    pairs, columns = out_SC.shape
    block = min(block, triton.next_power_of_2(columns))
    group_rows_kernel[(pairs, triton.cdiv(columns, block))](
        rows, out_SC, gates_TK, order_S, ends_E, rows.stride(0), columns, ends_E.shape[0],
        SLOTS=slots, ROWS=layout, BLOCK=block,
    )


def launch_pair_dots(
    a: Tensor, b: Tensor, out_TK: Tensor, place_S: Tensor, ends_E: Tensor, *, a_rows: str, b_rows: str,
    block: int = 1024,
) -> None:
    assert a.is_contiguous()
    assert b.is_contiguous()
    columns, experts = a.shape[1], ends_E.shape[0]
    pair_dots_kernel[(out_TK.numel(),)](
        a, b, out_TK, place_S, ends_E, a.stride(0), b.stride(0), columns, experts,
        SLOTS=out_TK.shape[1], A_ROWS=a_rows, B_ROWS=b_rows, BLOCK=min(block, triton.next_power_of_2(columns)),
        BLOCK_E=triton.next_power_of_2(experts),
    )
