"""How many pairs each expert got, added to running counts: what the hottest experts are found by.

Legend: T rows, K experts chosen per row, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels import backend
from moe_kernels.arguments import require


@backend.eager
def count_pairs(counts_E: Tensor, ids_TK: Tensor) -> None:
    """Add 1 to ``counts_E[ids[t, k]]`` for every pair whose id is within 0..E-1. On CUDA one launch.

    Args:
        counts_E: int64, contiguous, changed in place.
        ids_TK: int64 or int32, on the same device; a plan's rows that go nowhere have -1.

    Raises:
        ArgumentError: a shape, dtype or device does not fit.

    Example: counts ``[5, 0]``, ids ``[[1, 0], [1, -1]]``: counts are ``[6, 2]``.
    """
    require(counts_E.dtype == torch.int64, f"counts must be int64, found {counts_E.dtype}")
    require(counts_E.dim() == 1 and counts_E.is_contiguous(), "counts must be contiguous and of one dimension")
    require(ids_TK.dtype in (torch.int32, torch.int64), f"ids must be int32 or int64, found {ids_TK.dtype}")
    require(ids_TK.device == counts_E.device, f"ids are on {ids_TK.device}, counts on {counts_E.device}")
    experts = counts_E.numel()
    if backend.use_triton(ids_TK) and ids_TK.numel() and experts:
        from moe_kernels.counts.kernel import launch

        with backend.device_of(ids_TK):
            launch(counts_E, ids_TK.contiguous())
        return
    ids_S = ids_TK.flatten().long()
    here_S = (ids_S >= 0) & (ids_S < experts)
    if experts:
        counts_E.scatter_add_(0, torch.where(here_S, ids_S, 0), here_S.long())
