"""Reference of :mod:`moe_kernels.paged_attention.kernel`, in float32: sequences' keys in a row, a few rows at a time.

It takes from the work list which rows are whose, and where, but not which positions an item reads.
Legend: as in :mod:`moe_kernels.paged_attention.op`; R rows of an item, L positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels.paged_attention.planner import HEADER, ITEM
from moe_kernels.paged_attention.trees import MOST, SEEN
from moe_kernels.paged_attention.work import Work


def launch(
    q_TNH: Tensor, k_PBJH: Tensor, v_PBJH: Tensor, blocks_SM: Tensor, work: Work, scale: float, softcap: float | None,
    sinks_N: Tensor | None, window: int,
) -> Tensor:  # fmt: skip
    out_TNH = torch.zeros(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    count = int(work.words_W[0])
    items = work.words_W[HEADER : HEADER + ITEM * count].view(count, ITEM)[:, :4]
    for sequence, row, rows, position in {tuple(item) for item in items.tolist()}:  # parts have the same rows
        if position < 0:
            continue
        at, end = work.room.seen_at + SEEN * row, position + rows
        words_R = work.words_W[at : at + SEEN * rows].view(rows, SEEN) if work.room.trees else None
        first = max(position - window + 1, 0) if words_R is None else int(words_R[:, 0].min())
        k_LJH, v_LJH = (_positions(cache, blocks_SM[sequence], first, end, q_TNH.dtype) for cache in (k_PBJH, v_PBJH))
        if words_R is None:
            seen_RL = _seen(position - first, rows, end - first, window, q_TNH.device)
        else:
            seen_RL = _in_tree(words_R.to(torch.int64), torch.arange(first, end, device=q_TNH.device))
        q_RJGH = q_TNH[row : row + rows].float().view(rows, k_LJH.shape[1], -1, q_TNH.shape[2])
        scores_RJGL = torch.einsum("rjgh,ljh->rjgl", q_RJGH, k_LJH) * scale
        if softcap is not None:
            scores_RJGL = softcap * torch.tanh(scores_RJGL / softcap)
        scores_RJGL.masked_fill_(~seen_RL[:, None, None], -torch.inf)
        shares_RJGL = shares(scores_RJGL, sinks_N)
        out_RJGH = torch.einsum("rjgl,ljh->rjgh", shares_RJGL, v_LJH)
        out_TNH[row : row + rows] = out_RJGH.flatten(1, 2).to(q_TNH.dtype)
    return out_TNH


def _positions(cache_PBJH: Tensor, blocks_M: Tensor, first: int, end: int, dtype: torch.dtype) -> Tensor:
    """``[L, J, H]`` float32: those of ``first .. end``."""
    size = cache_PBJH.shape[1]
    blocks = blocks_M[first // size : -(-end // size)].long()
    return cache_PBJH[blocks].flatten(0, 1)[first % size :][: end - first].to(dtype).float()


def _seen(position: int, rows: int, length: int, window: int, device: torch.device) -> Tensor:
    """Whether the row ``position + r`` sees position l: bool ``[R, L]``."""
    position_R1 = torch.arange(position, position + rows, device=device).unsqueeze(1)
    position_L = torch.arange(length, device=device)
    return (position_L <= position_R1) & (position_L > position_R1 - window)


def _in_tree(words_R: Tensor, place_L: Tensor) -> Tensor:
    """Whether a row sees a place, by its words: bool ``[R, L]``."""
    first_R1, known_R1, low_R1, high_R1 = words_R.T.unsqueeze(-1).unbind()
    node_RL = place_L - known_R1
    bits_R1 = high_R1 << 32 | low_R1 & 0xFFFFFFFF
    ancestor_RL = (node_RL >= 0) & (node_RL < MOST) & (bits_R1 >> node_RL.clamp(0, MOST - 1) & 1 == 1)
    return ancestor_RL | ((node_RL < 0) & (place_L >= first_R1))


def shares(scores_RJGL: Tensor, sinks_N: Tensor | None) -> Tensor:
    """The softmax over the positions, of which a sink, that has no value, takes its share."""
    if sinks_N is None:
        return scores_RJGL.softmax(dim=-1)
    rows, kv_heads, group, _ = scores_RJGL.shape
    sink_RJG1 = sinks_N.float().view(1, kv_heads, group, 1).expand(rows, -1, -1, -1)
    return torch.cat([scores_RJGL, sink_RJG1], dim=-1).softmax(dim=-1)[..., :-1]
