"""A stand-in for a layer's dense part that costs what Qwen3-30B-A3B's does but for attention itself.

Both norms, the projections of queries, keys, values and output, and the router; no KV cache is read.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_kernels import route
from perf.fabric.exchange.world import World

HEADS, KV_HEADS, HEAD = 32, 4, 128


class DenseLayers:
    """Four layers' random weights, in turn, so that none is found in the L2."""

    def __init__(self, world: World, device: torch.device) -> None:
        self._slots = world.slots
        out = (HEADS + 2 * KV_HEADS) * HEAD

        def draw(rows: int, columns: int) -> Tensor:
            return (torch.randn(rows, columns, device=device) / columns**0.5).to(world.torch_dtype)

        self._layers = [
            (draw(out, world.hidden), draw(world.hidden, HEADS * HEAD), draw(world.experts, world.hidden).float())
            for _ in range(4)
        ]

    def __call__(self, layer: int, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The rows that run on, and what is dispatched: rows, ids, weights."""
        qkv_OD, o_DO, router_ED = self._layers[layer % 4]
        shape = (x_TD.shape[1],)
        qkv_TO = F.linear(F.rms_norm(x_TD, shape), qkv_OD)
        x_TD = x_TD + F.linear(qkv_TO[:, : HEADS * HEAD], o_DO)
        h_TD = F.rms_norm(x_TD, shape)
        ids_TK, weights_TK = route(
            F.linear(h_TD.float(), router_ED), top_k=self._slots, score="softmax", order="score_first", renormalise=True
        )
        return x_TD, h_TD, ids_TK, weights_TK
