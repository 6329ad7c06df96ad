"""The weighted sum of what a token's experts returned, always added in slot order.

Legend: T rows, K slots, S = T x K pairs, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels import backend


def combine(out_SD: Tensor, place_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """y[t] = sum over k of weights[t, k] x out[place[t, k]], in float32, slot 0 first; rounded once to out's dtype.

    Args:
        place_TK: int32, row of ``out_SD`` that holds the pair; -1: no expert here took it, nothing is added (and
            nothing read: such rows may hold NaN).
        weights_TK: float32; None counts as 1.

    Example: out ``[[1], [10], [100]]``, place ``[[2, 0], [-1, 1]]``, weights ``[[0.5, 2], [3, 4]]``: ``[[52], [40]]``.
    """
    if backend.use_triton(out_SD) and place_TK.numel():
        from moe_kernels import combine_triton

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
