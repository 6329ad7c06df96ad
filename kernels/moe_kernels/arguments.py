"""Checks of what callers hand in. Shapes and dtypes only: values are never read, so no device is waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from moe_kernels.plan import Plan

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TILE_ROWS = (16, 32, 64, 128)
"""Rows of a plan's tiles that the products by expert are compiled for: more do not fit shared memory."""


class ArgumentError(ValueError):
    """A tensor or a flag does not fit the op. The message names the argument and what it must be."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ArgumentError(message)


def check_no_gradient(op: str, instead: str, **tensors: object) -> None:
    """Refuses what would come out without the gradient that its inputs ask for.

    Raises:
        ArgumentError: gradients are being recorded and one of ``tensors`` wants them.
    """
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor):
            message = f"{op} has no backward pass, and {name} ({describe(tensor)}) requires a gradient: {instead}"
            require(not tensor.requires_grad, message)


def check_count(name: str, value: object, least: int) -> None:
    require(isinstance(value, int), f"{name} must be an integer, found {value!r}")
    assert isinstance(value, int)
    bound = f"be at least {least}" if least else "not be negative"
    require(value >= least, f"{name} must {bound}, found {value}")


def check_tile_rows(plan: Plan) -> None:
    """Kernels hold a tile's rows in registers and shared memory; :func:`moe_kernels.plan` itself takes any number."""
    allowed = plan.block_rows in TILE_ROWS
    require(allowed, f"plan must have block_rows in {TILE_ROWS} for expert matrices, found {plan.block_rows}")


def check_combine(out_SD: Tensor, place_TK: Tensor, weights_TK: Tensor | None) -> None:
    floats = _dtypes_on(out_SD.device)
    require(out_SD.dim() == 2 and out_SD.dtype in floats, f"out must be [S, D] in {floats}, found {describe(out_SD)}")
    require(
        place_TK.dim() == 2 and place_TK.dtype in (torch.int32, torch.int64),
        f"place must be [T, K] in int32 or int64, found {describe(place_TK)}",
    )
    _check_device(place_TK, out_SD, "place", "out")
    if weights_TK is not None:
        _check_like(weights_TK, tuple(place_TK.shape), torch.promote_types(out_SD.dtype, torch.float32), "weights")
        _check_device(weights_TK, out_SD, "weights", "out")


def check_module_rows(x: Tensor, w_EOI: Tensor) -> None:
    """What a module is called with fits its experts' first matrix."""
    hidden = w_EOI.shape[2]
    fits = x.dim() >= 1 and x.shape[-1] == hidden and x.dtype == w_EOI.dtype
    require(fits, f"x must be [..., D={hidden}] in the module's {w_EOI.dtype}, found {describe(x)}")
    _check_device(x, w_EOI, "x", "the module")


def check_module_choice(x_TD: Tensor, experts: int, logits_TE: Tensor | None, ids_TK: Tensor | None) -> None:
    rows = x_TD.shape[0]
    if logits_TE is not None:
        fits = tuple(logits_TE.shape) == (rows, experts)
        require(fits, f"logits must be [T={rows}, E={experts}], found {describe(logits_TE)}")
        _check_device(logits_TE, x_TD, "logits", "x")
    if ids_TK is not None:
        fits = ids_TK.dim() == 2 and ids_TK.shape[0] == rows
        require(fits, f"ids must be [T={rows}, K], found {describe(ids_TK)}")
        _check_device(ids_TK, x_TD, "ids", "x")


def check_positions(positions_BL: Tensor | None, x_BLD: Tensor) -> None:
    if positions_BL is not None:
        batch, length, _ = x_BLD.shape
        fits = tuple(positions_BL.shape) in ((batch, length), (1, length))
        require(fits, f"positions must be [{batch} or 1, {length}], found {describe(positions_BL)}")
        _check_device(positions_BL, x_BLD, "positions", "x")


def check_route(logits_TE: Tensor, top_k: int, bias_E: Tensor | None, groups: int, top_groups: int) -> None:
    require(logits_TE.dim() == 2, f"logits must be [T, E], found {tuple(logits_TE.shape)}")
    require(logits_TE.is_floating_point(), f"logits must be floating point, found {logits_TE.dtype}")
    experts = logits_TE.shape[1]
    require(groups >= 1 and experts % groups == 0, f"{experts} experts do not divide into groups={groups}")
    require(1 <= top_groups <= groups, f"top_groups must be in 1..{groups}, found {top_groups}")
    choosable = experts // groups * top_groups
    fits = isinstance(top_k, int) and 1 <= top_k <= choosable
    require(fits, f"top_k must be in 1..{choosable} (experts to choose from), found {top_k}")
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
    require(ids_TK.dim() == 2 and ids_TK.shape[1] >= 1, f"ids must be [T, K], found {describe(ids_TK)}")
    require(ids_TK.dtype in (torch.int32, torch.int64), f"ids must be int32 or int64, found {describe(ids_TK)}")
    require(ids_TK.numel() < 2**31, f"ids must number less than 2**31, found {describe(ids_TK)}")
    check_count("experts", experts, 1)
    check_count("block_rows", block_rows, 1)
    if capacity is not None:
        check_count("capacity", capacity, 0)
    require(first_come in ("token", "slot"), f"first_come must be token or slot, found {first_come!r}")
    if keep_T is not None:
        _check_like(keep_T, (ids_TK.shape[0],), torch.bool, "keep [T]")
        _check_device(keep_T, ids_TK, "keep", "ids")
    if local_E is not None:
        require(
            local_E.dim() == 1 and local_E.shape[0] >= 1 and local_E.dtype == torch.int32,
            f"local must be [global experts] of torch.int32, found {describe(local_E)}",
        )
        _check_device(local_E, ids_TK, "local", "ids")


def _check_device(tensor: Tensor, like: Tensor, name: str, like_name: str) -> None:
    require(tensor.device == like.device, f"{name} is on {tensor.device}, {like_name} on {like.device}")


def _check_like(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> None:
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ArgumentError(f"{name} must be {dtype} of shape {shape}, found {describe(tensor)}")


def describe(tensor: Tensor) -> str:
    """Dtype and shape, and strides where they are not the usual ones."""
    strides = "" if tensor.is_contiguous() else f" and strides {tuple(tensor.stride())}"
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}{strides}"


def check_quantise(w_EOI: Tensor, bits: int, group: int) -> None:
    require(bits in (4, 8), f"bits must be 4 or 8, found {bits!r}")
    require(group in (0, 128), f"group must be 0 (per channel) or 128, found {group!r}")
    fits = w_EOI.dim() == 3 and w_EOI.dtype in FLOATS
    require(fits, f"weights must be [E, O, I] in {FLOATS}, found {describe(w_EOI)}")
    _check_quantisable(w_EOI.shape[2], bits, group)


def check_quantised(packed: Tensor, scales: Tensor, bits: int, group: int, in_features: int) -> None:
    require(bits in (4, 8), f"bits must be 4 or 8, found {bits!r}")
    require(group in (0, 128), f"group must be 0 (per channel) or 128, found {group!r}")
    _check_quantisable(in_features, bits, group)
    require(packed.dim() == 3, f"packed weights must be [E, O, I x bits / 8], found {describe(packed)}")
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
    require(x.is_contiguous(), f"x must be contiguous, found {describe(x)}")
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
    require(x_TD.is_contiguous(), f"x must be contiguous, found {describe(x_TD)}")
    check_gates(gates_TK, x_TD, plan)
    for bias, columns, name in ((bias_in, inner * width, "bias_in"), (bias_out, hidden, "bias_out")):
        if bias is not None:
            _check_like(bias, (experts, columns), x_TD.dtype, name)
            _check_device(bias, x_TD, name, "x")


def _check_matrix_of_experts(x: Tensor, w: Tensor, plan: Plan, name: str) -> None:
    dtypes = _dtypes_on(x.device)
    require(x.dim() == 2 and x.dtype in dtypes, f"x must be a matrix in {dtypes}, found {describe(x)}")
    require(w.dim() == 3 and w.is_contiguous(), f"{name} must be contiguous, found {describe(w)}")
    experts = plan.ends_E.shape[0]
    require(w.shape[0] == experts, f"{name} must be of the plan's {experts} experts, found {describe(w)}")
    require(w.numel() > 0, f"{name} must have rows and columns, found {describe(w)}")
    check_tile_rows(plan)
    _check_device(w, x, name, "x")
    _check_device(plan.order_S, x, "plan", "x")


def _dtypes_on(device: torch.device) -> tuple[torch.dtype, ...]:
    """The twins can be exact; kernels sum in float32."""
    return (*FLOATS, torch.float64) if device.type == "cpu" else FLOATS
