"""Checks of what callers hand to the ops and modules that have a backward pass. Values are never read."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels.arguments import (
    check_count,
    check_device,
    check_like,
    check_tile_rows,
    describe,
    dtypes_on,
    require,
    require_optional_tensors,
    require_tensors,
)
from moe_kernels.expert_arguments import require_plan
from moe_kernels.plan.types import Plan


def check_sizes(*, experts: int, top_k: int, **others: int) -> None:
    """Of a module, when it is made.

    Raises:
        ArgumentError: a size is no positive integer, or a token takes more experts than there are.
    """
    for name, size in {"experts": experts, "top_k": top_k, **others}.items():
        check_count(name, size, 1)
    require(top_k <= experts, f"top_k must be in 1..{experts} (experts), found {top_k}")


def check_module_rows(x: Tensor, w_EOI: Tensor) -> None:
    """What a module is called with fits its experts' first matrix."""
    require_tensors(x=x)
    hidden = w_EOI.shape[2]
    fits = x.dim() >= 1 and x.shape[-1] == hidden and x.dtype == w_EOI.dtype
    require(fits, f"x must be [..., D={hidden}] in the module's {w_EOI.dtype}, found {describe(x)}")
    check_device(x, w_EOI, "x", "the module")


def check_module_choice(
    x_TD: Tensor, experts: int, logits_TE: Tensor | None, ids_TK: Tensor | None, gates_TK: Tensor | None
) -> None:
    require_optional_tensors(logits=logits_TE, ids=ids_TK, gates=gates_TK)
    rows = x_TD.shape[0]
    if logits_TE is not None:
        fits = tuple(logits_TE.shape) == (rows, experts)
        require(fits, f"logits must be [T={rows}, E={experts}], found {describe(logits_TE)}")
        check_device(logits_TE, x_TD, "logits", "x")
    if ids_TK is not None:
        fits = ids_TK.dim() == 2 and ids_TK.shape[0] == rows
        require(fits, f"ids must be [T={rows}, K], found {describe(ids_TK)}")
        check_device(ids_TK, x_TD, "ids", "x")


def check_positions(positions_BL: Tensor | None, x_BLD: Tensor) -> None:
    require_optional_tensors(positions=positions_BL)
    if positions_BL is not None:
        batch, length, _ = x_BLD.shape
        fits = tuple(positions_BL.shape) in ((batch, length), (1, length))
        require(fits, f"positions must be [{batch} or 1, {length}], found {describe(positions_BL)}")
        check_device(positions_BL, x_BLD, "positions", "x")


def check_parallel_linear(
    x: Tensor,
    w_EOI: Tensor,
    plan: Plan,
    gates: Tensor | None,
    bias_EO: Tensor | None,
    *,
    rows: str,
    grouped_out: bool,
    fan_out: int | None,
) -> None:
    require_tensors(x=x, w=w_EOI)
    require_optional_tensors(gates=gates, bias=bias_EO)
    require_plan(plan)
    pairs, slots = plan.order_S.shape[0], plan.slots
    require(fan_out in (None, 1, slots), f"fan_out must be 1 or the plan's {slots} slots, found {fan_out}")
    require(rows != "grouped" or fan_out in (None, 1), f"grouped rows have fan_out 1, found {fan_out}")
    require(gates is None or not grouped_out, "gates sum over a token's slots: grouped_out must be false")
    _check_matrix_of_experts(x, w_EOI, plan, "w [E, O, I]")
    held = pairs // slots if rows == "token" else pairs
    check_like(x, (held, w_EOI.shape[2]), w_EOI.dtype, f"x ({rows} rows)")
    require(x.is_contiguous(), f"x must be contiguous, found {describe(x)}")
    if gates is not None:
        check_gates(gates, x, plan)
    if bias_EO is not None:
        check_like(bias_EO, tuple(w_EOI.shape[:2]), x.dtype, "bias [E, O]")
        check_device(bias_EO, x, "bias", "x")


def check_gates(gates_TK: Tensor, x: Tensor, plan: Plan) -> None:
    shape = (plan.order_S.shape[0] // plan.slots, plan.slots)
    check_like(gates_TK, shape, torch.promote_types(x.dtype, torch.float32), "gates [T, K]")
    check_device(gates_TK, x, "gates", "x")


def check_sparse_mlp(
    x_TD: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    plan: Plan,
    gates_TK: Tensor,
    bias_in: Tensor | None,
    bias_out: Tensor | None,
    *,
    inner: int,
) -> None:
    """``inner``: 2 if the activation is gated, else 1."""
    require_tensors(x=x_TD, w_in=w_in, w_out=w_out, gates=gates_TK)
    require_optional_tensors(bias_in=bias_in, bias_out=bias_out)
    require_plan(plan)
    _check_matrix_of_experts(x_TD, w_in, plan, "w_in [E, F or 2F, D]")
    _check_matrix_of_experts(x_TD, w_out, plan, "w_out [E, D, F]")
    experts, hidden, width = w_out.shape
    check_like(w_in, (experts, inner * width, hidden), w_out.dtype, f"w_in [E, {inner} x F, D]")
    check_like(x_TD, (plan.order_S.shape[0] // plan.slots, hidden), w_out.dtype, "x [T, D]")
    require(x_TD.is_contiguous(), f"x must be contiguous, found {describe(x_TD)}")
    check_gates(gates_TK, x_TD, plan)
    for bias, columns, name in ((bias_in, inner * width, "bias_in"), (bias_out, hidden, "bias_out")):
        if bias is not None:
            check_like(bias, (experts, columns), x_TD.dtype, name)
            check_device(bias, x_TD, name, "x")


def _check_matrix_of_experts(x: Tensor, w: Tensor, plan: Plan, name: str) -> None:
    dtypes = dtypes_on(x.device)
    require(x.dim() == 2 and x.dtype in dtypes, f"x must be a matrix in {dtypes}, found {describe(x)}")
    require(w.dim() == 3 and w.is_contiguous(), f"{name} must be contiguous, found {describe(w)}")
    experts = plan.ends_E.shape[0]
    require(w.shape[0] == experts, f"{name} must be of the plan's {experts} experts, found {describe(w)}")
    require(w.numel() > 0, f"{name} must have rows and columns, found {describe(w)}")
    check_tile_rows(plan.block_rows)
    check_device(w, x, name, "x")
    check_device(plan.order_S, x, "plan", "x")
