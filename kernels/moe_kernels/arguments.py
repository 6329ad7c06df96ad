"""Checks of what callers hand in. Shapes and dtypes only: values are never read, so no device is waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from moe_kernels.plan import Plan

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class ArgumentError(ValueError):
    """A tensor or a flag does not fit the op. The message names the argument and what it must be."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ArgumentError(message)


def check_route(logits_TE: Tensor, top_k: int, bias_E: Tensor | None, groups: int, top_groups: int) -> None:
    require(logits_TE.dim() == 2, f"logits must be [T, E], found {tuple(logits_TE.shape)}")
    require(logits_TE.is_floating_point(), f"logits must be floating point, found {logits_TE.dtype}")
    experts = logits_TE.shape[1]
    require(groups >= 1 and experts % groups == 0, f"{experts} experts do not divide into groups={groups}")
    require(1 <= top_groups <= groups, f"top_groups must be in 1..{groups}, found {top_groups}")
    choosable = experts // groups * top_groups
    require(1 <= top_k <= choosable, f"top_k must be in 1..{choosable} (experts to choose from), found {top_k}")
    if bias_E is not None:
        require(bias_E.shape == (experts,), f"correction_bias must be [{experts}], found {tuple(bias_E.shape)}")


def check_route_flags(score: str, order: str, group_score: str, ids_dtype: torch.dtype) -> None:
    require(score in ("softmax", "sigmoid"), f"score must be softmax or sigmoid, found {score!r}")
    require(order in ("score_first", "choose_first"), f"order must be score_first or choose_first, found {order!r}")
    require(group_score in ("max", "top2_sum"), f"group_score must be max or top2_sum, found {group_score!r}")
    require(ids_dtype in (torch.int32, torch.int64), f"ids_dtype must be int32 or int64, found {ids_dtype}")


def check_route_tensors(logits_TE: Tensor, bias_E: Tensor | None, keep_T: Tensor | None) -> None:
    if bias_E is not None:
        require(bias_E.is_floating_point(), f"correction_bias must be floating point, found {bias_E.dtype}")
        _check_device(bias_E, logits_TE, "correction_bias", "logits")
    if keep_T is not None:
        _check_like(keep_T, (logits_TE.shape[0],), torch.bool, "keep [T]")
        _check_device(keep_T, logits_TE, "keep", "logits")


def check_plan(
    ids_TK: Tensor,
    experts: int,
    block_rows: int,
    capacity: int | None,
    first_come: str,
    keep_T: Tensor | None,
    local_E: Tensor | None,
) -> None:
    require(ids_TK.dim() == 2 and ids_TK.shape[1] >= 1, f"ids must be [T, K], found {_describe(ids_TK)}")
    require(ids_TK.dtype in (torch.int32, torch.int64), f"ids must be int32 or int64, found {_describe(ids_TK)}")
    require(ids_TK.numel() < 2**31, f"ids must number less than 2**31, found {_describe(ids_TK)}")
    require(experts >= 1, f"experts must be at least 1, found {experts}")
    require(block_rows >= 1, f"block_rows must be at least 1, found {block_rows}")
    require(capacity is None or capacity >= 0, f"capacity must not be negative, found {capacity}")
    require(first_come in ("token", "slot"), f"first_come must be token or slot, found {first_come!r}")
    if keep_T is not None:
        _check_like(keep_T, (ids_TK.shape[0],), torch.bool, "keep [T]")
        _check_device(keep_T, ids_TK, "keep", "ids")
    if local_E is not None:
        require(
            local_E.dim() == 1 and local_E.shape[0] >= 1 and local_E.dtype == torch.int32,
            f"local must be [global experts] of torch.int32, found {_describe(local_E)}",
        )
        _check_device(local_E, ids_TK, "local", "ids")


def _check_device(tensor: Tensor, like: Tensor, name: str, like_name: str) -> None:
    require(tensor.device == like.device, f"{name} is on {tensor.device}, {like_name} on {like.device}")


def check_moe(x_TD: Tensor, w_gate_up_E2FD: Tensor, w_down_EDF: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
    require(x_TD.dim() == 2 and x_TD.dtype in FLOATS, f"x must be [T, D] in {FLOATS}, found {_describe(x_TD)}")
    rows, hidden = x_TD.shape
    require(w_down_EDF.dim() == 3, f"w_down must be [E, D, F], found {_describe(w_down_EDF)}")
    experts, _, width = w_down_EDF.shape
    _check_like(w_down_EDF, (experts, hidden, width), x_TD.dtype, "w_down [E, D, F]")
    _check_like(w_gate_up_E2FD, (experts, 2 * width, hidden), x_TD.dtype, "w_gate_up [E, 2F, D]")
    require(ids_TK.dim() == 2 and ids_TK.shape[0] == rows, f"ids must be [T={rows}, K], found {_describe(ids_TK)}")
    _check_like(ids_TK, tuple(ids_TK.shape), torch.int64, "ids [T, K]")
    _check_like(weights_TK, tuple(ids_TK.shape), torch.float32, "weights [T, K]")


def _check_like(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> None:
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ArgumentError(f"{name} must be {dtype} of shape {shape}, found {_describe(tensor)}")


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def check_quantise(w_EOI: Tensor, bits: int, group: int) -> None:
    require(bits in (4, 8), f"bits must be 4 or 8, found {bits!r}")
    require(group in (0, 128), f"group must be 0 (per channel) or 128, found {group!r}")
    fits = w_EOI.dim() == 3 and w_EOI.dtype in FLOATS
    require(fits, f"weights must be [E, O, I] in {FLOATS}, found {_describe(w_EOI)}")
    _check_quantisable(w_EOI.shape[2], bits, group)


def check_quantised(packed: Tensor, scales: Tensor, bits: int, group: int, in_features: int) -> None:
    require(bits in (4, 8), f"bits must be 4 or 8, found {bits!r}")
    require(group in (0, 128), f"group must be 0 (per channel) or 128, found {group!r}")
    _check_quantisable(in_features, bits, group)
    require(packed.dim() == 3, f"packed weights must be [E, O, I x bits / 8], found {_describe(packed)}")
    experts, out_features, _ = packed.shape
    wide = (experts, out_features, in_features * bits // 8)
    _check_like(packed, wide, torch.uint8, f"packed weights of {in_features} columns in {bits} bits")
    groups = in_features // group if group else 1
    _check_like(scales, (experts, out_features, groups), torch.float16, "scales [E, O, G]")
    _check_device(scales, packed, "scales", "packed weights")
    require(packed.is_contiguous() and scales.is_contiguous(), "packed weights and scales must be contiguous")
    # Kernels load 16 bytes at a time.
    require(packed.data_ptr() % 16 == 0, "packed weights must be contiguous and start at a multiple of 16 bytes")


def _check_quantisable(in_features: int, bits: int, group: int) -> None:
    step = 16 if bits == 8 and not group else 128
    what = f"{bits} bits " + (f"in groups of {group}" if group else "per channel")
    fits = in_features > 0 and in_features % step == 0
    require(fits, f"{what} needs I in multiples of {step}, found I={in_features}")


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
    pairs, slots = plan.order_S.shape[0], plan.slots
    require(fan_out in (None, 1, slots), f"fan_out must be 1 or the plan's {slots} slots, found {fan_out}")
    require(rows != "grouped" or fan_out in (None, 1), f"grouped rows have fan_out 1, found {fan_out}")
    require(gates is None or not grouped_out, "gates sum over a token's slots: grouped_out must be false")
    _check_matrix_of_experts(x, w_EOI, plan, "w [E, O, I]")
    held = pairs // slots if rows == "token" else pairs
    _check_like(x, (held, w_EOI.shape[2]), w_EOI.dtype, f"x ({rows} rows)")
    require(x.is_contiguous(), f"x must be contiguous, found strides {x.stride()}")
    if gates is not None:
        check_gates(gates, x, plan)
    if bias_EO is not None:
        _check_like(bias_EO, tuple(w_EOI.shape[:2]), x.dtype, "bias [E, O]")
        _check_device(bias_EO, x, "bias", "x")


def check_gates(gates_TK: Tensor, x: Tensor, plan: Plan) -> None:
    shape = (plan.order_S.shape[0] // plan.slots, plan.slots)
    _check_like(gates_TK, shape, torch.promote_types(x.dtype, torch.float32), "gates [T, K]")
    _check_device(gates_TK, x, "gates", "x")


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
    _check_matrix_of_experts(x_TD, w_in, plan, "w_in [E, F or 2F, D]")
    _check_matrix_of_experts(x_TD, w_out, plan, "w_out [E, D, F]")
    experts, hidden, width = w_out.shape
    _check_like(w_in, (experts, inner * width, hidden), w_out.dtype, f"w_in [E, {inner} x F, D]")
    _check_like(x_TD, (plan.order_S.shape[0] // plan.slots, hidden), w_out.dtype, "x [T, D]")
    require(x_TD.is_contiguous(), f"x must be contiguous, found strides {x_TD.stride()}")
    check_gates(gates_TK, x_TD, plan)
    for bias, columns, name in ((bias_in, inner * width, "bias_in"), (bias_out, hidden, "bias_out")):
        if bias is not None:
            _check_like(bias, (experts, columns), x_TD.dtype, name)
            _check_device(bias, x_TD, name, "x")


def _check_matrix_of_experts(x: Tensor, w: Tensor, plan: Plan, name: str) -> None:
    exact_on_cpu = (torch.float64,) if x.device.type == "cpu" else ()
    dtypes = FLOATS + exact_on_cpu
    require(x.dim() == 2 and x.dtype in dtypes, f"x must be a matrix in {dtypes}, found {_describe(x)}")
    require(w.dim() == 3 and w.is_contiguous(), f"{name} must be contiguous, found {_describe(w)}")
    experts = plan.ends_E.shape[0]
    require(w.shape[0] == experts, f"{name} must be of the plan's {experts} experts, found {_describe(w)}")
    _check_device(w, x, name, "x")
    _check_device(plan.order_S, x, "plan", "x")
