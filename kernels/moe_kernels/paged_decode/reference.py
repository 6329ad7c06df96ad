"""Reference of :mod:`moe_kernels.paged_decode.kernel`: every block of every sequence gathered, the rest hidden.

Legend: as in :mod:`moe_kernels.paged_decode.op`; L = M x B positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels.paged_attention.reference import shares


def launch(
    q_SNH: Tensor,
    k_PBJH: Tensor,
    v_PBJH: Tensor,
    blocks_SM: Tensor,
    kv_len_S: Tensor,
    sinks_N: Tensor | None,
    scale: float,
    window: int,
) -> Tensor:
    sequences, heads, head_dim = q_SNH.shape
    _, size, kv_heads, _ = k_PBJH.shape
    position_L = torch.arange(blocks_SM.shape[1] * size, device=q_SNH.device)
    length_S1 = kv_len_S.unsqueeze(1)
    seen_SL = (position_L < length_S1) & (position_L >= length_S1 - window)
    ids_SM = blocks_SM.masked_fill(position_L[::size] >= length_S1, 0)  # what follows the last block may be no block
    k_SLJH, v_SLJH = (_gather(cache, ids_SM, seen_SL, q_SNH.dtype) for cache in (k_PBJH, v_PBJH))
    q_SJGH = q_SNH.reshape(sequences, kv_heads, heads // kv_heads, head_dim).float()
    scores_SJGL = torch.einsum("sjgh,sljh->sjgl", q_SJGH, k_SLJH) * scale
    scores_SJGL.masked_fill_(~seen_SL[:, None, None], -torch.inf)
    shares_SJGL = shares(scores_SJGL, sinks_N).masked_fill(~seen_SL[:, None, None], 0)
    out_SJGH = torch.einsum("sjgl,sljh->sjgh", shares_SJGL, v_SLJH)
    return out_SJGH.reshape(q_SNH.shape).to(q_SNH.dtype)


def _gather(cache_PBJH: Tensor, ids_SM: Tensor, seen_SL: Tensor, dtype: torch.dtype) -> Tensor:
    """``[S, L, J, H]`` float32, zeros where nothing may be seen: 0 x NaN is NaN."""
    found_SMBJH = cache_PBJH[ids_SM.long()].to(dtype).float()
    return found_SMBJH.flatten(1, 2).masked_fill(~seen_SL[:, :, None, None], 0)
