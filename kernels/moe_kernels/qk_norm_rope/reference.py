"""Reference of :mod:`moe_kernels.qk_norm_rope.kernel`, in the dtype of the projection but for the rotation.

Queries and keys go through each op together, as the heads of one tensor.
Legend: as in :mod:`moe_kernels.qk_norm_rope.op`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def launch(
    qkv_TO: Tensor, cos_T1R: Tensor, sin_T1R: Tensor, k_PBJH: Tensor, v_PBJH: Tensor, slots_T: Tensor, *,
    norm: str, weight_CH: Tensor | None, eps: float, clip: float | None, kv: bool, interleaved: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:  # fmt: skip
    rows, (kv_heads, size) = len(qkv_TO), k_PBJH.shape[2:]
    heads = qkv_TO.shape[1] // size - 2 * kv_heads
    qk_TO, v_TO = qkv_TO.split_with_sizes(((heads + kv_heads) * size, kv_heads * size), dim=1)
    if weight_CH is not None and norm == "projection":
        qk_TO = _norm_projections(qk_TO, weight_CH.flatten(), (heads * size, kv_heads * size), eps)
    if clip is not None:
        qk_TO, v_TO = (part.clamp(-clip, clip) for part in (qk_TO, v_TO))
    qk_TCH = qk_TO.view(rows, heads + kv_heads, size)
    if weight_CH is not None and norm == "head":
        qk_TCH = F.rms_norm(qk_TCH, (size,), None, eps) * weight_CH
    qk_TCH = _rotate_first(qk_TCH, cos_T1R, sin_T1R, interleaved).to(qkv_TO.dtype)
    q_TNH, k_TJH = qk_TCH.split_with_sizes((heads, kv_heads), dim=1)
    v_TJH = v_TO.view(rows, kv_heads, size)
    for cache_PBJH, new_TJH in ((k_PBJH, k_TJH), (v_PBJH, v_TJH)):
        cache_SE = cache_PBJH.view(-1, kv_heads * size)
        cache_SE.index_copy_(0, slots_T, new_TJH.flatten(1).to(cache_SE.dtype))
    return q_TNH, (k_TJH, v_TJH) if kv else None


def _norm_projections(qk_TO: Tensor, weight_O: Tensor, sizes: tuple[int, int], eps: float) -> Tensor:
    """The root-mean-square norm over all query heads together, and over all key heads together."""
    parts = zip(qk_TO.split_with_sizes(sizes, dim=1), weight_O.split_with_sizes(sizes), strict=True)
    return torch.cat([F.rms_norm(part_TO, part_O.shape, part_O, eps) for part_TO, part_O in parts], dim=1)


def _rotate_first(x_TCH: Tensor, cos_T1R: Tensor, sin_T1R: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first R of each head's elements, whose pairs are neighbours if ``interleaved``."""
    rotated = cos_T1R.shape[2]
    if rotated == x_TCH.shape[2] and not interleaved:
        return _rotate(x_TCH, cos_T1R, sin_T1R)
    x_TCR, others_TCI = x_TCH[..., :rotated], x_TCH[..., rotated:]
    if interleaved:
        halves_TCR = torch.cat((x_TCR[..., 0::2], x_TCR[..., 1::2]), dim=2)
        x_TCR = torch.stack(_rotate(halves_TCR, cos_T1R, sin_T1R).chunk(2, dim=2), dim=3).flatten(2)
    elif rotated:
        x_TCR = _rotate(x_TCR, cos_T1R, sin_T1R)
    return torch.cat((x_TCR, others_TCI.to(x_TCR.dtype)), dim=2)


def _rotate(x_TCR: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    """Turn each pair (i, i + R/2) by its angle."""
    swapped_TCR = x_TCR.roll(x_TCR.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_TCR * cos_T1R, swapped_TCR, sin_T1R)
