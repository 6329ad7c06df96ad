"""Backward pass of an expert's activation, fused with what the router's weight has to do with it.

Legend: T tokens, K slots, S = T x K pairs, F expert width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels import backend
from moe_kernels.activations.op import Activation, activate, gated
from moe_kernels.plan.types import Plan


def activate_rows(pre_S: Tensor, plan: Plan, activation: Activation) -> Tensor:
    """``[S, 2F]`` if gated, else ``[S, F]``, to ``[S, F]``, for grouped rows that an expert owns; others unspecified.

    Example: "relu", pre ``[[-1, 2]]``: ``[[0, 2]]``.
    """
    if not backend.use_triton(pre_S):
        return activate(pre_S, activation)
    from moe_kernels.training.activation_gradients.kernel import launch_forward

    out_SF = pre_S.new_empty(pre_S.shape[0], pre_S.shape[1] // (1 + gated(activation)))
    if out_SF.numel():
        launch_forward(pre_S, out_SF, plan.ends_E, activation)
    return out_SF


def activation_backward(
    du_SF: Tensor, pre_S: Tensor, gates_TK: Tensor, plan: Plan, activation: Activation
) -> tuple[Tensor, Tensor, Tensor]:
    """What the three gradients behind ``y = sum over k of gate x (W h)``, ``h = activation(pre)``, need, in one pass.

    Args:
        du_SF: W^T dy in grouped order, not yet times the gate. Its memory may be written over.
        pre_S: ``[S, 2F]`` if gated, else ``[S, F]``; grouped order, same dtype.
        gates_TK: float32 (float64 for float64).

    Returns:
        ``dpre`` like ``pre_S``: gate x du through the activation's derivative; ``[S, F]`` gate x h, whose outer
        product with dy is dW; ``[T, K]`` gradients of the gates, h . du, 0 for a dropped pair. Rows that no expert
        owns are unspecified in the first two.

    Example: "relu", one pair, pre ``[[-1, 2]]``, du ``[[5, 3]]``, gate 10: ``[[0, 30]]``, ``[[0, 20]]``, ``[[6]]``.
    """
    if not backend.use_triton(du_SF):
        return _backward_reference(du_SF, pre_S, gates_TK, plan, activation)
    from moe_kernels.training.activation_gradients.kernel import launch_backward

    dpre_S = pre_S.new_empty(pre_S.shape) if gated(activation) else du_SF
    weighted_SF = torch.empty_like(du_SF)
    dgates_TK = gates_TK.new_zeros(gates_TK.shape)
    if du_SF.numel():
        launch_backward(
            du_SF, pre_S, gates_TK.contiguous(), dpre_S, weighted_SF, dgates_TK, plan.order_S, plan.ends_E, activation
        )
    return dpre_S, weighted_SF, dgates_TK


def _backward_reference(
    du_SF: Tensor, pre_S: Tensor, gates_TK: Tensor, plan: Plan, activation: Activation
) -> tuple[Tensor, Tensor, Tensor]:
    exact = torch.promote_types(du_SF.dtype, torch.float32)
    du_SF, dtype = du_SF.to(exact), du_SF.dtype
    pairs_S = plan.order_S.long()
    gates_S = gates_TK.flatten()[pairs_S].to(exact).unsqueeze(1)
    with torch.enable_grad():
        leaf_S = pre_S.detach().to(exact).requires_grad_()
        h_SF = activate(leaf_S, activation)
        (dpre_S,) = torch.autograd.grad(h_SF, leaf_S, gates_S * du_SF)
    owned_S = torch.arange(len(pairs_S), device=pairs_S.device) < plan.ends_E[-1]
    dots_S = torch.where(owned_S, (h_SF.detach() * du_SF).sum(1), 0.0)
    dgates_TK = gates_TK.new_empty(gates_TK.shape)  # empty_like would keep strides
    dgates_TK.view(-1).scatter_(0, pairs_S, dots_S.to(gates_TK.dtype))
    return dpre_S.to(dtype), (gates_S * h_SF.detach()).to(dtype), dgates_TK
