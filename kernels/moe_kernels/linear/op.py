"""Rows times one matrix that is held quantised: the linear layers of a model outside of its experts.

Legend: T rows, O output columns, I input columns.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from moe_kernels import backend
from moe_kernels.arguments import (
    FLOATS,
    ArgumentError,
    check_device,
    check_like,
    check_no_gradient,
    describe,
    require_kind,
    require_optional_tensors,
    require_tensors,
)
from moe_kernels.quant.cached import expert_product
from moe_kernels.quant.op import dequantize_experts
from moe_kernels.quant.weight import QuantisedWeight

_INSTEAD = "call it under torch.no_grad() or inference_mode()"


@backend.eager
def quantised_linear(x_TI: Tensor, weight: QuantisedWeight, bias_O: Tensor | None = None) -> Tensor:
    """y = x w^T + bias, rounded once; on a CPU before the bias is added, too. Nothing waits for the device, so a CUDA
    graph can hold the call.

    On a GPU few rows meet codes, which become numbers of x's dtype in registers; many meet numbers that are made of the
    whole matrix before, and take its memory in x's dtype meanwhile. On a CPU the product is an expert's.

    Args:
        x_TI: float32, bfloat16 or float16. T may be 0.
        weight: the only expert of a weight of any format, without an order of columns.
        bias_O: in x's dtype.

    Returns:
        ``[T, O]`` in x's dtype.

    Raises:
        ArgumentError: a shape, dtype or device does not fit; or a gradient is asked for, which this op does not have.

    Example: x ``[[1, 2, 0, ...]]``, a row of codes 9, 10, 8, ... with scale 2, bias 1: y = ``[[1 x 2 + 2 x 4 + 1]]``.
    """
    _check(x_TI, weight, bias_O)
    if not x_TI.shape[0]:
        return x_TI.new_zeros(0, weight.shape[1])
    with backend.device_of(x_TI):
        if not backend.use_triton(x_TI):
            out_TO = expert_product(weight, 0, x_TI)
            return out_TO if bias_O is None else out_TO + bias_O
        from moe_kernels.linear import launch

        if x_TI.shape[0] <= launch.MAX_ROWS:
            return launch.launch(x_TI, weight, bias_O)
        return F.linear(x_TI, dequantize_experts(weight, x_TI.dtype)[0], bias_O)


def _check(x_TI: Tensor, weight: QuantisedWeight, bias_O: Tensor | None) -> None:
    require_tensors(x=x_TI)
    require_optional_tensors(bias=bias_O)
    require_kind(isinstance(weight, QuantisedWeight), "weight must be a QuantisedWeight", weight)
    experts, rows, columns = weight.shape
    if x_TI.dim() != 2 or x_TI.dtype not in FLOATS:  # called for each layer: what is said costs more than what is asked
        raise ArgumentError(f"x must be [T, I] in {FLOATS}, found {describe(x_TI)}")
    if experts != 1:
        raise ArgumentError(f"weight must be one matrix, found {experts} of {rows} x {columns}")
    if weight.order is not None:
        raise ArgumentError(f"weight must have its columns in x's order, found {weight.format}")
    check_like(x_TI, (len(x_TI), columns), x_TI.dtype, "x [T, I]")
    check_device(weight.packed, x_TI, "weight", "x")
    if bias_O is not None:
        check_like(bias_O, (rows,), x_TI.dtype, "bias [O]")
        check_device(bias_O, x_TI, "bias", "x")
    check_no_gradient("quantised_linear", _INSTEAD, x=x_TI, bias=bias_O)
