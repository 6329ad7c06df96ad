"""What an expert applies between its two matrices, in plain torch; ``activations.kernel`` is the same for kernels.

Legend: N rows, F expert width. A gated activation takes ``[N, 2F]``, gate columns first, and returns ``[N, F]``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_kernels.arguments import require

Activation = Literal["swiglu", "swiglu_oai", "gelu", "gelu_tanh", "relu", "silu", "identity"]
"""``swiglu``: silu(gate) x up. ``swiglu_oai``: gpt-oss's clamped form, :func:`_swiglu_oai`. The rest are not gated."""

GATED: frozenset[str] = frozenset({"swiglu", "swiglu_oai"})
SWIGLU_OAI_ALPHA = 1.702
SWIGLU_OAI_LIMIT = 7.0
Each = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
"""Applies a function to each element."""


def gated(activation: str) -> bool:
    """Whether the expert's first matrix has gate rows and up rows.

    Raises:
        ArgumentError: no such activation.
    """
    names = get_args(Activation)
    require(activation in names, f"activation must be one of {names}, found {activation!r}")
    return activation in GATED


def activate(h: Tensor, activation: Activation, each: Each = lambda op, x: op(x)) -> Tensor:
    """``[N, 2F] -> [N, F]`` if gated, else elementwise. In ``h``'s dtype. ``each`` applies what a gated one is made
    of."""
    if gated(activation):
        gate, up = h.chunk(2, dim=-1)
        return each(F.silu, gate) * up if activation == "swiglu" else _swiglu_oai(gate, up, each)
    match activation:
        case "gelu":
            return F.gelu(h)
        case "gelu_tanh":
            return F.gelu(h, approximate="tanh")
        case "relu":
            return F.relu(h)
        case "silu":
            return F.silu(h)
    return h


def _swiglu_oai(gate: Tensor, up: Tensor, each: Each) -> Tensor:
    """(clamp(up, -7, 7) + 1) x g sigmoid(1.702 g) with g = min(gate, 7). NaN passes through."""
    gate = gate.clamp(max=SWIGLU_OAI_LIMIT)
    up = up.clamp(-SWIGLU_OAI_LIMIT, SWIGLU_OAI_LIMIT)
    return (up + 1) * gate * each(torch.sigmoid, SWIGLU_OAI_ALPHA * gate)
