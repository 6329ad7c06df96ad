"""Weight gradients on Hopper: per expert the transposed output gradient times the input, over the expert's rows.

The reduction runs over rows, so both operands are read as they lie and WGMMA takes them transposed from shared memory.
Rows that lie grouped come through TMA, gathered rows through cp.async. Whole blocks of rows are read without a mask;
the last, partial one is masked in both operands (0 x NaN of the next expert's row would still be NaN).
Legend: S pairs, K slots, E experts, O output columns, I input columns.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_kernels import backend
from moe_kernels import tiles as table
from moe_kernels.grouped_gemm.kernel import source_rows, tile_of
from moe_kernels.grouped_gemm.launch import DTYPE_NAMES, device_name


@triton.jit
def _whole_block(data, descriptor, order_S, first, column, stride, WIDTH, ROWS: tl.constexpr, SLOTS: tl.constexpr,
                 TMA: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    if TMA:
        return descriptor.load([first, column])
    else:
        rows = source_rows(order_S, first + tl.arange(0, BLOCK_M), ROWS, SLOTS)
        columns = column + tl.arange(0, BLOCK)
        at = data + rows.to(tl.int64)[:, None] * stride + columns[None, :]
        if EVEN:
            return tl.load(at)
        else:
            return tl.load(at, mask=(columns < WIDTH)[None, :], other=0.0)


@triton.jit
def _partial_block(data, order_S, first, end, column, stride, WIDTH, ROWS: tl.constexpr, SLOTS: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    rows = first + tl.arange(0, BLOCK_M)
    valid = rows < end
    columns = column + tl.arange(0, BLOCK)
    sources = source_rows(order_S, tl.minimum(rows, end - 1), ROWS, SLOTS)
    at = data + sources.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(at, mask=valid[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def _accumulate(acc, dy, x, SWAP: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    if UPCAST:
        dy = dy.to(tl.float32)
        x = x.to(tl.float32)
    if SWAP:
        return tl.dot(x.T, dy, acc, input_precision=PRECISION)
    else:
        return tl.dot(dy.T, x, acc, input_precision=PRECISION)


@triton.jit
def grouped_outer_kernel(
    dy, dy_descriptor, x, x_descriptor, dw, order_S, ends_E, stride_dy, stride_x, O, I,
    SLOTS: tl.constexpr, DY_ROWS: tl.constexpr, X_ROWS: tl.constexpr, DY_TMA: tl.constexpr, X_TMA: tl.constexpr,
    SWAP: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    O_TILES: tl.constexpr, I_TILES: tl.constexpr, GROUP: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """dw[e] = sum over grouped rows r of expert e of dy[row(r)]^T x[row(r)]; zeros for an expert without rows.

    One program per tile of one expert; dw is ``[E, O, I]``, contiguous. SWAP computes the tile's transpose, x^T dy.

    Example: ends ``[2, 3]``, dy ``[[1], [2], [5]]``, x ``[[10], [1], [7]]``, both grouped:
    dw = ``[[[1 x 10 + 2 x 1]], [[5 x 7]]]`` = ``[[[12]], [[35]]]``.
    """
    pid = tl.program_id(0)
    expert = pid // (O_TILES * I_TILES)
    o_tile, i_tile = tile_of(pid % (O_TILES * I_TILES), O_TILES, I_TILES, GROUP)
    o = o_tile * BLOCK_O
    i = i_tile * BLOCK_I
    start = tl.load(ends_E + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_E + expert)
    whole = start + (end - start) // BLOCK_M * BLOCK_M
    if SWAP:
        acc = tl.zeros((BLOCK_I, BLOCK_O), dtype=tl.float32)
    else:
        acc = tl.zeros((BLOCK_O, BLOCK_I), dtype=tl.float32)
    for first in tl.range(start, whole, BLOCK_M, num_stages=STAGES):
        a = _whole_block(dy, dy_descriptor, order_S, first, o, stride_dy, O, DY_ROWS, SLOTS, DY_TMA, EVEN, BLOCK_M,
                         BLOCK_O)
        b = _whole_block(x, x_descriptor, order_S, first, i, stride_x, I, X_ROWS, SLOTS, X_TMA, EVEN, BLOCK_M, BLOCK_I)
        acc = _accumulate(acc, a, b, SWAP, UPCAST, PRECISION)
    if whole < end:
        a = _partial_block(dy, order_S, whole, end, o, stride_dy, O, DY_ROWS, SLOTS, BLOCK_M, BLOCK_O)
        b = _partial_block(x, order_S, whole, end, i, stride_x, I, X_ROWS, SLOTS, BLOCK_M, BLOCK_I)
        acc = _accumulate(acc, a, b, SWAP, UPCAST, PRECISION)
    rows = o + tl.arange(0, BLOCK_O)
    columns = i + tl.arange(0, BLOCK_I)
    at = dw + (expert.to(tl.int64) * O + rows)[:, None] * I + columns[None, :]
    result = acc.to(dw.dtype.element_ty)
    if SWAP:
        result = result.T
    if EVEN:
        tl.store(at, result)
    else:
        tl.store(at, result, mask=(rows < O)[:, None] & (columns < I)[None, :])


@triton.jit
def grouped_sum_kernel(
    dy, out, order_S, ends_E, gates_S, stride, O, SLOTS: tl.constexpr, ROWS: tl.constexpr, HAS_GATES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr,
):
    """out[e] = sum over grouped rows r of expert e of gate[pair(r)] dy[row(r)], blocks of rows in ascending order.

    Example: ends ``[2, 3]``, order ``[0, 2, 1]``, dy ``[[1], [2], [5]]`` grouped, gates ``[1, 1, 0.5]`` by pair:
    out = ``[[1 + 0.5 x 2], [5]]``.
    """
    expert = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    start = tl.load(ends_E + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_E + expert)
    acc = tl.zeros((BLOCK_M, BLOCK_O), dtype=tl.float32)
    for first in range(start, end, BLOCK_M):
        rows = first + tl.arange(0, BLOCK_M)
        valid = rows < end
        sources = source_rows(order_S, tl.minimum(rows, end - 1), ROWS, SLOTS)
        at = dy + sources.to(tl.int64)[:, None] * stride + columns[None, :]
        tile = tl.load(at, mask=valid[:, None] & (columns < O)[None, :], other=0.0).to(tl.float32)
        if HAS_GATES:
            pairs = tl.load(order_S + tl.minimum(rows, end - 1))
            tile *= tl.load(gates_S + pairs, mask=valid, other=0.0).to(tl.float32)[:, None]
        acc += tile
    tl.store(out + expert.to(tl.int64) * O + columns, tl.sum(acc, 0).to(out.dtype.element_ty), mask=columns < O)


def launch_outer(
    dy: Tensor, x: Tensor, dw_EOI: Tensor, order_S: Tensor, ends_E: Tensor, *, slots: int, dy_rows: str, x_rows: str,
    tiles: Mapping[str, int] | None = None,
) -> None:
    """``tiles``: block_o counts columns of the gathered operand if only one is (cp.async suits the narrower side), else
    of dy. num_stages counts blocks in flight; the row numbers of a gather take two stages more.
    """
    experts, out_width, in_width = dw_EOI.shape
    choice = dict(tiles or _tiles_for(dw_EOI, order_S.shape[0]))
    swap = dy_rows == "grouped" and x_rows != "grouped"
    block_o, block_i, block_m = choice["block_o"], choice["block_i"], choice["block_m"]
    if swap:
        block_o, block_i = block_i, block_o
    stages = choice["num_stages"] + (0 if dy_rows == x_rows == "grouped" else 2)
    o_tiles, i_tiles = triton.cdiv(out_width, block_o), triton.cdiv(in_width, block_i)
    dy_descriptor = _descriptor(dy, block_m, block_o) if dy_rows == "grouped" else None
    x_descriptor = _descriptor(x, block_m, block_i) if x_rows == "grouped" else None
    grouped_outer_kernel[(experts * o_tiles * i_tiles,)](
        dy, dy if dy_descriptor is None else dy_descriptor, x, x if x_descriptor is None else x_descriptor, dw_EOI,
        order_S, ends_E, dy.stride(0), x.stride(0), out_width, in_width,
        SLOTS=slots, DY_ROWS=dy_rows, X_ROWS=x_rows, DY_TMA=dy_descriptor is not None, X_TMA=x_descriptor is not None,
        EVEN=out_width % block_o == 0 and in_width % block_i == 0, UPCAST=backend.upcast(x.dtype),
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", SWAP=swap, STAGES=stages, O_TILES=o_tiles,
        I_TILES=i_tiles, GROUP=choice["group"], BLOCK_O=block_o, BLOCK_I=block_i, BLOCK_M=block_m,
        num_warps=choice["num_warps"], num_stages=stages,
    )


def _tiles_for(dw_EOI: Tensor, pairs: int) -> Mapping[str, int]:
    experts, out_width, in_width = dw_EOI.shape
    shape = {"depth": in_width, "width": out_width, "E": experts}
    name = device_name(dw_EOI.device)
    return table.tiles("grouped_outer", shape=shape, rows=pairs, dtype=DTYPE_NAMES[dw_EOI.dtype], device_name=name)


def launch_sum(
    dy: Tensor, out_EO: Tensor, order_S: Tensor, ends_E: Tensor, gates_S: Tensor | None, *, slots: int, rows: str,
    block_m: int = 32, block_o: int = 128,
) -> None:
    assert gates_S is None or gates_S.is_contiguous()
    experts, width = out_EO.shape
    grouped_sum_kernel[(experts, triton.cdiv(width, block_o))](
        dy, out_EO, order_S, ends_E, dy if gates_S is None else gates_S, dy.stride(0), width,
        SLOTS=slots, ROWS=rows, HAS_GATES=gates_S is not None, BLOCK_M=block_m, BLOCK_O=block_o,
    )


def _descriptor(rows: Tensor, block_m: int, block: int) -> Any:
    """For TMA loads of ``[block_m, block]``, or None where TMA cannot read this tensor."""
    size = rows.element_size()
    aligned = rows.data_ptr() % 16 == 0 and rows.stride(0) * size % 16 == 0 and rows.stride(1) == 1
    if not aligned or rows.shape[0] == 0:
        return None
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [block_m, block])
