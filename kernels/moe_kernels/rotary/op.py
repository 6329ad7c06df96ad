"""Rotary positions on heads, in the pass that puts the heads in front of the positions, as attention wants them.

Legend: B sequences, L positions, K slots, G key heads, R heads of a slot and key head, C head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_kernels import backend
from moe_kernels.arguments import check_first_derivative

HEADS_FIRST = (0, 3, 2, 4, 1, 5)
"""From B L K G R C to B G K R L C, where all query heads of a key head lie next to each other."""
ROWS_FIRST = (0, 4, 2, 1, 3, 5)
"""And back."""


def rotate_heads(x_BLKGRC: Tensor, angles_BLC: Tensor) -> Tensor:
    """Turns the pair (head[i], head[i + C / 2]) by angle i, in float32 (float64 for float64).

    Args:
        x_BLKGRC: unit stride along the head.
        angles_BLC: ``[B or 1, L, C / 2]`` float32 (float64 for float64); gets no gradient.

    Returns:
        ``[B, G, K, R, L, C]``, contiguous, in ``x``'s dtype.

    Example: one head (1, 0), angle pi / 2: (0, 1).
    """
    if not backend.use_triton(x_BLKGRC) or x_BLKGRC.numel() == 0:
        angles = angles_BLC[:, :, None, None, None]
        return _rotate(x_BLKGRC, angles).permute(HEADS_FIRST).contiguous()
    angles_BLC = angles_BLC.contiguous()
    with backend.device_of(x_BLKGRC):
        turned: Tensor = _RotateHeads.apply(x_BLKGRC, angles_BLC.cos(), angles_BLC.sin())  # type: ignore[no-untyped-call]
    return turned


class _RotateHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BLKGRC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        from moe_kernels.rotary.kernel import launch

        ctx.save_for_backward(cos, sin)
        turned = x_BLKGRC.new_empty([x_BLKGRC.shape[axis] for axis in HEADS_FIRST])
        launch(x_BLKGRC, turned.permute(ROWS_FIRST), cos, sin)
        return turned

    @staticmethod
    def backward(ctx: Any, dturned: Tensor) -> tuple[Tensor, None, None]:
        """The gradient is turned back."""
        check_first_derivative("rotate_heads")
        from moe_kernels.rotary.kernel import launch

        cos, sin = ctx.saved_tensors
        dturned = dturned.contiguous()
        dx_BLKGRC = dturned.new_empty([dturned.shape[axis] for axis in ROWS_FIRST])
        launch(dturned.permute(ROWS_FIRST), dx_BLKGRC, cos, -sin)
        return dx_BLKGRC, None, None


def _rotate(rows: Tensor, angles: Tensor) -> Tensor:
    dtype = torch.promote_types(rows.dtype, torch.float32)
    low, high = rows.to(dtype).chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(rows.dtype)
