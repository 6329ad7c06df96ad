"""ScatterMoE's figure 4a: one training step of a 1.5B Mixtral-shaped model, with our experts and with the naive loop.

d_model 1024, d_expert 3584, 16 layers, 2 of 8 experts (section 3); sequences of 2048 tokens; a step is forward,
loss and backward, without an optimiser. Attention is torch's, the same on all sides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench import floors
from bench.bank import DTYPES
from bench.draws import Draw
from bench.measuring import Settings
from bench.results import Row
from bench.shapes import LayerShape
from bench.suites.modules import KINDS, Experts, timed
from bench.timing import Call
from moe_kernels.training.sparse_mlp import softmax_gates

SHAPE: Final = LayerShape(name="mixtral-1.5b", title="Mixtral 1.5B", d=1024, f=3584, E=8, k=2, tuned=False)
LAYERS: Final = 16
HEAD: Final = 64
KEY_HEADS: Final = 8
VOCABULARY: Final = 32_000
LENGTH: Final = 2048
SEQUENCES: Final = 8


class Block(nn.Module):
    """Pre-norm attention with grouped keys, then the experts."""

    def __init__(self, shape: LayerShape, kind: type[Experts], dtype: torch.dtype, device: str) -> None:
        super().__init__()
        linear: dict[str, Any] = {"bias": False, "dtype": dtype, "device": device}
        self.heads, self.slots = shape.d // HEAD, shape.k
        self.key_heads = min(KEY_HEADS, self.heads)
        self.norms = nn.ModuleList(nn.RMSNorm(shape.d, dtype=dtype, device=device) for _ in range(2))
        self.qkv = nn.Linear(shape.d, (self.heads + 2 * self.key_heads) * HEAD, **linear)
        self.out = nn.Linear(self.heads * HEAD, shape.d, **linear)
        self.router = nn.Linear(shape.d, shape.E, **linear)
        self.experts = kind(shape, dtype, device)

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_BLD = x_BLD + self._attend(self.norms[0](x_BLD))
        h_TD = self.norms[1](x_BLD).flatten(0, 1)
        ids_TK, gates_TK = softmax_gates(self.router(h_TD), self.slots, renormalise=True)
        y_TD: Tensor = self.experts(h_TD, Draw(ids_TK=ids_TK, weights_TK=gates_TK, active=0))
        return x_BLD + y_TD.view_as(x_BLD)

    def _attend(self, x_BLD: Tensor) -> Tensor:
        batch, length, _ = x_BLD.shape
        parts = self.qkv(x_BLD).view(batch, length, -1, HEAD).transpose(1, 2)
        q, k, v = parts.split([self.heads, self.key_heads, self.key_heads], dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.key_heads)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class Model(nn.Module):
    def __init__(
        self, shape: LayerShape, layers: int, vocabulary: int, kind: type[Experts], dtype: torch.dtype, device: str
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, shape.d, dtype=dtype, device=device)
        self.blocks = nn.ModuleList(Block(shape, kind, dtype, device) for _ in range(layers))
        self.norm = nn.RMSNorm(shape.d, dtype=dtype, device=device)
        self.head = nn.Linear(shape.d, vocabulary, bias=False, dtype=dtype, device=device)

    def loss(self, tokens_BL: Tensor) -> Tensor:
        x = self.embedding(tokens_BL[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return F.cross_entropy(logits, tokens_BL[:, 1:].flatten())


def whole_model(settings: Settings) -> Iterator[Row]:
    """``--tokens`` is the length of a sequence; ``--scale`` divides width, layers, vocabulary and sequences."""
    shape, scale = SHAPE.scaled(settings.scale), settings.scale
    layers, vocabulary, batch = (max(1, count // scale) for count in (LAYERS, VOCABULARY, SEQUENCES))
    length = settings.tokens or LENGTH
    dtype = "bf16" if settings.on_gpu else "fp32"
    for provider in ("ours", "grouped_mm", "torch"):
        row = Row(
            suite=settings.suite, op="model.training", provider=provider, shape=f"{shape.name}-L{layers}",
            rows=batch * length, dtype=dtype, floor_us=_floor_us(shape, layers, vocabulary, batch, length),
        )  # fmt: skip

        def step(provider: str = provider) -> Call:
            torch.manual_seed(settings.seed)
            model = Model(shape, layers, vocabulary, KINDS[provider], DTYPES[dtype], settings.device)
            tokens_BL = torch.randint(vocabulary, (batch, length + 1), device=settings.device)
            return _step(model, tokens_BL)

        yield timed(step, row, settings)


def _step(model: Model, tokens_BL: Tensor) -> Call:
    def call(_: int) -> object:
        loss = model.loss(tokens_BL)
        torch.autograd.backward(loss)
        # Dropped here, so that each step allocates its gradients and they count as its memory.
        model.zero_grad(set_to_none=True)
        return loss.detach()

    return call


def _floor_us(shape: LayerShape, layers: int, vocabulary: int, batch: int, length: int) -> float:
    """Three times the forward products; causal attention counts half its square."""
    tokens = batch * length
    heads = shape.d // HEAD
    attention = (
        2.0 * tokens * shape.d * HEAD * (2 * heads + 2 * min(KEY_HEADS, heads)) + 2.0 * tokens * length * shape.d
    )
    layer = attention + floors.layer_flops(shape, tokens * shape.k) + 2.0 * tokens * shape.d * shape.E
    return 3.0 * floors.compute_us(layers * layer + 2.0 * tokens * shape.d * vocabulary)
