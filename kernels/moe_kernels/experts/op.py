"""Rows and their chosen experts in, the weighted sum of the experts' outputs out.

Three ways through on a GPU, by how many rows there are (the table's op "fused_moe"): one token at a time on CUDA
cores, few rows per expert on tensor cores without a sort, and a plan with two grouped products and a combine.
Legend: T rows, D hidden size, E experts, F expert width, K slots per row, S = T x K pairs, N rows that lie grouped.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from moe_kernels import backend
from moe_kernels.activations.op import Activation
from moe_kernels.arguments import check_no_gradient
from moe_kernels.expert_arguments import check_choice, check_counts, check_experts
from moe_kernels.experts import reference as experts_torch
from moe_kernels.experts.ordered import by_pair
from moe_kernels.plan.types import Plan
from moe_kernels.quant.weight import QuantisedWeight, Weight

WeightsOn = Literal["output", "input"]
_INSTEAD = "call it under torch.no_grad() or inference_mode(), or train with SparseMLP or parallel_linear"


@backend.eager
def fused_moe(
    x_TD: Tensor,
    w_in: Weight,
    w_down: Weight,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    activation: Activation = "swiglu",
    bias_in: Tensor | None = None,
    bias_down: Tensor | None = None,
    weights_on: WeightsOn = "output",
    keep_T: Tensor | None = None,
    local_E: Tensor | None = None,
    plan: Plan | None = None,
) -> Tensor:
    """y[t] = sum over k of weights[t, k] x (W_down[e] act(W_in[e] x[t] + b_in[e]) + b_down[e]) with e = ids[t, k].

    Each expert's output is rounded to ``x``'s dtype, they are added in float32, and the sum is rounded once. It runs in
    slot order (k = 0, 1, ...), so it depends neither on the batch nor on how rows were grouped. Nothing waits for the
    device and no shape depends on values, so a CUDA graph can hold the call.

    Args:
        x_TD: float32, bfloat16 or float16.
        w_in: ``[E, 2F, D]``, gate rows and then up rows, if the activation is gated; else ``[E, F, D]``. In x's dtype
            or a :class:`~moe_kernels.quant.weight.QuantisedWeight` of any format.
        w_down: ``[E, D, F]``, likewise, but without an order of columns. Both contiguous.
        ids_TK: int32 or int64. An id outside 0..E-1 is an expert elsewhere: its slot contributes nothing.
        weights_TK: float32.
        activation: see :data:`~moe_kernels.activations.op.Activation`.
        bias_in: ``[E, 2F]`` or ``[E, F]`` in x's dtype.
        bias_down: ``[E, D]`` in x's dtype; weighted like the expert's output.
        weights_on: "input" multiplies the row by its weight before the expert (Llama 4) and adds outputs unweighted.
        keep_T: bool; where false the row takes part in nothing, loads no weights and comes out as 0 (batch pruning,
            "Elephants" section 3.5).
        local_E: int32, global expert id -> index into the weights here, -1 = elsewhere. ``ids_TK`` then holds global
            ids (expert parallelism).
        plan: of these ids, from :func:`~moe_kernels.plan.op.plan`, e.g. with a capacity; ``block_rows`` 16, 32, 64 or
        128.
            ``keep_T`` and ``local_E`` then go to the plan, not here. Else made here where it is needed.

    Returns:
        ``y_TD`` in ``x``'s dtype. T may be 0; experts may have no rows. NaN or inf in a row stays in that row.

    Raises:
        ArgumentError: a shape, dtype or device does not fit; or a gradient is asked for, which this op does not have.

    Example: D = F = E = 1, ``x = [[2]]``, gate 1, up 3, down 5, weight 0.5: silu(2) = 1.7616, times up 6 is 10.5696,
    times down 52.848, times the weight ``y = [[26.424]]``.
    """
    check_experts(x_TD, w_in, w_down, activation, bias_in, bias_down)
    check_choice(x_TD, w_down.shape[0], ids_TK, weights_TK, weights_on, keep_T, local_E, plan)
    biases = {"bias_in": bias_in, "bias_down": bias_down}
    check_no_gradient("fused_moe", _INSTEAD, x=x_TD, w_in=w_in, w_down=w_down, weights=weights_TK, **biases)
    if backend.use_triton(x_TD) and ids_TK.numel():
        from moe_kernels.experts import kernel as experts_triton

        run = experts_triton.fused_moe
    else:
        run = experts_torch.fused_moe
    with backend.device_of(x_TD):
        if isinstance(w_in, QuantisedWeight) and w_in.order is not None:
            return by_pair(
                lambda x_SD, w, ids_S1, weights_S1: run(
                    x_SD, w, w_down, ids_S1, weights_S1, activation, bias_in, bias_down, weights_on, None, None, None
                ),
                x_TD, w_in, ids_TK, weights_TK, weigh_input=weights_on == "input", keep_T=keep_T, local_E=local_E,
                plan=plan,
            )  # fmt: skip
        return run(
            x_TD, w_in, w_down, ids_TK, weights_TK, activation, bias_in, bias_down, weights_on, keep_T, local_E, plan
        )


@backend.eager
def grouped_mlp(
    x_ND: Tensor,
    counts_E: Tensor,
    w_in: Weight,
    w_down: Weight,
    *,
    activation: Activation = "swiglu",
    bias_in: Tensor | None = None,
    bias_down: Tensor | None = None,
) -> Tensor:
    """Experts on rows that arrive grouped: expert 0's ``counts[0]`` rows, then expert 1's, and so on.

    Args:
        x_ND: float32, bfloat16 or float16. May be longer than the counts' sum (a buffer of fixed size).
        counts_E: int32 or int64, on the device; never read by the host. Negative counts count as 0, and rows past N
            do not exist.
        w_in, w_down, activation, bias_in, bias_down: as in :func:`fused_moe`.

    Returns:
        ``y_ND`` in ``x``'s dtype; rows past the counts' sum are 0.

    Raises:
        ArgumentError: a shape, dtype or device does not fit; or a gradient is asked for, which this op does not have.

    Example: counts ``[1, 0, 2]``: row 0 passes through expert 0, rows 1 and 2 through expert 2.
    """
    check_experts(x_ND, w_in, w_down, activation, bias_in, bias_down)
    check_counts(counts_E, w_down.shape[0], x_ND)
    biases = {"bias_in": bias_in, "bias_down": bias_down}
    check_no_gradient("grouped_mlp", _INSTEAD, x=x_ND, w_in=w_in, w_down=w_down, **biases)
    if isinstance(w_in, QuantisedWeight) and w_in.order is not None:
        ids_N1 = experts_torch.experts_of_rows(counts_E, x_ND.shape[0]).unsqueeze(1)
        ones_N1 = torch.ones(ids_N1.shape, device=x_ND.device)
        return fused_moe(
            x_ND, w_in, w_down, ids_N1, ones_N1, activation=activation, bias_in=bias_in, bias_down=bias_down
        )
    if backend.use_triton(x_ND) and x_ND.numel():
        from moe_kernels.experts import kernel as experts_triton

        with backend.device_of(x_ND):
            return experts_triton.grouped_mlp(x_ND, counts_E, w_in, w_down, activation, bias_in, bias_down)
    ids_N1 = experts_torch.experts_of_rows(counts_E, x_ND.shape[0]).unsqueeze(1)
    ones_N1 = torch.ones(ids_N1.shape, device=x_ND.device)
    return experts_torch.fused_moe(
        x_ND, w_in, w_down, ids_N1, ones_N1, activation, bias_in, bias_down, "output", None, None, None
    )
