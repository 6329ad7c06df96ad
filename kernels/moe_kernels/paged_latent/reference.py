"""Reference of :mod:`moe_kernels.paged_latent.kernel`: every block of every row gathered, the rest hidden.

Legend: as in :mod:`moe_kernels.paged_latent.op`; L = M x B positions.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def launch(q_SNZ: Tensor, latents_PBZ: Tensor, blocks_SM: Tensor, kv_len_S: Tensor, rank: int, scale: float) -> Tensor:
    size = latents_PBZ.shape[1]
    position_L = torch.arange(blocks_SM.shape[1] * size, device=q_SNZ.device)
    seen_SL = position_L < kv_len_S.unsqueeze(1)
    ids_SM = blocks_SM.masked_fill(position_L[::size] >= kv_len_S.unsqueeze(1), 0)  # what follows may be no block
    found_SLZ = latents_PBZ[ids_SM.long()].flatten(1, 2).to(q_SNZ.dtype).float()
    found_SLZ.masked_fill_(~seen_SL.unsqueeze(2), 0)  # 0 x NaN is NaN
    latents_S1LZ = found_SLZ.unsqueeze(1)
    out_S1NC = scaled_dot_product_attention(
        q_SNZ.float().unsqueeze(1), latents_S1LZ, latents_S1LZ[..., :rank], attn_mask=seen_SL[:, None, None],
        scale=scale,
    )  # fmt: skip
    return out_S1NC.squeeze(1).masked_fill((kv_len_S == 0)[:, None, None], 0).to(q_SNZ.dtype)
