"""One decoder layer: attention within documents, then experts or one network, as qwen3_moe, qwen3 and llama have them.

Legend: B rows, L positions of a row, T = B x L tokens, D hidden size, N query heads, M key heads, H head dimension,
E experts, K experts of a token, F width of an expert, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import moe_kernels as mk
from moe_kernels.training.sparse_mlp import softmax_gates, sparse_mlp
from pocket_moe.config import PocketConfig
from pocket_moe.corpus.documents import Documents

ProductKind = Literal["sparse_mlp", "parallel_linear"]
Choose = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Router logits ``[T, E]`` float32 in, ids ``[T, K]`` and weights ``[T, K]`` float32 out, with gradients."""


class ExpertProduct(Protocol):
    """Rows, the chosen experts and the plan of these ids in, the weighted sum of the experts' outputs out."""

    def __call__(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, plan: mk.Plan) -> Tensor: ...


class Routing(NamedTuple):
    """What one layer's router did, for the losses that act on it."""

    logits_TE: Tensor
    plan: mk.Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class SoftmaxTopK:
    """The K most probable experts; their probabilities, divided by their sum if ``renormalise``."""

    top_k: int
    renormalise: bool

    def __call__(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        return softmax_gates(logits_TE, self.top_k, renormalise=self.renormalise)


class Experts(nn.Module):
    """E gated networks through our kernels, forward and backward; gate rows come before up rows in ``w_in``."""

    def __init__(self, config: PocketConfig, kind: ProductKind = "sparse_mlp") -> None:
        super().__init__()
        experts, width, hidden = config.num_experts, config.width, config.hidden_size
        self.w_in = nn.Parameter(torch.empty(experts, 2 * width, hidden))
        self.w_out = nn.Parameter(torch.empty(experts, hidden, width))
        self.kind = kind

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, plan: mk.Plan) -> Tensor:  # noqa: ARG002
        if self.kind == "sparse_mlp":
            return sparse_mlp(x_TD, self.w_in, self.w_out, plan, weights_TK, activation="swiglu")
        gate_SF, up_SF = mk.parallel_linear(x_TD, self.w_in, plan, grouped_out=True).chunk(2, dim=1)
        return mk.parallel_linear(F.silu(gate_SF) * up_SF, self.w_out, plan, gates=weights_TK, grouped_in=True)


class SparseMlp(nn.Module):
    """Router and experts. ``choose`` and ``experts`` may be replaced: by a shuffled router, by quantised experts."""

    choose: Choose
    experts: ExpertProduct

    def __init__(self, config: PocketConfig, kind: ProductKind = "sparse_mlp") -> None:
        super().__init__()
        self.router = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.choose = SoftmaxTopK(top_k=config.num_experts_per_tok, renormalise=config.norm_topk_prob)
        self.experts = Experts(config, kind)

    def __setattr__(self, name: str, value: Any) -> None:
        # A module refuses to put a plain callable where a module was.
        if name == "experts" and not isinstance(value, nn.Module):
            self._modules.pop(name, None)
        super().__setattr__(name, value)

    def forward(self, h_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Routing]:
        """Output, the chosen ids and weights, and what the router's losses need. The router works in float32."""
        logits_TE = F.linear(h_TD.float(), self.router.float())
        ids_TK, weights_TK = self.choose(logits_TE)
        order = mk.plan(ids_TK, self.router.shape[0])
        return self.experts(h_TD, ids_TK, weights_TK, order), ids_TK, weights_TK, Routing(logits_TE, order)


class DenseMlp(nn.Module):
    """One gated network for every token; gate rows come before up rows in ``w_in``."""

    def __init__(self, config: PocketConfig) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.empty(2 * config.width, config.hidden_size))
        self.w_out = nn.Parameter(torch.empty(config.hidden_size, config.width))

    def forward(self, h_TD: Tensor) -> Tensor:
        gate_TF, up_TF = F.linear(h_TD, self.w_in).chunk(2, dim=1)
        return F.linear(F.silu(gate_TF) * up_TF, self.w_out)


class Attention(nn.Module):
    """Causal, within documents, with grouped keys; rows of ``qkv`` are the query heads, the key heads, the values'."""

    def __init__(self, config: PocketConfig) -> None:
        super().__init__()
        heads, keys, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.heads, self.keys, self.head_dim, self.eps = heads, keys, size, config.rms_norm_eps
        self.qkv = nn.Parameter(torch.empty((heads + 2 * keys) * size, config.hidden_size))
        self.out = nn.Parameter(torch.empty(config.hidden_size, heads * size))
        self.q_norm = nn.Parameter(torch.empty(size)) if config.qk_norm else None
        self.k_norm = nn.Parameter(torch.empty(size)) if config.qk_norm else None

    def forward(self, h_BLD: Tensor, documents: Documents) -> Tensor:
        parts_BLXH = F.linear(h_BLD, self.qkv).view(*h_BLD.shape[:2], -1, self.head_dim)
        q_BLNH, k_BLMH, v_BLMH = torch.split(parts_BLXH, [self.heads, self.keys, self.keys], dim=2)
        q_BLNH = rotate(self._norm(q_BLNH, self.q_norm), documents)
        # Keys are repeated here because masked attention on CUDA is slow with grouped keys.
        k_BLNH, v_BLNH = (
            x.repeat_interleave(self.heads // self.keys, dim=2)
            for x in (rotate(self._norm(k_BLMH, self.k_norm), documents), v_BLMH)
        )
        return F.linear(attend(q_BLNH, k_BLNH, v_BLNH, documents).flatten(2), self.out)

    def _norm(self, x: Tensor, weight_H: Tensor | None) -> Tensor:
        return x if weight_H is None else F.rms_norm(x, (self.head_dim,), weight_H, self.eps)


def rotate(x_BLNH: Tensor, documents: Documents) -> Tensor:
    """Dimensions i and i + H/2 turned by position x frequency."""
    first, second = x_BLNH.chunk(2, dim=3)
    return x_BLNH * documents.cos_BL1H + torch.cat((-second, first), dim=3) * documents.sin_BL1H


def attend(q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, documents: Documents) -> Tensor:
    if documents.starts is not None:
        q_TNH, k_TNH, v_TNH = (x.flatten(0, 1) for x in (q_BLNH, k_BLNH, v_BLNH))
        return _varlen(q_TNH, k_TNH, v_TNH, documents.starts, q_BLNH.shape[1]).view_as(q_BLNH)
    q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
    bias = documents.bias_B1LL
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=bias is None).transpose(1, 2)


def _varlen(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, starts: Tensor, longest: int) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # from torch 2.10 on; only this kind of attention needs it

    causal: dict[str, Any] = {"is_causal": True} if _takes_is_causal() else {"window_size": (-1, 0)}
    y_TNH = varlen_attn(q_TNH, k_TNH, v_TNH, starts, starts, longest, longest, **causal)
    assert isinstance(y_TNH, Tensor), "it returns more only where asked to"
    return y_TNH


# A signature cannot be looked at while a graph is traced.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _takes_is_causal() -> bool:
    """How this torch's ``varlen_attn`` is told that attention is causal; it changed with torch 2.11."""
    from torch.nn.attention.varlen import varlen_attn

    return "is_causal" in inspect.signature(varlen_attn).parameters


class Block(nn.Module):
    """x + attention(norm(x)), then + mlp(norm(x)); ``dropout`` acts on what the branches add, in training only."""

    def __init__(self, config: PocketConfig, *, dropout: float, kind: ProductKind) -> None:
        super().__init__()
        self.attention_norm = nn.Parameter(torch.empty(config.hidden_size))
        self.attention = Attention(config)
        self.mlp_norm = nn.Parameter(torch.empty(config.hidden_size))
        self.mlp: SparseMlp | DenseMlp = SparseMlp(config, kind) if config.sparse else DenseMlp(config)
        self.dropout, self.eps = dropout, config.rms_norm_eps
        self.attention_in_training: Callable[[Tensor, Documents], tuple[Tensor, Tensor]] = self.attend
        """Replaced by its compiled form where compilation is asked for."""

    def attend(self, x_BLD: Tensor, documents: Documents) -> tuple[Tensor, Tensor]:
        """The residual stream after attention, and the rows that the experts or the network read."""
        h_BLD = F.rms_norm(x_BLD, x_BLD.shape[-1:], self.attention_norm, self.eps)
        x_BLD = x_BLD + F.dropout(self.attention(h_BLD, documents), self.dropout, self.training)
        return x_BLD, F.rms_norm(x_BLD, x_BLD.shape[-1:], self.mlp_norm, self.eps).flatten(0, 1)

    def forward(self, x_BLD: Tensor, documents: Documents) -> tuple[Tensor, tuple[Tensor, Tensor, Routing] | None]:
        """The residual stream after this layer, and ids, weights and routing where it has experts."""
        x_BLD, h_TD = (self.attention_in_training if self.training else self.attend)(x_BLD, documents)
        if isinstance(self.mlp, DenseMlp):
            y_TD, routed = self.mlp(h_TD), None
        else:
            y_TD, ids_TK, weights_TK, routing = self.mlp(h_TD)
            routed = ids_TK, weights_TK, routing
        return x_BLD + F.dropout(y_TD, self.dropout, self.training).view_as(x_BLD), routed
