"""The expert part of the model: weights of some experts of each layer, and the rows that pass through them.

Legend: T rows, D hidden size, K experts chosen per row, E experts held, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from services.errors import ConfigError
from services.model.products import FastestProducts, Products


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertWeights:
    """Experts of one layer that a shard holds; ``w_gate_up_E2FD[i]`` belongs to expert ``expert_ids[i]``."""

    expert_ids: tuple[int, ...]
    w_gate_up_E2FD: Tensor
    w_down_EDF: Tensor


def sliced(whole: ExpertWeights, index: int, count: int) -> ExpertWeights:
    """Copy slice ``index`` of ``count`` of each expert's inner width. The outputs of all slices add up.

    Raises:
        ConfigError: the width does not divide.
    """
    if count == 1:
        return whole
    width = whole.w_down_EDF.shape[2]
    if width % count:
        raise ConfigError(
            f"Experts of width {width} cannot be split into {count} slices.",
            hint="Choose a number that divides the width.",
        )
    part = slice(index * width // count, (index + 1) * width // count)
    gate_EFD, up_EFD = whole.w_gate_up_E2FD.split_with_sizes((width, width), dim=1)
    return ExpertWeights(
        expert_ids=whole.expert_ids,
        w_gate_up_E2FD=torch.cat([gate_EFD[:, part], up_EFD[:, part]], dim=1),
        w_down_EDF=whole.w_down_EDF[:, :, part].contiguous(),
    )


class ExpertShard:
    """Some or all experts of the MoE layers of a model. Expert ids are the model's; others than those here are skipped.

    Args:
        layers: layer index -> the experts of that layer that are here.
        num_experts: experts per layer in the whole model.
        products: how rows are multiplied.
    """

    def __init__(
        self, layers: Mapping[int, ExpertWeights], *, num_experts: int, products: Products | None = None
    ) -> None:
        self._layers, self._products = dict(layers), products or FastestProducts()
        self._slots = {layer: _slot_of_expert(held, num_experts) for layer, held in layers.items()}

    def by_layer(self) -> dict[int, Callable[[Tensor, Tensor, Tensor], Tensor]]:
        """Return :meth:`forward` of layers with experts here, as :class:`services.fabric.local.LocalLink` calls it."""
        return {layer: partial(self.forward, layer) for layer in self._layers}

    def expert_ids(self, layer: int) -> tuple[int, ...]:
        return self._layers[layer].expert_ids

    def forward(self, layer: int, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Sum ``y_TD`` of weight x expert(row) over the slots whose expert is here, in slot order.

        Args:
            x_TD: rows in the weights' dtype.
            expert_ids_TK: int64, the model's ids; -1 is skipped.
            weights_TK: float32.
        """
        held = self._layers[layer]
        weights = held.w_gate_up_E2FD, held.w_down_EDF
        return self._products.experts(x_TD, *weights, expert_ids_TK, weights_TK, self._slots[layer])


def _slot_of_expert(held: ExpertWeights, num_experts: int) -> Tensor | None:
    """Return the model's expert id -> index into the weights here, -1 if absent; None if all ids are their indices."""
    if held.expert_ids == tuple(range(num_experts)):
        return None
    slots_E = torch.full((num_experts,), -1, dtype=torch.int32, device=held.w_down_EDF.device)
    slots_E[list(held.expert_ids)] = torch.arange(len(held.expert_ids), dtype=torch.int32, device=slots_E.device)
    return slots_E
