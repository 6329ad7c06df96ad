"""An expert MLP over scattered tokens, forward and backward (ScatterMoE's algorithm 3), and its module.

Scattered to grouped, activation, grouped to scattered: one order serves both products. The backward pass keeps the
rows before the activation and ``x`` by reference, nothing else of size S.
Legend: T tokens, D hidden size, E experts, F expert width, K slots per token, S = T x K pairs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_kernels import backend
from moe_kernels.activations.op import Activation, gated
from moe_kernels.arguments import FLOATS, check_first_derivative, require, require_tensors
from moe_kernels.combine.op import combine_places
from moe_kernels.expert_arguments import check_plan_of
from moe_kernels.experts.op import fused_moe
from moe_kernels.grouped_gemm.op import grouped_gemm
from moe_kernels.plan.op import plan as make_plan
from moe_kernels.plan.types import Plan
from moe_kernels.router.op import route
from moe_kernels.training.activation_gradients.op import activate_rows, activation_backward
from moe_kernels.training.checks import check_module_choice, check_module_rows, check_sizes, check_sparse_mlp
from moe_kernels.training.grouped_outer.op import grouped_outer, grouped_sum
from moe_kernels.training.pair_rows.op import pair_dots


@backend.eager
def sparse_mlp(
    x_TD: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    plan: Plan,
    gates_TK: Tensor,
    *,
    activation: Activation = "gelu",
    bias_in: Tensor | None = None,
    bias_out: Tensor | None = None,
) -> Tensor:
    """y[t] = sum over k = 0, 1, ... of gates[t, k] (W_out[e] activation(W_in[e] x[t] + b_in[e]) + b_out[e]).

    What two :func:`moe_kernels.training.parallel_linear` calls around the activation compute, with a leaner backward
    pass. Differentiable once in everything that is floating point. Deterministic.

    Args:
        x_TD: float32, bfloat16, float16 (on a CPU float64 too), contiguous.
        w_in: ``[E, F, D]``, or ``[E, 2F, D]``, gate rows first, if the activation is gated.
        w_out: ``[E, D, F]``.
        plan: of these pairs, from :func:`moe_kernels.plan.op`, ``block_rows`` 16, 32, 64 or 128.
        gates_TK: float32 (float64 for float64).
        bias_in: ``[E, F]`` or ``[E, 2F]``.
        bias_out: ``[E, D]``.

    Returns:
        ``[T, D]`` in ``x``'s dtype. Pairs that no expert takes contribute nothing and get zero gradients.

    Raises:
        ArgumentError: a shape, dtype or device does not fit; in the backward pass, ``create_graph=True``.

    Example: one expert, "relu", x ``[[2]]``, W_in ``[[[3], [-1]]]``, W_out ``[[[10, 1]]]``, gate 0.5: h = (6, 0),
    y ``[[30]]``.
    """
    inner = 1 + gated(activation)
    check_sparse_mlp(x_TD, w_in, w_out, plan, gates_TK, bias_in, bias_out, inner=inner)
    bias_in, bias_out = backend.packed(bias_in), backend.packed(bias_out)
    tensors = (x_TD, w_in, w_out, gates_TK.contiguous(), bias_in, bias_out)
    with backend.device_of(x_TD):
        if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
            y_TD: Tensor = _SparseMlp.apply(*tensors, plan, activation)  # type: ignore[no-untyped-call]
            return y_TD
        return _infer(*tensors, plan, activation)


def _infer(
    x_TD: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    gates_TK: Tensor,
    bias_in: Tensor | None,
    bias_out: Tensor | None,
    plan: Plan,
    activation: Activation,
) -> Tensor:
    h_SF = grouped_gemm(x_TD, w_in, plan, gather="token", scatter=False, activation=activation, bias_EO=bias_in)
    out_SD = grouped_gemm(h_SF, w_out, plan, gather=None, scatter=False, bias_EO=bias_out)
    del h_SF  # before y is there: the peak
    return combine_places(out_SD, plan.place_S.view(-1, plan.slots), gates_TK)


class _SparseMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        w_in: Tensor,
        w_out: Tensor,
        gates_TK: Tensor,
        bias_in: Tensor | None,
        bias_out: Tensor | None,
        plan: Plan,
        activation: Activation,
    ) -> Tensor:
        pre_S = grouped_gemm(x_TD, w_in, plan, gather="token", scatter=False, bias_EO=bias_in)
        ctx.save_for_backward(x_TD, w_in, w_out, gates_TK, bias_out, pre_S)
        ctx.plan, ctx.activation = plan, activation
        h_SF = activate_rows(pre_S, plan, activation)
        out_SD = grouped_gemm(h_SF, w_out, plan, gather=None, scatter=False, bias_EO=bias_out)
        del h_SF  # before y is there: the peak
        return combine_places(out_SD, plan.place_S.view(-1, plan.slots), gates_TK)

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        """With u = W_out^T dy[t], before the gate: the gate's gradient is h . u, the row's is gate x u, and
        dW_out = sum of dy[t]^T (gate x h), so dy is never weighed, grouped or copied."""
        check_first_derivative("sparse_mlp")
        x_TD, w_in, w_out, gates_TK, bias_out, pre_S = ctx.saved_tensors
        plan, needs = ctx.plan, ctx.needs_input_grad
        dy_TD = dy_TD.contiguous()
        du_SF = grouped_gemm(dy_TD, w_out, plan, gather="token", scatter=False, transpose_w=True)
        dpre_S, weighted_SF, dgates_TK = activation_backward(du_SF, pre_S, gates_TK, plan, ctx.activation)
        del du_SF, pre_S
        if bias_out is not None:
            dgates_TK = dgates_TK + pair_dots(dy_TD, bias_out, plan, a_rows="token", b_rows="expert")
        dw_out = grouped_outer(dy_TD, weighted_SF, plan, dy_rows="token", x_rows="grouped") if needs[2] else None
        del weighted_SF
        dx_TD = _input_gradient(dpre_S, w_in, plan) if needs[0] else None
        dw_in = grouped_outer(dpre_S, x_TD, plan, dy_rows="grouped", x_rows="token") if needs[1] else None
        dbias_in = grouped_sum(dpre_S, plan, rows="grouped") if needs[4] else None
        dbias_out = grouped_sum(dy_TD, plan, rows="token", gates_TK=gates_TK) if needs[5] else None
        return dx_TD, dw_in, dw_out, dgates_TK if needs[3] else None, dbias_in, dbias_out, None, None


def _input_gradient(dpre_S: Tensor, w_in: Tensor, plan: Plan) -> Tensor:
    dx_SD = grouped_gemm(dpre_S, w_in, plan, gather=None, scatter=False, transpose_w=True)
    return combine_places(dx_SD, plan.place_S.view(-1, plan.slots), None)


class SparseMLP(nn.Module):
    """E expert MLPs of which every token takes K, with a softmax router of its own or one outside.

    Under autocast rows, weights and biases go through the experts in autocast's dtype, as in ``nn.Linear``.

    Args:
        hidden: D.
        width: F, of one expert.
        top_k: K.
        bias: biases on both layers of the experts.
        router: hold a linear router; else the caller passes its logits, or ids and gates.
        renormalise: divide a token's gates by their sum.

    Example: ``SparseMLP(4096, 2048, experts=32, top_k=4, router=True)(x)`` is ScatterMoE's unit benchmark.
    """

    def __init__(
        self,
        hidden: int,
        width: int,
        *,
        experts: int,
        top_k: int,
        activation: Activation = "gelu",
        bias: bool = False,
        router: bool = False,
        renormalise: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(hidden=hidden, width=width, experts=experts, top_k=top_k)
        inner = width * (1 + gated(activation))
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.top_k, self.activation, self.renormalise = top_k, activation, renormalise
        self.w_in = nn.Parameter(torch.empty(experts, inner, hidden, **where))
        self.w_out = nn.Parameter(torch.empty(experts, hidden, width, **where))
        self.bias_in = nn.Parameter(torch.empty(experts, inner, **where)) if bias else None
        self.bias_out = nn.Parameter(torch.empty(experts, hidden, **where)) if bias else None
        self.router = nn.Linear(hidden, experts, bias=False, **where) if router else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within 1 / sqrt(inputs), as ``nn.Linear`` starts; biases zero."""
        for weight in (self.w_in, self.w_out):
            bound = weight.shape[2] ** -0.5
            nn.init.uniform_(weight, -bound, bound)
        for bias in (self.bias_in, self.bias_out):
            if bias is not None:
                nn.init.zeros_(bias)

    @backend.eager
    def forward(
        self,
        x: Tensor,
        logits_TE: Tensor | None = None,
        *,
        ids_TK: Tensor | None = None,
        gates_TK: Tensor | None = None,
        plan: Plan | None = None,
    ) -> Tensor:
        """``[..., D] -> [..., D]``; T counts the rows of ``x`` flattened.

        Args:
            plan: of the chosen ids, from :func:`moe_kernels.plan.op`, e.g. with a capacity, with rows that are kept or
                with a table of the experts here: pairs that it leaves out add nothing and get zero gradients. Else
                made here. With logits (or a router) the ids are those that :func:`moe_kernels.route` chooses.

        Raises:
            ArgumentError: neither or both of logits (or a router) and ids with gates; or a shape does not fit.
        """
        require_tensors(x=x)
        x_in, w_in, w_out, bias_in, bias_out = autocast(x, self.w_in, self.w_out, self.bias_in, self.bias_out)
        check_module_rows(x_in, w_in)
        x_TD = x_in.reshape(-1, x.shape[-1]).contiguous()
        ids_TK, gates_TK = choose(self, x_TD, w_in.shape[0], logits_TE, ids_TK, gates_TK)
        if plan is not None:
            check_plan_of(plan, x_TD.shape[0], ids_TK.shape[1], w_in.shape[0])
        if torch.is_grad_enabled() or x_TD.dtype not in FLOATS:
            order = make_plan(ids_TK, w_in.shape[0]) if plan is None else plan
            y_TD = sparse_mlp(
                x_TD, w_in, w_out, order, gates_TK, activation=self.activation, bias_in=bias_in, bias_out=bias_out
            )
        else:  # The op that knows what is fastest for few tokens too.
            biases = {"bias_in": bias_in, "bias_down": bias_out}
            y_TD = fused_moe(x_TD, w_in, w_out, ids_TK, gates_TK, activation=self.activation, plan=plan, **biases)
        return y_TD.view(x.shape)

    def extra_repr(self) -> str:
        experts, hidden, width = self.w_out.shape
        sizes = f"hidden={hidden}, width={width}, experts={experts}, top_k={self.top_k}"
        return f"{sizes}, activation={self.activation!r}, bias={self.bias_in is not None}"


def autocast(x: Tensor, *weights: Any) -> tuple[Any, ...]:
    """Under autocast all in its dtype, as torch's own layers have it, but for float64; absent ones stay None."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return (x, *weights)
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        tensor.to(dtype) if tensor is not None and tensor.dtype in FLOATS else tensor for tensor in (x, *weights)
    )


def choose(
    module: Any,
    x_TD: Tensor,
    experts: int,
    logits_TE: Tensor | None,
    ids_TK: Tensor | None,
    gates_TK: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Ids and gates of a module with ``router``, ``top_k`` and ``renormalise``, from whichever source there is."""
    check_module_choice(x_TD, experts, logits_TE, ids_TK, gates_TK)
    given = ids_TK is not None or gates_TK is not None
    if logits_TE is None and not given and module.router is not None:
        logits_TE = module.router(x_TD)
    require((logits_TE is not None) != given, "pass either router logits or ids with gates, unless there is a router")
    if logits_TE is not None:
        return softmax_gates(logits_TE, module.top_k, renormalise=module.renormalise)
    require(ids_TK is not None and gates_TK is not None, "ids and gates come together")
    assert ids_TK is not None
    assert gates_TK is not None
    return ids_TK, gates_TK


def softmax_gates(logits_TE: Tensor, top_k: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
    """:func:`moe_kernels.route` chooses; the gates are computed again from the logits, so that they get gradients.

    Example: logits ``[[0, ln 2, 0, ln 4]]``, top_k 2: ids ``[[3, 1]]``, gates ``[[0.5, 0.25]]``, or ``[[2/3, 1/3]]``.
    """
    ids_TK, _ = route(logits_TE.detach(), top_k=top_k)
    exact = torch.promote_types(logits_TE.dtype, torch.float32)
    gates_TK = torch.softmax(logits_TE, dim=-1, dtype=exact).gather(1, ids_TK.long())
    return ids_TK, gates_TK / gates_TK.sum(1, keepdim=True) if renormalise else gates_TK
