"""Multi-head latent attention (DeepSeek-V2, section 2.1) over a cache of latents: rows come in, and what the heads put
out goes out.

A position has one latent in the cache: C numbers, from which each head makes its own part of the key and its value, and
R more, rotated, that belong to the keys of all. Two forms give the same (section 2.1.2):

    absorbed   score = (q_plain W_UK) . c + q_rotated . r,   out = (softmax(score) c) W_UV
    expanded   k = [c W_UK^T, r],  v = c W_UV^T,  then attention as ever

Absorbed, all heads read the latent itself: the form for a row that reads many positions. Expanded, each position costs
C (P + V) products once and each pair of a row and a position P + R + V instead of 2 C + R: the form for many rows.

Legend: T rows of the step, W rows of a piece, L positions read, N heads, P numbers of a key that are not rotated, R
that are, H = P + R, V of a value, C of a latent, Z = C + R, B rows that are computed each by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from moe_kernels.add_rms_norm.op import add_rms_norm
from moe_kernels.paged_latent.op import paged_latent
from services.model.latent_plan import LatentPiece, LatentRows
from services.model.paged_attention import AttentionPlan
from services.model.products import Products
from services.model.rope import rotate
from services.model.spec import LatentSpec, ModelSpec
from services.model.weights import LayerWeights

EXPANDED_BYTES = 1 << 28
"""Keys and values of a piece that are in memory at a time: of as many heads as that allows."""


class LatentAttention:
    """Computes the attention of a layer up to its output projection.

    Args:
        dtype: of attention itself, see :func:`services.model.paged_attention.compute_dtype`.
    """

    def __init__(self, spec: ModelSpec, latent: LatentSpec, products: Products, dtype: torch.dtype) -> None:
        self._latent, self._heads, self._interleaved = latent, spec.num_heads, spec.rope.interleaved
        self._products, self._dtype = products, dtype

    def __call__(
        self,
        weights: LayerWeights,
        h_TD: Tensor,
        plan: AttentionPlan,
        cache_NBZ: Tensor,
    ) -> Tensor:
        """Return ``out_TE`` with E = N x V, in ``h``'s dtype. The latents of the rows are put into ``cache_NBZ``,
        that of the layer."""
        assert plan.latent is not None
        q_TNH, own_TZ = self._projected(weights, h_TD, (plan.cos_T1R, plan.sin_T1R))
        cache_NBZ.view(-1, self._latent.size).index_copy_(0, plan.slots_T, own_TZ.to(cache_NBZ.dtype))
        assert weights.kv_b_OC is not None
        kv_b_NOC = weights.kv_b_OC.view(self._heads, -1, self._latent.rank)
        parts = [
            (group.rows_B, self._read(group, _chosen(q_TNH, group.rows_B), kv_b_NOC, cache_NBZ))
            for group in plan.latent.rows
        ]
        if len(parts) == 1 and parts[0][0] is None:
            return parts[0][1].flatten(1)
        out_TNV = h_TD.new_empty(len(h_TD), self._heads, self._latent.value)
        for rows_B, out_BNV in parts:
            assert rows_B is not None
            out_TNV.index_copy_(0, rows_B, out_BNV)
        for piece in plan.latent.pieces:
            rows = slice(piece.start, piece.start + piece.length)
            latents_LZ = own_TZ[rows] if piece.blocks_M is None else self._gathered(piece, cache_NBZ)
            out_TNV[rows] = self._piece(piece, q_TNH[rows], latents_LZ, kv_b_NOC)
        return out_TNV.flatten(1)

    def _projected(self, weights: LayerWeights, h_TD: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return queries ``q_TNH`` and the rows' latents ``own_TZ``, with norms and rotation, in ``h``'s dtype."""
        latent = self._latent
        down_TO = self._products.linear(h_TD, weights.qkv_OD, weights.qkv_bias_O)
        q_TO, c_TC, r_TR = down_TO.split_with_sizes(
            (down_TO.shape[1] - latent.size, latent.rank, latent.rotated), dim=1
        )
        if weights.q_b_OL is not None:
            assert weights.q_norm is not None
            q_TO = self._products.linear(add_rms_norm(q_TO, None, weights.q_norm, latent.eps)[1], weights.q_b_OL)
        assert weights.k_norm is not None
        c_TC = add_rms_norm(c_TC, None, weights.k_norm, latent.eps)[1]
        q_TNP, q_TNR = q_TO.view(len(h_TD), self._heads, -1).split_with_sizes((latent.plain, latent.rotated), dim=2)
        q_TNR, r_T1R = (self._turned(x, angles).to(h_TD.dtype) for x in (q_TNR, r_TR.unsqueeze(1)))
        return torch.cat((q_TNP, q_TNR), dim=2), torch.cat((c_TC, r_T1R.squeeze(1)), dim=1)

    def _turned(self, x_TNR: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate pairs. Of pairs of neighbours all first halves come first then, which no product of two notices."""
        if self._interleaved:
            x_TNR = torch.cat((x_TNR[..., 0::2], x_TNR[..., 1::2]), dim=2)
        return rotate(x_TNR.float(), *angles)

    def _read(self, group: LatentRows, q_BNH: Tensor, kv_b_NOC: Tensor, cache_NBZ: Tensor) -> Tensor:
        """Compute rows that are alone in their sequences, ``[B, N, V]``."""
        q_BNZ = self._absorbed(q_BNH, kv_b_NOC).to(self._dtype)
        out_BNC = paged_latent(
            q_BNZ, cache_NBZ, group.blocks_BM, group.kv_len_B, rank=self._latent.rank, scale=self._latent.scale
        )
        return self._values(out_BNC.to(q_BNH.dtype), kv_b_NOC)

    def _absorbed(self, q_WNH: Tensor, kv_b_NOC: Tensor) -> Tensor:
        """Return queries of latents, ``[W, N, Z]``."""
        q_WNP, q_WNR = q_WNH.split_with_sizes((self._latent.plain, self._latent.rotated), dim=2)
        q_NWC = torch.bmm(q_WNP.transpose(0, 1), kv_b_NOC[:, : self._latent.plain])
        return torch.cat((q_NWC.transpose(0, 1), q_WNR), dim=2)

    def _values(self, out_WNC: Tensor, kv_b_NOC: Tensor) -> Tensor:
        """Return the values that weighted sums of latents are, ``[W, N, V]``."""
        out_NWV = torch.bmm(out_WNC.transpose(0, 1), kv_b_NOC[:, self._latent.plain :].transpose(1, 2))
        return out_NWV.transpose(0, 1)

    def _gathered(self, piece: LatentPiece, cache_NBZ: Tensor) -> Tensor:
        assert piece.blocks_M is not None
        return cache_NBZ.index_select(0, piece.blocks_M).flatten(0, 1)[: piece.kv_len]

    def _piece(self, piece: LatentPiece, q_WNH: Tensor, latents_LZ: Tensor, kv_b_NOC: Tensor) -> Tensor:
        """Compute a piece of a prompt, ``[W, N, V]``."""
        if piece.absorbed:
            q_1NWZ = self._absorbed(q_WNH, kv_b_NOC).to(self._dtype).transpose(0, 1).unsqueeze(0)
            k_11LZ = latents_LZ.to(self._dtype)[None, None]
            out_1NWC = self._attended(piece, q_1NWZ, k_11LZ, k_11LZ[..., : self._latent.rank])
            return self._values(out_1NWC[0].transpose(0, 1).to(q_WNH.dtype), kv_b_NOC)
        parts = [
            self._expanded(piece, q_WNH[:, heads], latents_LZ, kv_b_NOC[heads]) for heads in self._parts(piece.kv_len)
        ]
        return torch.cat(parts, dim=1).to(q_WNH.dtype)

    def _parts(self, positions: int) -> Iterator[slice]:
        """Yield as many heads as may be expanded at a time."""
        each = positions * (2 * self._latent.plain + self._latent.rotated + 2 * self._latent.value)
        most = max(1, EXPANDED_BYTES // (each * self._dtype.itemsize))
        return (slice(first, min(first + most, self._heads)) for first in range(0, self._heads, most))

    def _expanded(self, piece: LatentPiece, q_WNH: Tensor, latents_LZ: Tensor, kv_b_NOC: Tensor) -> Tensor:
        """Compute some heads of a piece, ``[W, N, V]``."""
        latent = self._latent
        c_LC, r_LR = latents_LZ.to(q_WNH.dtype).split_with_sizes((latent.rank, latent.rotated), dim=1)
        kv_LNO = self._products.linear(c_LC, kv_b_NOC.flatten(0, 1)).view(len(c_LC), len(kv_b_NOC), -1)
        k_LNP, v_LNV = kv_LNO.split_with_sizes((latent.plain, latent.value), dim=2)
        k_LNH = torch.cat((k_LNP, r_LR.unsqueeze(1).expand(-1, len(kv_b_NOC), -1)), dim=2)
        q, k, v = (x.to(self._dtype).transpose(0, 1).unsqueeze(0) for x in (q_WNH, k_LNH, v_LNV))
        return self._attended(piece, q, k, v)[0].transpose(0, 1)

    def _attended(self, piece: LatentPiece, q_1NWH: Tensor, k_1JLH: Tensor, v_1JLV: Tensor) -> Tensor:
        """torch's attention. On a GPU its kernel for long keys wants values of their size."""
        size = v_1JLV.shape[3]
        if q_1NWH.is_cuda and size < q_1NWH.shape[3] <= 256:
            v_1JLV = pad(v_1JLV, (0, q_1NWH.shape[3] - size))
        out_1NWV = scaled_dot_product_attention(
            q_1NWH, k_1JLH, v_1JLV, attn_mask=piece.mask_WL, is_causal=piece.mask_WL is None,
            scale=self._latent.scale, enable_gqa=k_1JLH.shape[1] != q_1NWH.shape[1],
        )  # fmt: skip
        return out_1NWV[..., :size]


def _chosen(x_TNH: Tensor, rows_B: Tensor | None) -> Tensor:
    return x_TNH if rows_B is None else x_TNH.index_select(0, rows_B)
