"""Every grouped row times its expert's matrix: ScatterMoE's scatter2scatter, forward and (transposed) for dX.

Rows are read from where they lie and written where they are wanted; nothing is gathered or padded in memory.
Legend: S pairs, N rows of x, K slots, E experts, O output columns, I input columns, W result columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_kernels import backend
from moe_kernels.activations.op import Activation, activate, gated
from moe_kernels.expert_arguments import check_grouped_gemm
from moe_kernels.plan.types import Plan

Gather = Literal["token", "pair"] | None
"""Where grouped row p lies in x: at its token ``order[p] // K``, at its pair ``order[p]``, or at p itself."""

_GROUPED_MM_STRIDE_BYTES = 16
"""``F.grouped_mm`` refuses matrices whose row stride is no multiple of this."""


def grouped_gemm(
    x_NI: Tensor,
    w_EOI: Tensor,
    plan: Plan,
    *,
    gather: Gather = None,
    scatter: bool = False,
    activation: Activation = "identity",
    bias_EO: Tensor | None = None,
    row_scale_S: Tensor | None = None,
    transpose_w: bool = False,
    tiles: Mapping[str, int] | None = None,
) -> Tensor:
    """out[p] = activation(scale[p] x (x[row(p)] w[e]^T) + bias[e]) for every grouped row p of expert e.

    Args:
        x_NI: float32, bfloat16, float16 or float64 (torch path); [T, I], [S, I] in pair order, or [S, I] grouped.
        w_EOI: same dtype. With ``transpose_w`` x has O columns and is multiplied by w[e] itself: the gradient of x.
        scatter: row p of the result lies at its pair ``order[p]``, else at p.
        activation: a gated one takes gate columns 0..O/2 and up columns O/2..O and halves the width.
        row_scale_S: float32, by pair.
        tiles: launch arguments of the kernel, else from the table; its rows are ``plan.block_rows`` either way.

    Returns:
        ``[S, W]`` in x's dtype; rows that no expert here takes are 0.

    Raises:
        ArgumentError: a shape, dtype or device does not fit.

    Example: E = 2, I = O = 1, w ``[[[10]], [[20]]]``, x ``[[1], [2], [3]]``, ids ``[[1], [0], [1]]``: grouped order
    is 1, 0, 2; gathered by token the result is ``[[20], [20], [60]]``, scattered ``[[20], [20], [60]]`` as well
    (pairs 0, 1, 2), because 1 x 20, 2 x 10 and 3 x 20 change places.
    """
    check_grouped_gemm(x_NI, w_EOI, plan, gather, gated(activation), bias_EO, row_scale_S, transpose_w)
    if backend.use_triton(x_NI) and plan.order_S.numel():
        from moe_kernels.grouped_gemm import launch as grouped_gemm_launch

        x_NI, bias_EO, row_scale_S = x_NI.contiguous(), backend.packed(bias_EO), backend.packed(row_scale_S)
        return grouped_gemm_launch.launch(
            x_NI, w_EOI, plan, gather, scatter, activation, bias_EO, row_scale_S, transpose_w, tiles
        )
    order_S = plan.order_S.long()
    rows_S = {"token": order_S // plan.slots, "pair": order_S, None: torch.arange(len(order_S), device=x_NI.device)}
    out_SO = grouped_product(x_NI[rows_S[gather]], w_EOI.mT if transpose_w else w_EOI, plan.ends_E)
    if row_scale_S is not None:
        out_SO = (out_SO * row_scale_S[order_S].unsqueeze(1)).to(out_SO.dtype)
    if bias_EO is not None:
        out_SO = out_SO + bias_EO[expert_of_rows(plan, len(bias_EO))].to(out_SO.dtype)
    taken_S = torch.arange(len(order_S), device=x_NI.device) < plan.ends_E[-1]
    out_SW = torch.where(taken_S.unsqueeze(1), activate(out_SO, activation), 0)
    return torch.empty_like(out_SW).index_copy_(0, order_S, out_SW) if scatter else out_SW


def expert_of_rows(plan: Plan, experts: int) -> Tensor:
    """int64 ``[S]``: the expert of each grouped row; the last one for rows that none takes."""
    rows_S = torch.arange(len(plan.order_S), device=plan.ends_E.device)
    return torch.searchsorted(plan.ends_E.long(), rows_S, right=True).clamp(max=experts - 1)


def grouped_product(x_NI: Tensor, w_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Row n times the transposed weight of the expert whose run holds n; rows past the last run are unspecified."""
    if _grouped_mm_takes(x_NI, w_EOI):
        return F.grouped_mm(x_NI, w_EOI.transpose(1, 2), offs=ends_E)
    out_NO = x_NI.new_empty(x_NI.shape[0], w_EOI.shape[1])
    start = 0
    for expert, end in enumerate(ends_E.tolist()):
        if end > start:
            torch.mm(x_NI[start:end], w_EOI[expert].t(), out=out_NO[start:end])
        start = end
    return out_NO


def _grouped_mm_takes(x_NI: Tensor, w_EOI: Tensor) -> bool:
    out_width, in_width = w_EOI.shape[1:]
    size = x_NI.element_size()
    aligned = (in_width * size) % _GROUPED_MM_STRIDE_BYTES == 0 and (out_width * size) % _GROUPED_MM_STRIDE_BYTES == 0
    # On a CPU it takes float32, bfloat16 and float16, on a GPU only bfloat16 everywhere.
    on_cpu = x_NI.device.type == "cpu" and x_NI.dtype != torch.float64
    return aligned and w_EOI.is_contiguous() and (on_cpu or x_NI.dtype == torch.bfloat16)
