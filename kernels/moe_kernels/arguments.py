"""Checks of what callers hand in. Shapes and dtypes only: values are never read, so no device is waited for."""

from __future__ import annotations

import numbers
import reprlib
from typing import TypeGuard

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TILE_ROWS = (16, 32, 64, 128)
"""Rows of a plan's tiles that the products by expert are compiled for: more do not fit shared memory."""
MAX_TILE_ROWS = 2**30
"""Kernels round counts of pairs up to whole tiles in int32."""


class ArgumentError(ValueError):
    """A tensor or a flag does not fit the op. The message names the argument and what it must be."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ArgumentError(message)


def require_tensors(**values: object) -> None:
    """Each of ``values`` is a tensor, and all its elements lie in memory.

    Raises:
        ArgumentError: None, a list, a numpy array, a sparse tensor.
    """
    for name, value in values.items():
        if not isinstance(value, Tensor):
            require_kind(False, f"{name} must be a tensor", value)
        elif value.layout != torch.strided:
            raise ArgumentError(f"{name} must be dense, found {value.layout} of shape {tuple(value.shape)}")


def require_optional_tensors(**values: object) -> None:
    """:func:`require_tensors` of those that are not None."""
    for name, value in values.items():
        if value is not None:
            require_tensors(**{name: value})


def require_kind(condition: bool, message: str, value: object) -> None:
    """:func:`require` of what may be anything, which is put into words only if it must be: ``list [1, 2, 3]``."""
    if not condition:
        shown = describe(value) if isinstance(value, Tensor) else f"{type(value).__name__} {reprlib.repr(value)}"
        raise ArgumentError(f"{message}, found {'None' if value is None else shown}")


def check_no_gradient(op: str, instead: str, **tensors: object) -> None:
    """Refuses what would come out without the gradient that its inputs ask for.

    Raises:
        ArgumentError: gradients are being recorded and one of ``tensors`` wants them.
    """
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            what = f"{name} ({describe(tensor)}) requires a gradient"
            raise ArgumentError(f"{op} has no backward pass, and {what}: {instead}")


def check_count(name: str, value: object, least: int, most: int | None = None) -> None:
    if is_integer(value) and value >= least and (most is None or value <= most):
        return  # no message is put together for what is right
    if not is_integer(value):
        raise ArgumentError(f"{name} must be an integer, found {value!r}")
    bound = f"be at least {least}" if least else "not be negative"
    require(value >= least, f"{name} must {bound}, found {value}")
    require(most is None or value <= most, f"{name} must be at most {most}, found {value}")


def is_integer(value: object) -> TypeGuard[int]:
    """True and False are none: who counts with them has confused two arguments."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_tile_rows(block_rows: int) -> None:
    """Kernels hold a tile's rows in registers and shared memory; :func:`moe_kernels.plan.op` itself takes any
    number.
    """
    allowed = block_rows in TILE_ROWS
    require(allowed, f"plan must have block_rows in {TILE_ROWS} for expert matrices, found {block_rows}")


def check_combine(out_SD: Tensor, place_TK: Tensor, weights_TK: Tensor | None) -> None:
    require_tensors(out=out_SD, place=place_TK)
    require_optional_tensors(weights=weights_TK)
    floats = dtypes_on(out_SD.device)
    require(out_SD.dim() == 2 and out_SD.dtype in floats, f"out must be [S, D] in {floats}, found {describe(out_SD)}")
    require(
        place_TK.dim() == 2 and place_TK.dtype in (torch.int32, torch.int64),
        f"place must be [T, K] in int32 or int64, found {describe(place_TK)}",
    )
    check_device(place_TK, out_SD, "place", "out")
    if weights_TK is not None:
        check_like(weights_TK, tuple(place_TK.shape), torch.promote_types(out_SD.dtype, torch.float32), "weights")
        check_device(weights_TK, out_SD, "weights", "out")


def check_route(logits_TE: Tensor, top_k: int, bias_E: Tensor | None, groups: int, top_groups: int) -> None:
    require_tensors(logits=logits_TE)
    require_optional_tensors(correction_bias=bias_E)
    require(logits_TE.dim() == 2, f"logits must be [T, E], found {tuple(logits_TE.shape)}")
    require(logits_TE.is_floating_point(), f"logits must be floating point, found {logits_TE.dtype}")
    experts = logits_TE.shape[1]
    check_count("groups", groups, 1)
    check_count("top_groups", top_groups, 1)
    require(experts % groups == 0, f"{experts} experts do not divide into groups={groups}")
    require(1 <= top_groups <= groups, f"top_groups must be in 1..{groups}, found {top_groups}")
    choosable = experts // groups * top_groups
    fits = is_integer(top_k) and 1 <= top_k <= choosable
    require(fits, f"top_k must be in 1..{choosable} (experts to choose from), found {top_k!r}")
    if bias_E is not None:
        require(bias_E.shape == (experts,), f"correction_bias must be [{experts}], found {tuple(bias_E.shape)}")


def check_route_flags(score: str, order: str, group_score: str, scale: float, ids_dtype: torch.dtype) -> None:
    require(score in ("softmax", "sigmoid"), f"score must be softmax or sigmoid, found {score!r}")
    require(order in ("score_first", "choose_first"), f"order must be score_first or choose_first, found {order!r}")
    require(group_score in ("max", "top2_sum"), f"group_score must be max or top2_sum, found {group_score!r}")
    require_kind(isinstance(scale, (float, int, numbers.Real)), "scale must be a number", scale)
    require(ids_dtype in (torch.int32, torch.int64), f"ids_dtype must be int32 or int64, found {ids_dtype}")


def check_route_tensors(logits_TE: Tensor, bias_E: Tensor | None, keep_T: Tensor | None) -> None:
    require_optional_tensors(keep=keep_T)
    if bias_E is not None:
        require(bias_E.is_floating_point(), f"correction_bias must be floating point, found {bias_E.dtype}")
        check_device(bias_E, logits_TE, "correction_bias", "logits")
    if keep_T is not None:
        check_like(keep_T, (logits_TE.shape[0],), torch.bool, "keep [T]")
        check_device(keep_T, logits_TE, "keep", "logits")


def check_plan(
    ids_TK: Tensor,
    experts: int,
    block_rows: int,
    capacity: int | None,
    first_come: str,
    keep_T: Tensor | None,
    local_E: Tensor | None,
) -> None:
    require_tensors(ids=ids_TK)
    require_optional_tensors(keep=keep_T, local=local_E)
    require(ids_TK.dim() == 2 and ids_TK.shape[1] >= 1, f"ids must be [T, K], found {describe(ids_TK)}")
    require(ids_TK.dtype in (torch.int32, torch.int64), f"ids must be int32 or int64, found {describe(ids_TK)}")
    require(ids_TK.numel() < 2**31, f"ids must number less than 2**31, found {describe(ids_TK)}")
    check_count("experts", experts, 1, 2**31 - 1)
    check_count("block_rows", block_rows, 1, MAX_TILE_ROWS)
    if capacity is not None:
        check_count("capacity", capacity, 0)
    require(first_come in ("token", "slot"), f"first_come must be token or slot, found {first_come!r}")
    if keep_T is not None:
        check_like(keep_T, (ids_TK.shape[0],), torch.bool, "keep [T]")
        check_device(keep_T, ids_TK, "keep", "ids")
    if local_E is not None:
        require(
            local_E.dim() == 1 and local_E.shape[0] >= 1 and local_E.dtype == torch.int32,
            f"local must be [global experts] of torch.int32, found {describe(local_E)}",
        )
        check_device(local_E, ids_TK, "local", "ids")


def check_device(tensor: Tensor, like: Tensor, name: str, like_name: str) -> None:
    require(tensor.device == like.device, f"{name} is on {tensor.device}, {like_name} on {like.device}")


def check_like(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> None:
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ArgumentError(f"{name} must be {dtype} of shape {shape}, found {describe(tensor)}")


def describe(tensor: Tensor) -> str:
    """Dtype and shape, and strides where they are not the usual ones."""
    strides = "" if tensor.is_contiguous() else f" and strides {tuple(tensor.stride())}"
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}{strides}"


def dtypes_on(device: torch.device) -> tuple[torch.dtype, ...]:
    """The references can be exact; kernels sum in float32."""
    return (*FLOATS, torch.float64) if device.type == "cpu" else FLOATS


def check_first_derivative(op: str) -> None:
    """The first line of every backward pass: recording gradients of gradients would leave terms out, unseen.

    Plain backward passes, ``retain_graph`` and checkpoints run it without recording.

    Raises:
        ArgumentError: ``create_graph=True``.
    """
    require(not torch.is_grad_enabled(), f"{op} has no second derivative: do not pass create_graph=True")


def check_sinks(sinks_N: Tensor | None, q_TNH: Tensor) -> None:
    """An attention's sinks: one for each query head of ``q``."""
    require_optional_tensors(sinks=sinks_N)
    if sinks_N is not None:
        heads = q_TNH.shape[1]
        fits = sinks_N.shape == (heads,) and sinks_N.dtype in FLOATS
        require(fits, f"sinks must be [{heads}] in {FLOATS}, found {describe(sinks_N)}")
        check_device(sinks_N, q_TNH, "sinks", "q")
