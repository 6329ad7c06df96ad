"""Routers that choose the wrong experts, to show what the right choice is worth.

Legend: T rows, E experts, K experts of a row.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pocket_moe.model.layers import Choose
from pocket_moe.model.model import PocketMoe


def derangement(experts: int, seed: int) -> list[int]:
    """A permutation that leaves no expert in its place, the same for the same seed.

    Example: ``derangement(2, 0) == [1, 0]``.
    """
    assert experts > 1, "one expert has nowhere to go"
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(experts)
        if (order != np.arange(experts)).all():
            return [int(expert) for expert in order]


class Deranged:
    """The router's choice and weights, but expert ``order[e]`` works where e was chosen."""

    def __init__(self, choose: Choose, order: list[int]) -> None:
        self._choose, self._order = choose, torch.tensor(order)

    def __call__(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        ids_TK, weights_TK = self._choose(logits_TE)
        return self._order.to(ids_TK.device)[ids_TK], weights_TK


class Uniform:
    """K different experts drawn evenly for every token; the weights are those of the router's own choice."""

    def __init__(self, choose: Choose, seed: int) -> None:
        self._choose, self._seed = choose, seed
        self._generator: torch.Generator | None = None

    def __call__(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        _, weights_TK = self._choose(logits_TE)
        if self._generator is None:
            self._generator = torch.Generator(logits_TE.device).manual_seed(self._seed)
        draw_TE = torch.rand(logits_TE.shape, generator=self._generator, device=logits_TE.device)
        return draw_TE.topk(weights_TK.shape[1]).indices, weights_TK


def derange(model: PocketMoe, seed: int) -> None:
    """Every layer with a derangement of its own."""
    for layer, mlp in model.moe_layers():
        mlp.choose = Deranged(mlp.choose, derangement(model.config.num_experts, seed + layer))


def randomise(model: PocketMoe, seed: int) -> None:
    for layer, mlp in model.moe_layers():
        mlp.choose = Uniform(mlp.choose, seed + layer)
