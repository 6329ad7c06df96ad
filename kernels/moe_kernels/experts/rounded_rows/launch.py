"""From tensors to launches of :mod:`moe_kernels.experts.rounded_rows.kernel`: for which weights, from how many rows on.

The table's op "rounded_rows" says from how many rows on (FROM_ROWS, 0: never), "rounded.in" and "rounded.down" have
the tiles. Legend: N rows, S pairs, O output and I input columns, W result columns, G groups of 128 columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeGuard

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_kernels.activations.op import Activation, gated
from moe_kernels.experts.rounded_rows.kernel import round_rows_kernel, rounded_gemm_kernel
from moe_kernels.fitting import fitted
from moe_kernels.grouped_gemm.launch import shared_memory
from moe_kernels.plan.types import Plan
from moe_kernels.quant.weight import QuantisedWeight, Weight

GROUP: Final = 128
_ROUND_BLOCK: Final = 16
_LEAST_N: Final = 16
"""Output columns that a matrix instruction has at least."""


def takes(weight: Weight) -> TypeGuard[QuantisedWeight]:
    """Whether there is a product for it: FP8 with a scale for each 128 columns."""
    if not isinstance(weight, QuantisedWeight):
        return False
    return weight.codes == "e4m3" and weight.group == GROUP and weight.order is None


def round_rows(x_NI: Tensor) -> tuple[Tensor, Tensor]:
    """Codes ``[N, G x 128]`` and scales ``[G, N]``."""
    rows, columns = x_NI.shape
    groups = triton.cdiv(columns, GROUP)
    codes = x_NI.new_empty(rows, groups * GROUP, dtype=torch.float8_e4m3fn)
    scales_GN = x_NI.new_empty(groups, rows, dtype=torch.float32)
    round_rows_kernel[(triton.cdiv(rows, _ROUND_BLOCK), groups)](
        x_NI, codes, scales_GN, rows, x_NI.stride(0), columns, codes.stride(0), BLOCK=_ROUND_BLOCK, num_warps=4
    )
    return codes, scales_GN


def launch(
    x_NI: Tensor,
    weight: QuantisedWeight,
    plan: Plan,
    gather: str | None,
    activation: Activation,
    bias_EO: Tensor | None,
    row_scale_S: Tensor | None,
    tiles: Mapping[str, int],
) -> Tensor:
    """``[S, W]`` in x's dtype: grouped rows; those that no expert takes are left unwritten."""
    assert bias_EO is None or bias_EO.is_contiguous()
    assert row_scale_S is None or row_scale_S.is_contiguous()
    experts, rows, columns = weight.shape
    is_gated = gated(activation)
    width, pairs = rows // (1 + is_gated), plan.order_S.numel()
    choice = fitted(
        tiles, block_m=plan.block_rows, matrices=1 + is_gated, weight_bytes=1, row_bytes=1,
        limit=shared_memory(x_NI.device), least_k=GROUP,
    )  # fmt: skip
    block_n = max(min(choice["BLOCK_N"], triton.next_power_of_2(width)), _LEAST_N)
    stored = weight.packed.view(torch.float8_e4m3fn).view(experts * rows, columns)
    codes, scales_GN = round_rows(x_NI)
    out_SW = x_NI.new_empty(pairs, width)
    column_tiles = triton.cdiv(width, block_n)
    rounded_gemm_kernel[(plan.tile_expert_M.numel() * column_tiles,)](
        codes, scales_GN, TensorDescriptor(stored, [experts * rows, columns], [columns, 1], [block_n, GROUP]),
        weight.scales, out_SW, plan.order_S, plan.ends_E, plan.tile_expert_M, plan.tile_row_M, plan.tile_count_1,
        bias_EO, row_scale_S, len(x_NI), codes.stride(0), out_SW.stride(0),
        0 if bias_EO is None else bias_EO.stride(0), columns, weight.scales.shape[2], width, column_tiles,
        SLOTS=plan.slots, GATHER=gather or "grouped", ACT=activation, GATED=is_gated, HAS_BIAS=bias_EO is not None,
        HAS_SCALE=row_scale_S is not None, SCALE_ROWS=weight.scale_rows,
        UNIFORM=weight.scale_rows % block_n == 0 and width % block_n == 0, STAGES=choice["num_stages"],
        GROUP_M=choice["GROUP_M"], BLOCK_M=plan.block_rows, BLOCK_N=block_n, num_warps=choice["num_warps"],
        num_stages=choice["num_stages"],
    )  # fmt: skip
    return out_SW
