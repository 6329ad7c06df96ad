"""From tensors to launches of :mod:`moe_kernels.grouped_gemm.swapped.kernel`.

Legend: S pairs, E experts, I input columns, O output columns, W result columns.
"""

from __future__ import annotations

from collections.abc import Mapping

import triton
from torch import Tensor

from moe_kernels.activations.op import Activation, gated
from moe_kernels.arguments import require
from moe_kernels.fitting import MIN_K, fitted
from moe_kernels.grouped_gemm.launch import shared_memory
from moe_kernels.grouped_gemm.swapped.kernel import arrange_kernel, swapped_gemm_kernel
from moe_kernels.plan.types import Plan, tile_bound
from moe_kernels.quant.weight import Weight
from moe_kernels.small import arguments as small

ARRANGE_BLOCK = 1024
MAX_BANDS = 65_535
"""Programs along a grid's second axis."""


def launch(
    x: Tensor,
    w: Weight,
    plan: Plan,
    gather: str | None,
    activation: Activation,
    bias_EO: Tensor | None,
    row_scale_S: Tensor | None,
    tiles: Mapping[str, int],
    *,
    out_arranged: bool = False,
) -> Tensor:
    """``[S, W]``: grouped rows; those that no expert takes are left unwritten.

    Args:
        x: rows contiguous; columns as :func:`arrange` leaves them.
        tiles: as :func:`tiles_for_rows` leaves them: BLOCK_M is the plan's.
        out_arranged: write columns in the order that a following product with quantised weights wants.
    """
    assert bias_EO is None or bias_EO.is_contiguous()
    assert row_scale_S is None or row_scale_S.is_contiguous()
    matrices = small.matrices(w)
    assert tiles["BLOCK_M"] == plan.block_rows
    rows_per_expert = matrices.stored.shape[1]
    width = rows_per_expert // 2 if gated(activation) else rows_per_expert
    pairs = plan.order_S.numel()
    out_SW = x.new_empty(pairs, width)
    weight = small.weight_arguments(matrices, width, matrices.columns, x, tiles)
    column_tiles = triton.cdiv(width, weight["BLOCK_N"])
    bands = _bands(plan.tile_expert_M.numel(), tiles)
    swapped_gemm_kernel[(tiles["GROUP_M"] * column_tiles, bands)](
        x=x, out=out_SW, order_S=plan.order_S, ends_E=plan.ends_E, tile_expert_M=plan.tile_expert_M,
        tile_row_M=plan.tile_row_M, tile_count_1=plan.tile_count_1, bias=x if bias_EO is None else bias_EO,
        row_scale=x if row_scale_S is None else row_scale_S, stride_x=x.stride(0), stride_out=out_SW.stride(0),
        stride_bias=0 if bias_EO is None else bias_EO.stride(0), I=matrices.columns, WIDTH=width,
        SLOTS=plan.slots, GATHER=gather or "grouped", ACT=activation, GATED=gated(activation),
        HAS_BIAS=bias_EO is not None, HAS_SCALE=row_scale_S is not None, OUT_ARRANGED=out_arranged,
        GROUP_M=tiles["GROUP_M"], **weight, **small.launch_options(matrices, tiles),
    )  # fmt: skip
    return out_SW


def check_bands(pairs: int, experts: int, tiles: Mapping[str, int]) -> None:
    """Before anything is launched.

    Raises:
        ArgumentError: more tiles than a grid has room for.
    """
    bands = _bands(tile_bound(pairs, experts, tiles["BLOCK_M"]), tiles)
    largest = MAX_BANDS * tiles["GROUP_M"] * tiles["BLOCK_M"]
    message = f"ids must number about {largest} at most, in these tiles, found {pairs}: pass fewer rows at a time"
    require(bands <= MAX_BANDS, message)


def _bands(row_tiles: int, tiles: Mapping[str, int]) -> int:
    return -(-row_tiles // tiles["GROUP_M"])


def tiles_for_rows(
    tiles: Mapping[str, int], x: Tensor, w: Weight, activation: Activation, block_rows: int
) -> Mapping[str, int]:
    """``tiles`` with row tiles of ``block_rows``, and narrower where that would not fit. What :func:`arrange` decides
    depends on them, so they come first."""
    bits = small.matrices(w).bits
    fits = fitted(
        tiles, block_m=block_rows, matrices=1 + gated(activation),
        weight_bytes=bits / 8 if bits < 16 else x.element_size(), row_bytes=x.element_size(),
        limit=shared_memory(x.device), least_k=small.INT4_RUN if bits == 4 else MIN_K,
    )  # fmt: skip
    return {**fits, "BLOCK_M": block_rows}


def arrange(x_TD: Tensor, w: Weight, tiles: Mapping[str, int]) -> Tensor:
    """x as a product with ``w`` wants its columns: itself, or a copy with the columns of each run rearranged."""
    if not wants_arranged(x_TD, w, tiles):
        return x_TD
    rows, hidden = x_TD.shape
    out_TD = x_TD.new_empty(rows, hidden)
    grid = (rows, triton.cdiv(hidden, ARRANGE_BLOCK))
    arrange_kernel[grid](x_TD, out_TD, x_TD.stride(0), hidden, BLOCK=ARRANGE_BLOCK)
    return out_TD


def wants_arranged(x: Tensor, w: Weight, tiles: Mapping[str, int]) -> bool:
    """Whether ``w`` is unpacked by words, which meet the columns of x in another order."""
    return small.in_words(small.matrices(w), x, tiles)
