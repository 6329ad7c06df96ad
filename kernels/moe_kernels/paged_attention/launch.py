"""Launches of :mod:`moe_kernels.paged_attention.kernel`. Legend: as in :mod:`moe_kernels.paged_attention.op`."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from moe_kernels import backend
from moe_kernels.paged_attention.kernel import merge_parts_kernel, paged_attention_kernel
from moe_kernels.paged_attention.tiling import power_of_two
from moe_kernels.paged_attention.work import Work

_MERGE = {"TILE": 16, "num_warps": 2}
_MERGE_PROGRAMS = 8
"""For each program of attention."""
_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def launch(
    q_TNH: Tensor, k_PBJH: Tensor, v_PBJH: Tensor, blocks_SM: Tensor, work: Work, scale: float, softcap: float | None,
    sinks_N: Tensor | None, window: int,
) -> Tensor:  # fmt: skip
    tiling, room = work.tiling, work.room
    heads, head_dim, block_h = tiling.heads, tiling.head_dim, power_of_two(max(16, tiling.head_dim))
    blocks_SM, sinks = blocks_SM.contiguous(), None if sinks_N is None else sinks_N.contiguous()
    out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    sums = torch.empty(room.slots, heads, head_dim, dtype=torch.float32, device=q_TNH.device)
    logs = torch.empty(room.slots, heads, dtype=torch.float32, device=q_TNH.device)
    has_sinks = sinks is not None
    paged_attention_kernel[(tiling.programs,)](
        q_TNH, k_PBJH, v_PBJH, blocks_SM, work.words_W, sinks if has_sinks else q_TNH, out_TNH, sums, logs, scale,
        softcap or 1.0, window, room.seen_at, q_TNH.stride(0), q_TNH.stride(1), blocks_SM.shape[1], tiling.kv_heads,
        G=tiling.group, H=head_dim, B=k_PBJH.shape[1], NARROW=tiling.narrow, WIDE=tiling.wide, BLOCK_H=block_h,
        BLOCK_L=tiling.length, SOFTCAP=softcap is not None, SINKS=has_sinks, TREES=room.trees,
        DTYPE=tl.float32 if backend.upcast(q_TNH.dtype) else _DTYPES[q_TNH.dtype],
        num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip
    if room.slots:
        merge_parts_kernel[(_MERGE_PROGRAMS * tiling.programs,)](
            work.words_W, sinks if has_sinks else q_TNH, sums, logs, out_TNH, room.merged_at, heads,
            H=head_dim, BLOCK_H=block_h, SINKS=has_sinks, **_MERGE,
        )  # fmt: skip
    return out_TNH
