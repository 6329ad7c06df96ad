"""ScatterMoE's figures 7 and 8: a mixture of attention heads (MoMHA), inference and training, over granularity.

Section 3.4: d_model 4096, d_head 128, T = 16 x 2048, 32 active heads, h_expert = 32 / k, E = 8k.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench import draws, floors
from bench.bank import DTYPES
from bench.draws import Draw
from bench.measuring import Settings
from bench.results import Row
from bench.suites.modules import forward_call, timed, training_call
from moe_kernels.training.mixture_of_attention import MixtureOfAttention

LENGTH: Final = 2048
SEQUENCES: Final = 16
HIDDEN: Final = 4096
HEAD: Final = 128
ACTIVE_HEADS: Final = 32
GRANULARITY: Final = (1, 2, 4, 8, 16)


class Ours(nn.Module):
    def __init__(self, module: MixtureOfAttention) -> None:
        super().__init__()
        self.module = module

    def forward(self, x_BLD: Tensor, draw: Draw) -> Tensor:
        y_BLD: Tensor = self.module(x_BLD, ids_TK=draw.ids_TK, gates_TK=draw.weights_TK)
        return y_BLD


class Dense(nn.Module):
    """The "active parameters" baseline: the same number of query heads per token, all in one expert."""

    def __init__(self, hidden: int, heads: int, key_heads: int, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.heads, self.key_heads = heads, key_heads
        widths = (heads, key_heads, key_heads)
        self.inputs = nn.ModuleList(
            nn.Linear(hidden, count * HEAD, bias=False, dtype=dtype, device=device) for count in widths
        )
        self.out = nn.Linear(heads * HEAD, hidden, bias=False, dtype=dtype, device=device)

    def forward(self, x_BLD: Tensor, _draw: Draw) -> Tensor:
        batch, length, _ = x_BLD.shape
        q, k, v = (layer(x_BLD).view(batch, length, -1, HEAD).transpose(1, 2) for layer in self.inputs)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.key_heads)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


def momha(settings: Settings) -> Iterator[Row]:
    """``--tokens`` is the length of a sequence; ``--scale`` divides the hidden size and the number of sequences."""
    length = settings.tokens or LENGTH
    batch, hidden = max(1, SEQUENCES // settings.scale), max(HEAD, HIDDEN // settings.scale)
    dtype = "bf16" if settings.on_gpu else "fp32"
    scaled = "" if settings.scale == 1 else f"/{settings.scale}"
    for slots in GRANULARITY:
        x_BLD = torch.randn(batch, length, hidden, dtype=DTYPES[dtype], device=settings.device)
        draw = draws.uniform(batch * length, 8 * slots, slots, seed=settings.seed, device=settings.device)
        for provider in ("ours", "torch"):
            module = _module(provider, hidden, slots, DTYPES[dtype], settings.device)
            for training in (False, True):
                row = Row(
                    suite=settings.suite, op="momha.training" if training else "momha.forward", provider=provider,
                    shape=f"momha-k{slots}{scaled}", rows=batch * length, dtype=dtype,
                    floor_us=_floor_us(batch, length, hidden, ACTIVE_HEADS // slots) * (3 if training else 1),
                )  # fmt: skip
                build = training_call if training else forward_call
                yield timed(partial(build, module, x_BLD, draw), row, settings, graph=not training)


def _module(provider: str, hidden: int, slots: int, dtype: torch.dtype, device: str) -> nn.Module:
    """Both have 32 active query heads and 32 / k key heads."""
    heads = ACTIVE_HEADS // slots
    if provider == "torch":
        return Dense(hidden, ACTIVE_HEADS, heads, dtype, device)
    return Ours(
        MixtureOfAttention(
            hidden, HEAD, heads=heads, experts=8 * slots, top_k=slots, rope_theta=None, dtype=dtype, device=device
        )
    )


def _floor_us(batch: int, length: int, hidden: int, key_heads: int) -> float:
    """Projections, and half of the square of scores (causal) times two products."""
    projections = 2.0 * batch * length * hidden * HEAD * (2 * ACTIVE_HEADS + 2 * key_heads)
    scores = 2.0 * batch * length * length * ACTIVE_HEADS * HEAD
    return floors.compute_us(projections + scores)
