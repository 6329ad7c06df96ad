"""Checks of what callers hand to the expert ops. Shapes, dtypes and devices: no value is read, no device waited for."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels import arguments
from moe_kernels.activations.op import gated
from moe_kernels.arguments import (
    FLOATS,
    check_tile_rows,
    require,
    require_kind,
    require_optional_tensors,
    require_tensors,
)
from moe_kernels.plan.types import Plan
from moe_kernels.quant.weight import QuantisedWeight, Weight


def check_experts(
    x_ND: Tensor, w_in: Weight, w_down: Weight, activation: str, bias_in: Tensor | None, bias_down: Tensor | None
) -> None:
    """Rows and the two matrices of every expert fit together."""
    require_tensors(x=x_ND)
    require_tensors(**{n: w for n, w in (("w_in", w_in), ("w_down", w_down)) if not isinstance(w, QuantisedWeight)})
    require_optional_tensors(bias_in=bias_in, bias_down=bias_down)
    require(x_ND.dim() == 2 and x_ND.dtype in FLOATS, f"x must be [rows, D] in {FLOATS}, found {describe(x_ND)}")
    require(len(w_down.shape) == 3, f"w_down must be [E, D, F], found {describe(w_down)}")
    experts, hidden, width = w_down.shape
    held = experts >= 1 and hidden >= 1 and width >= 1
    require(held, f"w_down must hold an expert with rows and columns, found {describe(w_down)}")
    require(x_ND.shape[1] == hidden, f"x must be [rows, D={hidden}] as w_down [E, D, F], found {describe(x_ND)}")
    rows_in, name = (2 * width, "w_in [E, 2F, D]") if gated(activation) else (width, "w_in [E, F, D]")
    _check_weight(w_down, (experts, hidden, width), x_ND, "w_down [E, D, F]")
    _check_weight(w_in, (experts, rows_in, hidden), x_ND, name)
    ordered = isinstance(w_down, QuantisedWeight) and w_down.order is not None
    require(not ordered, f"w_down must have its columns in h's order, found {describe(w_down)}: call fold_order before")
    check_optional(bias_in, (experts, rows_in), x_ND.dtype, x_ND, "bias_in")
    check_optional(bias_down, (experts, hidden), x_ND.dtype, x_ND, "bias_down")


def check_choice(
    x_TD: Tensor,
    experts: int,
    ids_TK: Tensor,
    weights_TK: Tensor,
    weights_on: str,
    keep_T: Tensor | None,
    local_E: Tensor | None,
    plan: Plan | None,
) -> None:
    """Chosen experts and their weights fit the rows."""
    require_tensors(ids=ids_TK, weights=weights_TK)
    require_optional_tensors(keep=keep_T, local=local_E)
    rows = x_TD.shape[0]
    require(ids_TK.dim() == 2 and ids_TK.shape[0] == rows, f"ids must be [T={rows}, K], found {describe(ids_TK)}")
    require(ids_TK.dtype in (torch.int32, torch.int64), f"ids must be int32 or int64, found {describe(ids_TK)}")
    slots = ids_TK.shape[1]
    require(slots >= 1, f"ids must be [T, K] with at least one slot, found {describe(ids_TK)}")
    require(rows * slots < 2**31, f"ids must number less than 2**31, found {describe(ids_TK)}")
    _same_device(ids_TK, x_TD, "ids")
    check_optional(weights_TK, tuple(ids_TK.shape), torch.float32, x_TD, "weights [T, K]")
    require(weights_on in ("output", "input"), f"weights_on must be 'output' or 'input', found {weights_on!r}")
    check_optional(keep_T, (rows,), torch.bool, x_TD, "keep [T]")
    if local_E is not None:
        require(local_E.numel() >= 1, f"local must be [global experts], found {describe(local_E)}")
        check_optional(local_E, (local_E.numel(),), torch.int32, x_TD, "local [global experts]")
    if plan is not None:
        check_plan_of(plan, rows, slots, experts)
        _same_device(plan.order_S, x_TD, "plan")
        check_tile_rows(plan.block_rows)
        given = [name for name, tensor in (("keep", keep_T), ("local", local_E)) if tensor is not None]
        require(not given, f"plan already says which pairs take part: make it with {given}, do not pass them again")


def require_plan(plan: object) -> None:
    require_kind(isinstance(plan, Plan), "plan must be what moe_kernels.plan.op makes", plan)


def check_plan_of(plan: Plan, rows: int, slots: int, experts: int) -> None:
    """Check that the sizes of ``plan`` fit these rows; only its values would show that it belongs to their ids."""
    require_plan(plan)
    pairs, held = plan.order_S.numel(), plan.ends_E.numel()
    fits = (pairs, plan.slots, held) == (rows * slots, slots, experts)
    of = f"{pairs} pairs of {plan.slots} slots and {held} experts"
    require(fits, f"plan must be of {rows * slots} pairs of {slots} slots and {experts} experts, found {of}")


def check_grouped_gemm(
    x_NI: Tensor,
    w_EOI: Tensor,
    plan: Plan,
    gather: str | None,
    is_gated: bool,
    bias_EO: Tensor | None,
    row_scale_S: Tensor | None,
    transpose_w: bool,
) -> None:
    floats = (*FLOATS, torch.float64)
    require(x_NI.dim() == 2 and x_NI.dtype in floats, f"x must be [rows, I] in {floats}, found {describe(x_NI)}")
    require(w_EOI.dim() == 3, f"w must be [E, O, I], found {describe(w_EOI)}")
    experts, out_width, in_width = w_EOI.shape
    depth, columns = (out_width, in_width) if transpose_w else (in_width, out_width)
    pairs = plan.order_S.shape[0]
    rows = pairs // plan.slots if gather == "token" else pairs
    require(gather in ("token", "pair", None), f"gather must be 'token', 'pair' or None, found {gather!r}")
    require(x_NI.shape == (rows, depth), f"x must be [{rows}, {depth}] for gather={gather!r}, found {describe(x_NI)}")
    require(w_EOI.numel() > 0, f"w must have experts, rows and columns, found {describe(w_EOI)}")
    check_tile_rows(plan.block_rows)
    require(w_EOI.dtype == x_NI.dtype, f"w must be {x_NI.dtype} like x, found {describe(w_EOI)}")
    require(plan.ends_E.shape == (experts,), f"plan is for {plan.ends_E.numel()} experts, w is {describe(w_EOI)}")
    require(not is_gated or columns % 2 == 0, f"a gated w must have an even number of columns, found {describe(w_EOI)}")
    _same_device(w_EOI, x_NI, "w")
    _same_device(plan.order_S, x_NI, "plan")
    check_optional(bias_EO, (experts, columns), x_NI.dtype, x_NI, "bias")
    check_optional(row_scale_S, (pairs,), torch.float32, x_NI, "row_scale")


def check_counts(counts_E: Tensor, experts: int, x_ND: Tensor) -> None:
    require_tensors(counts=counts_E)
    require(
        counts_E.shape == (experts,) and counts_E.dtype in (torch.int32, torch.int64),
        f"counts must be int32 or int64 of shape ({experts},), found {describe(counts_E)}",
    )
    _same_device(counts_E, x_ND, "counts")


def check_optional(tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor, name: str) -> None:
    if tensor is None:
        return
    fits = tuple(tensor.shape) == shape and tensor.dtype == dtype
    require(fits, f"{name} must be {dtype} of shape {shape}, found {describe(tensor)}")
    _same_device(tensor, like, name)


def _check_weight(weight: Weight, shape: tuple[int, ...], x_ND: Tensor, name: str) -> None:
    require(tuple(weight.shape) == shape, f"{name} must be {shape}, found {describe(weight)}")
    if isinstance(weight, QuantisedWeight):
        _same_device(weight.packed, x_ND, name)
        return
    require(weight.dtype == x_ND.dtype, f"{name} must be {x_ND.dtype} like x, found {describe(weight)}")
    require(weight.is_contiguous(), f"{name} must be contiguous, found {describe(weight)}")
    _same_device(weight, x_ND, name)


def _same_device(tensor: Tensor, like: Tensor, name: str) -> None:
    require(tensor.device == like.device, f"{name} is on {tensor.device}, x {describe(like)} on {like.device}")


def describe(weight: Weight) -> str:
    if isinstance(weight, QuantisedWeight):
        return f"{weight.format} of shape {tuple(weight.shape)}"
    return arguments.describe(weight)
