"""Reference of :mod:`moe_kernels.add_rms_norm.kernel`. Legend: T rows, D hidden size."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def launch(
    x_TD: Tensor, y_TD: Tensor | None, z_TD: Tensor | None, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    if y_TD is not None:
        x_TD = x_TD + (y_TD if z_TD is None else y_TD + z_TD)
    return x_TD, F.rms_norm(x_TD, weight_D.shape, weight_D, eps)
