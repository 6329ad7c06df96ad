"""Trainable MoE MLPs for the suites: ours, torch's ``grouped_mm`` with autograd, and the naive loop over experts.

All three share weights' shapes (``[E, F, D]``, ``[E, D, F]``), routing and activation, and are timed in the same way.
Legend: T tokens, D hidden, F expert width, E experts, K slots, S = T x K pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.draws import Draw
from bench.measuring import Settings, release
from bench.providers.base import Unsupported
from bench.providers.torch_chains import sort_pairs
from bench.results import Row
from bench.shapes import LayerShape
from bench.timing import Call, Timing, measure, peak_mib
from moe_kernels.activations.op import Activation, activate
from moe_kernels.plan.op import plan
from moe_kernels.training.sparse_mlp import sparse_mlp


class Experts(nn.Module):
    """The parameters, scaled as a fresh model's are."""

    waits: ClassVar[bool] = False
    """Its forward pass reads something back, so it must not be captured: an attempt that fails leaves torch's random
    numbers in the state of a capture, and whoever draws next fails too."""

    def __init__(self, shape: LayerShape, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.activation: Activation = shape.activation  # type: ignore[assignment]  # a name of ours by construction
        w_in = torch.randn(shape.E, shape.in_rows, shape.d, dtype=dtype, device=device)
        w_out = torch.randn(shape.E, shape.d, shape.f, dtype=dtype, device=device)
        self.w_in = nn.Parameter(w_in.div_(math.sqrt(shape.d)))
        self.w_out = nn.Parameter(w_out.div_(math.sqrt(shape.f)))


class Ours(Experts):
    def forward(self, x_TD: Tensor, draw: Draw) -> Tensor:
        order = plan(draw.ids_TK, self.w_in.shape[0])
        return sparse_mlp(x_TD, self.w_in, self.w_out, order, draw.weights_TK, activation=self.activation)


class GroupedMm(Experts):
    def forward(self, x_TD: Tensor, draw: Draw) -> Tensor:
        rows, slots = draw.ids_TK.shape
        order_S, ends_E = sort_pairs(draw.ids_TK, self.w_in.shape[0])
        h = activate(F.grouped_mm(x_TD[order_S // slots], self.w_in.transpose(1, 2), offs=ends_E), self.activation)
        out_SD = F.grouped_mm(h, self.w_out.transpose(1, 2), offs=ends_E)
        place_S = torch.empty_like(order_S).scatter_(0, order_S, torch.arange(len(order_S), device=order_S.device))
        out_TKD = out_SD[place_S].view(rows, slots, -1)
        return (out_TKD * draw.weights_TK.unsqueeze(2).to(out_TKD.dtype)).sum(dim=1)


class Naive(Experts):
    """Expert after expert over a boolean mask of its tokens, as Hugging Face's first Mixtral did."""

    waits = True

    def forward(self, x_TD: Tensor, draw: Draw) -> Tensor:
        y_TD = torch.zeros_like(x_TD)
        for expert in range(self.w_in.shape[0]):
            token_N, slot_N = torch.where(draw.ids_TK == expert)
            h = activate(x_TD[token_N] @ self.w_in[expert].t(), self.activation) @ self.w_out[expert].t()
            y_TD = y_TD.index_add(0, token_N, h * draw.weights_TK[token_N, slot_N].unsqueeze(1).to(h.dtype))
        return y_TD


KINDS: Final[dict[str, type[Experts]]] = {"ours": Ours, "grouped_mm": GroupedMm, "torch": Naive}


def forward_call(module: nn.Module, *inputs: object) -> Call:
    def call(_: int) -> object:
        with torch.no_grad():
            return module(*inputs)

    return call


def training_call(module: nn.Module, x: Tensor, *inputs: object) -> Call:
    """Forward and backward to weights and ``x``; gradients are dropped afterwards, so each call allocates them."""
    x = x.detach().requires_grad_()
    dy = torch.randn_like(x)

    def call(_: int) -> object:
        module(x, *inputs).backward(dy)
        dx, x.grad = x.grad, None
        module.zero_grad(set_to_none=True)
        return dx

    return call


def timed(
    call: Callable[[], Call],
    row: Row,
    settings: Settings,
    *,
    graph: bool = False,
    memory: bool = True,
    copies: int = 1,
) -> Row:
    """``row`` completed by the timing and peak memory of the call that ``call()`` builds, or by the error."""
    timing: Timing | None = None
    mib: float | None = None
    error = ""
    try:
        run = call()
        mib = peak_mib(run) if memory and settings.on_gpu else None
        timing = measure(run, copies=copies, device=settings.device, budget_s=settings.budget_s, graph=graph)
    except Unsupported as unsupported:
        error = f"unsupported: {unsupported}"
    except Exception as failure:  # noqa: BLE001 - a peer that fails is a result, not the end of the run
        error = f"{type(failure).__name__}: {failure}"[:300]
    release(settings)
    return Row(
        suite=row.suite, op=row.op, provider=row.provider, shape=row.shape, rows=row.rows, dtype=row.dtype,
        floor_us=row.floor_us, timing=timing, memory_mib=mib, error=error,
    )  # fmt: skip
