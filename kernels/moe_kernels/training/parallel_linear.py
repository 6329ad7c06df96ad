"""A linear layer per expert on rows that lie grouped or scattered, forward and backward (ScatterMoE 2.2).

The products read scattered rows where they lie; nothing is padded, and nothing is copied in the forward pass.
Legend: T tokens, K slots per token, S = T x K pairs (pair p = t K + k), E experts, I input columns, O output columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_kernels import backend
from moe_kernels.arguments import check_first_derivative
from moe_kernels.combine.op import combine_places
from moe_kernels.grouped_gemm.op import Gather, grouped_gemm
from moe_kernels.plan.types import Plan
from moe_kernels.training.checks import check_parallel_linear
from moe_kernels.training.grouped_outer.op import Rows, grouped_outer, grouped_sum
from moe_kernels.training.pair_rows.op import group_rows, pair_dots

_GATHER: dict[Rows, Gather] = {"grouped": None, "token": "token", "pair": "pair"}


@backend.eager
def parallel_linear(
    x: Tensor,
    w_EOI: Tensor,
    plan: Plan,
    *,
    gates: Tensor | None = None,
    grouped_in: bool = False,
    grouped_out: bool = False,
    bias_EO: Tensor | None = None,
    fan_out: int | None = None,
) -> Tensor:
    """Row of pair p = W[e] x[row of p] + b[e], where e is the pair's expert; the four cases of ScatterMoE's figure 2.

    Differentiable once in ``x``, ``w_EOI``, ``gates`` and ``bias_EO``. Deterministic: every sum has a fixed order.
    Pairs that no expert takes contribute nothing and get zero gradients.

    Args:
        x: ``[T, I]``; if ``fan_out`` is 1 ``[S, I]`` by pair; if ``grouped_in`` ``[S, I]`` in the plan's grouped
            order. float32, bfloat16 or float16 (on a CPU float64 too), contiguous.
        w_EOI: same dtype, contiguous.
        plan: of these pairs, from :func:`moe_kernels.plan.op`, ``block_rows`` 16, 32, 64 or 128.
        gates: ``[T, K]`` float32 (float64 for float64): the result is y[t] = sum over k = 0, 1, ... of
            gates[t, k] x row (t, k), added in float32 and rounded once.
        grouped_out: rows in grouped order instead of by pair; not with ``gates``.
        bias_EO: same dtype.
        fan_out: how many pairs share a scattered row: K (the default) or 1.

    Returns:
        In ``x``'s dtype: ``[T, O]`` with ``gates``, else ``[S, O]``; rows of pairs that no expert takes are zero.

    Raises:
        ArgumentError: a shape, dtype, device or flag does not fit; in the backward pass, ``create_graph=True``.

    Example: T = 1, K = 2, experts ``[[1, 0]]``, W = ``[[[10]], [[100]]]``, x ``[[3]]``: by pair ``[[300], [30]]``,
    grouped ``[[30], [300]]``, with gates ``[[1, 0.5]]`` ``[[315]]``.
    """
    rows: Rows = "grouped" if grouped_in else "token" if fan_out is None or fan_out == plan.slots else "pair"
    check_parallel_linear(x, w_EOI, plan, gates, bias_EO, rows=rows, grouped_out=grouped_out, fan_out=fan_out)
    gates, bias_EO = backend.packed(gates), backend.packed(bias_EO)
    with backend.device_of(x):
        y: Tensor = _ParallelLinear.apply(x, w_EOI, gates, bias_EO, plan, rows, grouped_out)  # type: ignore[no-untyped-call]
    return y


class _ParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w_EOI: Tensor,
        gates: Tensor | None,
        bias_EO: Tensor | None,
        plan: Plan,
        rows: Rows,
        grouped_out: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, w_EOI, gates, bias_EO)
        ctx.plan, ctx.rows, ctx.grouped_out = plan, rows, grouped_out
        scatter = not grouped_out and gates is None
        y_SO = grouped_gemm(x, w_EOI, plan, gather=_GATHER[rows], scatter=scatter, bias_EO=bias_EO)
        return y_SO if gates is None else combine_places(y_SO, plan.place_S.view(-1, plan.slots), gates)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative("parallel_linear")
        x, w_EOI, gates, bias_EO = ctx.saved_tensors
        layer = _Backward(dy.contiguous(), x, w_EOI, gates, ctx.plan, ctx.rows, ctx.grouped_out)
        need_x, need_w, need_gates, need_bias = ctx.needs_input_grad[:4]
        du_SI = layer.input_rows() if need_x or need_gates else None
        return (
            layer.input_gradient(du_SI) if need_x and du_SI is not None else None,
            layer.weight_gradient() if need_w else None,
            layer.gate_gradient(du_SI, bias_EO) if need_gates and du_SI is not None else None,
            grouped_sum(layer.dy, ctx.plan, rows=layer.dy_rows, gates_TK=gates) if need_bias else None,
            None,
            None,
            None,
        )


class _Backward:
    """ScatterMoE's algorithm 2, without keeping the rows that the gates weighed.

    Since y[t] = sum over k of g x row, the gradient of g is row . dy[t] = x . (W^T dy[t]) + b . dy[t]: the product
    that the gradient of x needs anyway also answers for the gates, and only gates enter after it.
    """

    def __init__(
        self, dy: Tensor, x: Tensor, w_EOI: Tensor, gates: Tensor | None, plan: Plan, rows: Rows, grouped_out: bool
    ) -> None:
        self.dy, self.x, self.w_EOI, self.gates, self.plan, self.rows = dy, x, w_EOI, gates, plan, rows
        self.dy_rows: Rows = "grouped" if grouped_out else "pair" if gates is None else "token"

    def input_rows(self) -> Tensor:
        """W^T dy per pair, not weighed: by pair if ``x`` is and no gate has to be applied, else grouped."""
        scatter = self.rows == "pair" and self.gates is None
        return grouped_gemm(
            self.dy, self.w_EOI, self.plan, gather=_GATHER[self.dy_rows], scatter=scatter, transpose_w=True
        )

    def input_gradient(self, du_SI: Tensor) -> Tensor:
        if self.rows == "token":
            return combine_places(du_SI, self.plan.place_S.view(-1, self.plan.slots), self.gates)
        if self.gates is None:
            return du_SI
        if self.rows == "grouped":
            return group_rows(du_SI, self.gates, self.plan, layout="grouped")
        return combine_places(du_SI, self.plan.place_S.view(-1, 1), self.gates.reshape(-1, 1))

    def weight_gradient(self) -> Tensor:
        if self.gates is None:
            return grouped_outer(self.dy, self.x, self.plan, dy_rows=self.dy_rows, x_rows=self.rows)
        # One side has to be weighed and thereby copied: the narrower one.
        if self.x.shape[1] <= self.dy.shape[1]:
            x_SI = group_rows(self.x, self.gates, self.plan, layout=self.rows)
            return grouped_outer(self.dy, x_SI, self.plan, dy_rows="token", x_rows="grouped")
        dy_SO = group_rows(self.dy, self.gates, self.plan, layout="token")
        return grouped_outer(dy_SO, self.x, self.plan, dy_rows="grouped", x_rows=self.rows)

    def gate_gradient(self, du_SI: Tensor, bias_EO: Tensor | None) -> Tensor:
        dgates_TK = pair_dots(du_SI, self.x, self.plan, a_rows="grouped", b_rows=self.rows)
        if bias_EO is not None:
            dgates_TK = dgates_TK + pair_dots(self.dy, bias_EO, self.plan, a_rows="token", b_rows="expert")
        return dgates_TK
