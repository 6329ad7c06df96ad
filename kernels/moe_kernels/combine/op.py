"""The weighted sum of what a token's experts returned, always added in slot order.

Legend: T rows, K slots, S = T x K pairs, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels import backend
from moe_kernels.arguments import check_combine, check_no_gradient


@backend.eager
def combine(out_SD: Tensor, place_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """y[t] = sum over k of weights[t, k] x out[place[t, k]], in float32, slot 0 first; rounded once to out's dtype.

    Args:
        out_SD: float32, bfloat16 or float16 (on a CPU float64 too).
        place_TK: int32 or int64, row of ``out_SD`` that holds the pair; outside 0..S-1 (a plan has -1): no expert here
            took it, nothing is added (and nothing read: such rows may hold NaN).
        weights_TK: float32 (float64 for float64); None counts as 1.

    Returns:
        ``y_TD`` in out's dtype.

    Raises:
        ArgumentError: a shape, dtype or device does not fit; or a gradient is asked for, which
            :func:`moe_kernels.training.parallel_linear` with ``gates`` has.

    Example: out ``[[1], [10], [100]]``, place ``[[2, 0], [-1, 1]]``, weights ``[[0.5, 2], [3, 4]]``: ``[[52], [40]]``.
    """
    check_combine(out_SD, place_TK, weights_TK)
    check_no_gradient("combine", "use parallel_linear with gates", out=out_SD, weights=weights_TK)
    # A place that does not exist would be read from memory of somebody else's.
    place_TK = torch.where(place_TK < out_SD.shape[0], place_TK, -1).contiguous()
    out_SD = out_SD if out_SD.stride(1) == 1 else out_SD.contiguous()
    with backend.device_of(out_SD):
        return combine_places(out_SD, place_TK, None if weights_TK is None else weights_TK.contiguous())


def combine_places(out_SD: Tensor, place_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """:func:`combine` of a plan's places, which all exist; rows of ``out_SD`` contiguous, the others altogether."""
    if backend.use_triton(out_SD) and place_TK.numel() and out_SD.numel():
        from moe_kernels.combine import kernel as combine_triton

        return combine_triton.launch(out_SD, place_TK, weights_TK)
    rows, slots = place_TK.shape
    exact = torch.float64 if out_SD.dtype == torch.float64 else torch.float32
    y_TD = out_SD.new_zeros(rows, out_SD.shape[1], dtype=exact)
    for slot in range(slots if len(out_SD) else 0):
        place_T = place_TK[:, slot].long()
        part_TD = out_SD[place_T.clamp(min=0)].to(exact)
        if weights_TK is not None:
            part_TD = part_TD * weights_TK[:, slot : slot + 1]
        y_TD = torch.where((place_T >= 0).unsqueeze(1), y_TD + part_TD, y_TD)
    return y_TD.to(out_SD.dtype)
