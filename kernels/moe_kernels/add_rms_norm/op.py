"""Residual sum and root-mean-square norm: what a block added to the rows, and the rows as the next block reads them.

Legend: T rows, D hidden size.
"""

from __future__ import annotations

from torch import Tensor

from moe_kernels import backend
from moe_kernels.arguments import (
    FLOATS,
    check_device,
    check_like,
    check_no_gradient,
    describe,
    require,
    require_tensors,
)

_INSTEAD = "call it under torch.no_grad() or inference_mode()"


@backend.eager
def add_rms_norm(
    x_TD: Tensor, y_TD: Tensor | None, weight_D: Tensor, eps: float, *, z_TD: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """s = x + (y + z) and h = s / sqrt(mean(s^2) + eps) x weight, the mean over a row's D elements.

    Sums are rounded to x's dtype one after the other, as torch rounds them; h is computed in float32 from the rounded
    sum and rounded once. A row depends on nothing but itself.

    Args:
        x_TD: float32, bfloat16 or float16.
        y_TD: added to x; None: nothing is. In x's dtype, as all that follow.
        z_TD: added to y first; only with y.

    Returns:
        ``s_TD`` (``x_TD`` itself without y) and ``h_TD``, both in x's dtype. On CUDA one launch.

    Raises:
        ArgumentError: a shape, dtype or device does not fit; or a gradient is asked for, which this op does not have.

    Example: x [[3, 0]], y [[0, 4]], weight [1, 2], eps 0: s = [[3, 4]], its mean square 12.5, h = [[0.8485, 2.2627]].
    """
    _check(x_TD, y_TD, weight_D, z_TD)
    check_no_gradient("add_rms_norm", _INSTEAD, x=x_TD, y=y_TD, z=z_TD, weight=weight_D)
    if backend.use_triton(x_TD) and x_TD.numel():
        from moe_kernels.add_rms_norm.kernel import launch
    else:
        from moe_kernels.add_rms_norm.reference import launch
    with backend.device_of(x_TD):
        return launch(x_TD, y_TD, z_TD, weight_D, eps)


def _check(x_TD: Tensor, y_TD: Tensor | None, weight_D: Tensor, z_TD: Tensor | None) -> None:
    require_tensors(x=x_TD, weight=weight_D)
    require(x_TD.dim() == 2 and x_TD.dtype in FLOATS, f"x must be [T, D] in {FLOATS}, found {describe(x_TD)}")
    check_like(weight_D, (x_TD.shape[1],), x_TD.dtype, "weight [D]")
    check_device(weight_D, x_TD, "weight", "x")
    require(z_TD is None or y_TD is not None, "z is added to y: without y there must be no z")
    for name, tensor in (("y", y_TD), ("z", z_TD)):
        if tensor is not None:
            require_tensors(**{name: tensor})
            check_like(tensor, tuple(x_TD.shape), x_TD.dtype, f"{name} [T, D]")
            check_device(tensor, x_TD, name, "x")
