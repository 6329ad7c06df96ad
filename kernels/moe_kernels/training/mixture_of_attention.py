"""Attention whose query heads are experts: every token takes K groups of them, all share keys and values.

ScatterMoE 2.3, algorithm 4 (MoMHA of Tan et al. 2023). Both products of the experts are scattered to scattered, so
positions stay in order and no row is moved for the attention between them.
Legend: B sequences, L their length, T = B x L tokens, D hidden size, E experts, K chosen per token, H query heads of
one expert, G key heads, C head size, S = T x K pairs.
"""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_kernels.arguments import check_count, require, require_kind, require_tensors
from moe_kernels.backend import eager
from moe_kernels.plan.op import plan
from moe_kernels.rotary.op import HEADS_FIRST, ROWS_FIRST, rotate_heads
from moe_kernels.training.checks import check_module_rows, check_positions, check_sizes
from moe_kernels.training.parallel_linear import parallel_linear
from moe_kernels.training.sparse_mlp import autocast, choose


class MixtureOfAttention(nn.Module):
    """K x H query heads per token out of E x H, over G shared key and value heads, causal, with rotary positions.

    Query head h of any expert attends to key head h // (H / G): with G = H each of an expert's heads has a key head
    of its own, which the K chosen experts share. Under autocast all of it runs in autocast's dtype.

    Args:
        hidden: D.
        head_size: C, even.
        heads: H, of one expert.
        key_heads: G, divides H; H if None.
        router: hold a linear router; else the caller passes its logits, or ids and gates.
        rope_theta: base of the rotary frequencies; None: no positions.
    """

    def __init__(
        self,
        hidden: int,
        head_size: int,
        *,
        heads: int,
        experts: int,
        top_k: int,
        key_heads: int | None = None,
        router: bool = False,
        renormalise: bool = True,
        causal: bool = True,
        rope_theta: float | None = 10_000.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        key_heads = heads if key_heads is None else key_heads
        check_sizes(hidden=hidden, head_size=head_size, heads=heads, experts=experts, top_k=top_k)
        check_count("key_heads", key_heads, 1)
        require(heads % key_heads == 0, f"{heads} heads do not divide into {key_heads} key heads")
        require(head_size % 2 == 0, f"head_size must be even, found {head_size}")
        turns = rope_theta is None or isinstance(rope_theta, numbers.Real)
        require_kind(turns, "rope_theta must be a number or None", rope_theta)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.top_k, self.renormalise, self.causal, self.rope_theta = top_k, renormalise, causal, rope_theta
        self.heads, self.key_heads, self.head_size = heads, key_heads, head_size
        self.w_query = nn.Parameter(torch.empty(experts, heads * head_size, hidden, **where))
        self.w_out = nn.Parameter(torch.empty(experts, hidden, heads * head_size, **where))
        self.key = nn.Linear(hidden, key_heads * head_size, bias=False, **where)
        self.value = nn.Linear(hidden, key_heads * head_size, bias=False, **where)
        self.router = nn.Linear(hidden, experts, bias=False, **where) if router else None
        for weight in (self.w_query, self.w_out):
            nn.init.uniform_(weight, -(weight.shape[2] ** -0.5), weight.shape[2] ** -0.5)

    @eager
    def forward(
        self,
        x_BLD: Tensor,
        logits_TE: Tensor | None = None,
        *,
        ids_TK: Tensor | None = None,
        gates_TK: Tensor | None = None,
        positions_BL: Tensor | None = None,
    ) -> Tensor:
        """``[B, L, D] -> [B, L, D]``. ``positions_BL`` (0, 1, ... if None) only turn queries and keys: the causal mask
        goes by the order of the rows.

        Raises:
            ArgumentError: neither or both of logits (or a router) and ids with gates; or a shape does not fit.
        """
        require_tensors(x=x_BLD)
        require(x_BLD.dim() == 3, f"x must be [B, L, D], found {tuple(x_BLD.shape)}")
        batch, length, hidden = x_BLD.shape
        x_BLD, w_query, w_out = autocast(x_BLD, self.w_query, self.w_out)
        check_module_rows(x_BLD, w_query)
        check_positions(positions_BL, x_BLD)
        x_TD = x_BLD.reshape(-1, hidden).contiguous()
        ids_TK, gates_TK = choose(self, x_TD, w_query.shape[0], logits_TE, ids_TK, gates_TK)
        order = plan(ids_TK, w_query.shape[0])
        query_SHC = parallel_linear(x_TD, w_query, order)
        attended_SHC = self._attend(query_SHC, x_TD, batch, length, positions_BL)
        y_TD = parallel_linear(attended_SHC, w_out, order, gates=gates_TK, fan_out=1)
        return y_TD.view(batch, length, hidden)

    def _attend(self, query_SHC: Tensor, x_TD: Tensor, batch: int, length: int, positions_BL: Tensor | None) -> Tensor:
        """Rows by pair in, rows by pair out."""
        groups, size, repeats = self.key_heads, self.head_size, self.heads // self.key_heads
        slots = query_SHC.shape[0] // max(batch * length, 1) or self.top_k
        query = query_SHC.view(batch, length, slots, groups, repeats, size)
        key = self.key(x_TD).view(batch, length, 1, groups, 1, size)
        value = self.value(x_TD).view(batch, length, groups, size).transpose(1, 2)
        if self.rope_theta is None:
            query, key = query.permute(HEADS_FIRST), key.permute(HEADS_FIRST)
        else:
            angles_BLC = _angles(x_TD, length, size, self.rope_theta, positions_BL)
            query, key = rotate_heads(query, angles_BLC), rotate_heads(key, angles_BLC)
        attended = F.scaled_dot_product_attention(
            query.flatten(1, 3),
            key.flatten(1, 3),
            value,
            is_causal=self.causal,
            enable_gqa=slots * self.heads != groups,
        )
        by_pair = attended.view(batch, groups, slots, repeats, length, size).permute(ROWS_FIRST)
        return by_pair.reshape(batch * length * slots, self.heads * size).contiguous()

    def extra_repr(self) -> str:
        experts, hidden, _ = self.w_out.shape
        heads = f"head_size={self.head_size}, heads={self.heads}, key_heads={self.key_heads}"
        return f"hidden={hidden}, {heads}, experts={experts}, top_k={self.top_k}"


def _angles(x_TD: Tensor, length: int, size: int, theta: float, positions_BL: Tensor | None) -> Tensor:
    """``[B or 1, L, C / 2]``: position x theta^(-2 i / C), in float32 or wider."""
    if positions_BL is None:
        positions_BL = torch.arange(length, device=x_TD.device).unsqueeze(0)
    dtype = torch.promote_types(x_TD.dtype, torch.float32)
    frequencies_C = theta ** (-torch.arange(0, size, 2, device=x_TD.device, dtype=dtype) / size)
    return positions_BL.unsqueeze(-1) * frequencies_C
