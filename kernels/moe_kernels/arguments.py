"""Checks of what callers hand in. Shapes and dtypes only: values are never read, so no device is waited for."""

from __future__ import annotations

import torch
from torch import Tensor

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
