"""Products whose result for a row has the same bits whatever other rows there are, and however many.

Libraries choose a kernel by the number of rows, and kernels add in different orders. Here that number decides nothing:
on a GPU all rows go through one kernel in tiles of one size, elsewhere through products of :data:`ROWS` rows, filled
up where there are fewer. Nothing that is added lies in another row, so what the other rows hold does not matter.
Legend: T rows, I input and O output columns, D hidden size, E experts, F expert width, K slots per row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels import backend
from moe_kernels.activations.op import Activation, gated
from moe_kernels.arguments import FLOATS, check_like, check_no_gradient, describe, require, require_tensors
from moe_kernels.expert_arguments import check_choice, check_experts
from moe_kernels.invariant import reference

_INSTEAD = "call it under torch.no_grad() or inference_mode()"


@backend.eager
def linear(x_TI: Tensor, w_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """y = x w^T + bias, rounded once; row t depends on x[t], w and bias alone, to the bit.

    Args:
        x_TI: float32, bfloat16 or float16. T may be 0.
        w_OI: in x's dtype, contiguous.
        bias_O: in x's dtype.

    Returns:
        ``[T, O]`` in x's dtype. float32 is multiplied as float32.

    Raises:
        ArgumentError: a shape, dtype or device does not fit; or a gradient is asked for, which this op does not have.

    Example: x ``[[1, 2]]``, w ``[[3, 4], [5, 6]]``, bias ``[0, 1]``: y = ``[[11, 18]]``.
    """
    require_tensors(x=x_TI, w=w_OI)
    require(x_TI.dim() == 2 and x_TI.dtype in FLOATS, f"x must be [T, I] in {FLOATS}, found {describe(x_TI)}")
    require(w_OI.dim() == 2 and w_OI.is_contiguous(), f"w must be [O, I], contiguous, found {describe(w_OI)}")
    check_like(w_OI, (w_OI.shape[0], x_TI.shape[1]), x_TI.dtype, "w [O, I]")
    if bias_O is not None:
        check_like(bias_O, (w_OI.shape[0],), x_TI.dtype, "bias [O]")
    check_no_gradient("linear", _INSTEAD, x=x_TI, w=w_OI, bias=bias_O)
    if not x_TI.numel():
        return x_TI.new_zeros(x_TI.shape[0], w_OI.shape[0])
    if not backend.use_triton(x_TI):
        return reference.linear(x_TI, w_OI, bias_O)
    from moe_kernels.invariant import launch

    with backend.device_of(x_TI):
        return launch.linear(x_TI, w_OI, bias_O)


@backend.eager
def experts(
    x_TD: Tensor,
    w_in_E2FD: Tensor,
    w_down_EDF: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    local_E: Tensor | None = None,
    activation: Activation = "swiglu",
    bias_in: Tensor | None = None,
    bias_down: Tensor | None = None,
) -> Tensor:
    """:func:`moe_kernels.fused_moe` with a gated activation; row t depends on its own x, ids and weights alone, to the
    bit.

    With ids of one slot, and weights of 1, a pair's result is what it adds to the sum over all slots: outputs that are
    computed apart, weighted and added in slot order have the bits of those computed at once.

    Args:
        x_TD: float32, bfloat16 or float16. T may be 0.
        w_in_E2FD: gate rows, then up rows. In x's dtype and contiguous, as ``w_down_EDF``.
        ids_TK, weights_TK, local_E, activation, bias_in, bias_down: as for ``fused_moe``.

    Returns:
        ``y_TD`` in x's dtype.

    Raises:
        ArgumentError: a shape, dtype or device does not fit; or a gradient is asked for, which this op does not have.

    Example: see ``fused_moe``.
    """
    require(gated(activation), f"activation must be gated, found {activation!r}")
    check_experts(x_TD, w_in_E2FD, w_down_EDF, activation, bias_in, bias_down)
    check_choice(x_TD, w_down_EDF.shape[0], ids_TK, weights_TK, "output", None, local_E, None)
    biases = {"bias_in": bias_in, "bias_down": bias_down}
    check_no_gradient("experts", _INSTEAD, x=x_TD, w_in=w_in_E2FD, w_down=w_down_EDF, weights=weights_TK, **biases)
    if not ids_TK.numel():
        return torch.zeros_like(x_TD)
    if not backend.use_triton(x_TD):
        return reference.experts(
            x_TD, w_in_E2FD, w_down_EDF, ids_TK, weights_TK, local_E, activation, bias_in, bias_down
        )
    from moe_kernels.invariant import launch

    with backend.device_of(x_TD):
        return launch.experts(x_TD, w_in_E2FD, w_down_EDF, ids_TK, weights_TK, local_E, activation, bias_in, bias_down)
