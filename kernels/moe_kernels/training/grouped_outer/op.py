"""Gradients of expert weights and biases: reductions over the rows of each expert (ScatterMoE's groupXTY).

Legend: T rows, K slots per row, S = T x K pairs, E experts, O output columns, I input columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from moe_kernels import backend
from moe_kernels.plan.types import Plan

Rows = Literal["grouped", "token", "pair"]
"""How a matrix stores the rows of pairs: in the plan's grouped order; one row per token, shared by its K pairs; or one
row per pair p = t K + k."""


def grouped_outer(
    dy: Tensor, x: Tensor, plan: Plan, *, dy_rows: Rows, x_rows: Rows, tiles: Mapping[str, int] | None = None
) -> Tensor:
    """dW[e] = sum over the rows of expert e of dy[row]^T x[row], summed in float32 (float64 for float64).

    Args:
        dy: ``[S, O]``, or ``[T, O]`` if ``dy_rows`` is "token"; unit stride along the columns.
        x: ``[S, I]`` or ``[T, I]``, in the same dtype.
        tiles: launch arguments of the kernel, else from the table.

    Returns:
        ``[E, O, I]`` in ``dy``'s dtype, zeros for an expert without rows.

    Example: experts own grouped rows 0..1 and 2, dy ``[[1], [2], [5]]``, x ``[[10], [1], [7]]``: ``[[[12]], [[35]]]``.
    """
    if not backend.use_triton(dy):
        return _outer_reference(_grouped(dy, plan, dy_rows), _grouped(x, plan, x_rows), plan.ends_E)
    from moe_kernels.training.grouped_outer.kernel import launch_outer

    dw_EOI = dy.new_empty(plan.ends_E.shape[0], dy.shape[1], x.shape[1])
    if dw_EOI.numel() == 0 or dy.shape[0] == 0:
        return dw_EOI.zero_()
    launch_outer(
        dy, x, dw_EOI, plan.order_S, plan.ends_E, slots=plan.slots, dy_rows=dy_rows, x_rows=x_rows, tiles=tiles
    )
    return dw_EOI


def grouped_sum(dy: Tensor, plan: Plan, *, rows: Rows, gates_TK: Tensor | None = None) -> Tensor:
    """db[e] = sum over the rows of expert e of gate x dy[row] (gates 1 if None), in ``dy``'s dtype: ``[E, O]``.

    Example: experts own grouped rows 0..1 and 2, dy ``[[1], [2], [5]]``: ``[[3], [5]]``.
    """
    if not backend.use_triton(dy):
        return _sum_reference(dy, plan, rows, gates_TK)
    from moe_kernels.training.grouped_outer.kernel import launch_sum

    out_EO = dy.new_empty(plan.ends_E.shape[0], dy.shape[1])
    if out_EO.numel() == 0 or dy.shape[0] == 0:
        return out_EO.zero_()
    gates_S = None if gates_TK is None else gates_TK.contiguous()
    launch_sum(dy, out_EO, plan.order_S, plan.ends_E, gates_S, slots=plan.slots, rows=rows)
    return out_EO


def source_rows(plan: Plan, rows: Rows) -> Tensor:
    """int64 ``[S]``: the stored row behind each grouped row."""
    if rows == "grouped":
        return torch.arange(plan.order_S.shape[0], device=plan.order_S.device)
    return plan.order_S.long() // (plan.slots if rows == "token" else 1)


def _grouped(stored: Tensor, plan: Plan, rows: Rows) -> Tensor:
    return stored if rows == "grouped" else stored[source_rows(plan, rows)]


def _outer_reference(dy_SO: Tensor, x_SI: Tensor, ends_E: Tensor) -> Tensor:
    dw_EOI = dy_SO.new_zeros(ends_E.shape[0], dy_SO.shape[1], x_SI.shape[1])
    exact = torch.promote_types(dy_SO.dtype, torch.float32)
    start = 0
    for expert, end in enumerate(ends_E.tolist()):
        dw_EOI[expert] = dy_SO[start:end].to(exact).t() @ x_SI[start:end].to(exact)
        start = end
    return dw_EOI


def _sum_reference(dy: Tensor, plan: Plan, rows: Rows, gates_TK: Tensor | None) -> Tensor:
    dy_SO = _grouped(dy, plan, rows).to(torch.promote_types(dy.dtype, torch.float32))
    if gates_TK is not None:
        dy_SO = dy_SO * gates_TK.flatten()[plan.order_S.long()].unsqueeze(1)
    out_EO = dy.new_zeros(plan.ends_E.shape[0], dy.shape[1])
    start = 0
    for expert, end in enumerate(plan.ends_E.tolist()):
        out_EO[expert] = dy_SO[start:end].sum(0)
        start = end
    return out_EO
