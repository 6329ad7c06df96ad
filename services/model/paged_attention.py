"""Attention over the paged KV cache: one layer's queries, keys and values in, what each row gathered out.

Legend: T rows of the step, N query heads, K key/value heads, G = N / K queries per key head, H head dimension,
S cache slots, B sequences of a decode group, L positions read, W rows of a prompt piece.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from moe_kernels.paged_decode.op import paged_decode
from services.model.attention_plan import DecodeGroup, PromptPiece, WindowPlan


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What attention is computed in. On a CPU float32: its half-precision kernels are several times slower."""
    return torch.float32 if device.type == "cpu" else dtype


def write_kv(cache: tuple[Tensor, Tensor], slots_T: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> None:
    """Put the step's keys and values into their slots."""
    for cache_NBKH, new_TKH in zip(cache, (k_TKH, v_TKH), strict=True):
        cache_SE = cache_NBKH.view(-1, new_TKH.shape[1] * new_TKH.shape[2])
        cache_SE.index_copy_(0, slots_T, new_TKH.flatten(1).to(cache_SE.dtype))


def attend(plan: WindowPlan, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
    """``out_TE`` with E = N x H, in ``q``'s dtype.

    Args:
        k_TKH, v_TKH: the step's own, also in ``cache`` by now.
        cache: ``(k_NBKH, v_NBKH)`` of the layer.
    """
    if plan.paged is not None:
        paged = plan.paged
        return paged_decode(q_TNH, *cache, paged.blocks_BM, paged.kv_len_B, window=plan.window).flatten(1)
    if len(plan.decode) == 1 and plan.decode[0].rows_B is None:
        return _decode(plan.decode[0], q_TNH, cache)
    out_TE = q_TNH.new_empty(q_TNH.shape[0], q_TNH.shape[1] * q_TNH.shape[2])
    for group in plan.decode:
        assert group.rows_B is not None
        out_TE.index_copy_(0, group.rows_B, _decode(group, q_TNH.index_select(0, group.rows_B), cache))
    for piece in plan.prompts:
        rows = slice(piece.start, piece.start + piece.length)
        out_TE[rows] = _prompt(piece, q_TNH[rows], k_TKH[rows], v_TKH[rows], cache)
    return out_TE


def _decode(group: DecodeGroup, q_BNH: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
    """One new row per sequence. The queries that share a key head form the rows of one product."""
    count, heads, head_dim = q_BNH.shape
    k_BKLH, v_BKLH = (_gather(part, group.blocks_BM, q_BNH.dtype) for part in cache)
    kv_heads = k_BKLH.shape[1]
    q_BKGH = q_BNH.view(count, kv_heads, heads // kv_heads, head_dim)
    out_BKGH = scaled_dot_product_attention(q_BKGH, k_BKLH, v_BKLH, attn_mask=group.mask_B11L)
    return out_BKGH.reshape(count, heads * head_dim)


def _prompt(piece: PromptPiece, q_WNH: Tensor, k_WKH: Tensor, v_WKH: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
    """Rows of one sequence over its prefix, or over each other where there is none."""
    if piece.blocks_M is None:
        k_1KLH, v_1KLH = k_WKH.transpose(0, 1).unsqueeze(0), v_WKH.transpose(0, 1).unsqueeze(0)
    else:
        k_1KLH, v_1KLH = (_gather(part, piece.blocks_M.unsqueeze(0), q_WNH.dtype) for part in cache)
    out_1NWH = scaled_dot_product_attention(
        q_WNH.transpose(0, 1).unsqueeze(0),
        k_1KLH,
        v_1KLH,
        attn_mask=piece.mask_WL,
        is_causal=piece.mask_WL is None,
        enable_gqa=True,
    )
    return out_1NWH.squeeze(0).transpose(0, 1).flatten(1)


def _gather(cache_NBKH: Tensor, blocks_BM: Tensor, dtype: torch.dtype) -> Tensor:
    """The blocks of each sequence in a row: ``[B, K, L, H]``, a view that lies in memory as ``[B, L, K, H]``."""
    count, blocks = blocks_BM.shape
    _, block_size, kv_heads, head_dim = cache_NBKH.shape
    flat_BMKH = cache_NBKH.flatten(1).index_select(0, blocks_BM.flatten()).to(dtype)
    return flat_BMKH.view(count, blocks * block_size, kv_heads, head_dim).transpose(1, 2)
