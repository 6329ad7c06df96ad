"""The expert part of the model: weights of some experts of each layer, and the rows that pass through them.

Legend: T rows, D hidden size, K experts chosen per row, E experts held, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moe_kernels import ArgumentError, QuantisedWeight, Weight, stack_rows
from moe_kernels.activations.op import Activation
from services.errors import ConfigError
from services.model.host_memory import spare
from services.model.products import FastestProducts, Products

GATE_UP, DOWN = "gate_up", "down"
GATE_UP_BIAS, DOWN_BIAS = "gate_up_bias", "down_bias"
"""Names of a layer's matrices and biases, as workers send them to one another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertWeights:
    """Experts of one layer that a shard holds, dense or quantised. The i-th of both weights is ``expert_ids[i]``'s, as
    is that of the biases, which are in the serving dtype; None where the family has none."""

    expert_ids: tuple[int, ...]
    w_gate_up_E2FD: Weight
    w_down_EDF: Weight
    bias_gate_up_E2F: Tensor | None = None
    bias_down_ED: Tensor | None = None

    def matrices(self) -> dict[str, Weight]:
        """Return all weights and biases of the layer by name."""
        found = {GATE_UP: self.w_gate_up_E2FD, DOWN: self.w_down_EDF}
        biases = {GATE_UP_BIAS: self.bias_gate_up_E2F, DOWN_BIAS: self.bias_down_ED}
        return found | {name: bias for name, bias in biases.items() if bias is not None}

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of the layer by name, each with E first."""
        return {
            name: tensor
            for matrix, weight in self.matrices().items()
            for name, tensor in tensors_of(matrix, weight).items()
        }

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())


def tensors_of(matrix: str, weight: Weight) -> dict[str, Tensor]:
    """Return a weight's tensors by name: under the matrix's own if it is dense, its parts' after a dot if not."""
    if isinstance(weight, Tensor):
        return {matrix: weight}
    return {f"{matrix}.{part}": tensor for part, tensor in weight.tensors().items()}


def sliced(whole: ExpertWeights, index: int, count: int) -> ExpertWeights:
    """Copy slice ``index`` of ``count`` of each expert's inner width. The outputs of all slices add up: the bias of the
    down projection is the first slice's, others have zeros.

    Raises:
        ConfigError: the width does not divide, or not at such columns as the kind of the weights may be cut at.
    """
    if count == 1:
        return whole
    width = whole.w_down_EDF.shape[2]
    if width % count:
        raise ConfigError(
            f"Experts of width {width} cannot be split into {count} slices.",
            hint="Choose a number that divides the width.",
        )
    begin, end = index * width // count, (index + 1) * width // count
    biases = whole.bias_gate_up_E2F, whole.bias_down_ED
    try:
        return ExpertWeights(
            expert_ids=whole.expert_ids,
            w_gate_up_E2FD=_inner_rows(whole.w_gate_up_E2FD, width, begin, end),
            w_down_EDF=_columns(whole.w_down_EDF, begin, end),
            bias_gate_up_E2F=None if biases[0] is None else torch.cat(_parts(biases[0], width, begin, end), dim=1),
            bias_down_ED=biases[1] if biases[1] is None or index == 0 else torch.zeros_like(biases[1]),
        )
    except ArgumentError as error:
        raise ConfigError(
            f"Experts of width {width} that are held quantised cannot be split into {count} slices: {error}.",
            hint="Choose fewer slices, or --expert-format dense.",
        ) from error


def _inner_rows(weight: Weight, width: int, begin: int, end: int) -> Weight:
    """Copy rows of gate and up projection."""
    if isinstance(weight, Tensor):
        return torch.cat(_parts(weight, width, begin, end), dim=1)
    return stack_rows(*(weight.rows(first, last) for first, last in ((begin, end), (width + begin, width + end))))


def _parts(both: Tensor, width: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
    """Return rows of the gate projection, and the same of the up projection."""
    return both[:, begin:end], both[:, width + begin : width + end]


def _columns(weight: Weight, begin: int, end: int) -> Weight:
    return weight[:, :, begin:end].contiguous() if isinstance(weight, Tensor) else weight.columns(begin, end)


class ExpertShard:
    """Some or all experts of the MoE layers of a model. Expert ids are the model's; others than those here are skipped.
    What a CPU keeps beside quantised ones leaves the host :func:`services.model.host_memory.spare`.

    Args:
        layers: layer index -> the experts of that layer that are here.
        num_experts: experts per layer in the whole model.
        products: how rows are multiplied.
        activation: what is between an expert's two products.
    """

    def __init__(
        self,
        layers: Mapping[int, ExpertWeights],
        *,
        num_experts: int,
        products: Products | None = None,
        activation: Activation = "swiglu",
    ) -> None:
        self._activation = activation
        self._layers, self._products = dict(layers), products or FastestProducts()
        self._slots = {layer: _slot_of_expert(held, num_experts) for layer, held in layers.items()}
        for held in layers.values():
            for weight in (held.w_gate_up_E2FD, held.w_down_EDF):
                if isinstance(weight, QuantisedWeight):
                    weight.forms.spare = spare

    def by_layer(self) -> dict[int, Callable[[Tensor, Tensor, Tensor], Tensor]]:
        """Return :meth:`forward` of layers with experts here, as :class:`services.fabric.local.LocalLink` calls it."""
        return {layer: partial(self.forward, layer) for layer in self._layers}

    def expert_ids(self, layer: int) -> tuple[int, ...]:
        return self._layers[layer].expert_ids

    def forward(self, layer: int, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Sum ``y_TD`` of weight x expert(row) over the slots whose expert is here, in slot order.

        Args:
            x_TD: rows in the serving dtype.
            expert_ids_TK: int64, the model's ids; -1 is skipped.
            weights_TK: float32.
        """
        held = self._layers[layer]
        weights = held.w_gate_up_E2FD, held.w_down_EDF
        return self._products.experts(
            x_TD,
            *weights,
            expert_ids_TK,
            weights_TK,
            self._slots[layer],
            activation=self._activation,
            bias_in=held.bias_gate_up_E2F,
            bias_down=held.bias_down_ED,
        )


def _slot_of_expert(held: ExpertWeights, num_experts: int) -> Tensor | None:
    """Return the model's expert id -> index into the weights here, -1 if absent; None if all ids are their indices."""
    if held.expert_ids == tuple(range(num_experts)):
        return None
    slots_E = torch.full((num_experts,), -1, dtype=torch.int32, device=held.w_down_EDF.device)
    slots_E[list(held.expert_ids)] = torch.arange(len(held.expert_ids), dtype=torch.int32, device=slots_E.device)
    return slots_E
