"""How rows are multiplied: as is fastest for their number, or so that a row's bits do not depend on the others.

One :class:`Products` is chosen for a worker (``--batch-invariant``) and given to its model and its experts; nothing
else asks.
Legend: T rows, I input and O output columns, D hidden size, E experts, F expert width, K experts chosen per row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_kernels import Weight, fused_moe, quantised_linear
from moe_kernels.activations.op import Activation
from moe_kernels.invariant import op as invariant
from moe_kernels.invariant.reference import in_whole_vectors


class Products(Protocol):
    """What is computed of rows and could depend on how many there are. All else treats each row by itself."""

    @property
    def invariant(self) -> bool:
        """Whether attention, too, must compute a row the same way whatever else is in the step."""

    def linear(self, x_TI: Tensor, w_OI: Weight, bias_O: Tensor | None = None) -> Tensor:
        """Return x w^T + bias, in x's dtype. A weight that is quantised is one of a single expert."""

    def scores(self, x_TD: Tensor, w_ED: Tensor) -> Tensor:
        """Return x w^T in float32. ``w_ED`` is float32, or on a GPU of x's dtype."""

    def each(self, op: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return ``op``, which is made of exponentials or angles, of each element."""

    def experts(
        self,
        x_TD: Tensor,
        w_gate_up_E2FD: Weight,
        w_down_EDF: Weight,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        local_E: Tensor | None,
        *,
        activation: Activation = "swiglu",
        bias_in: Tensor | None = None,
        bias_down: Tensor | None = None,
    ) -> Tensor:
        """Return the weighted sum of the outputs of rows' experts; arguments as of :func:`moe_kernels.fused_moe`."""


class FastestProducts:
    """By whatever kernel suits the number of rows."""

    invariant = False

    def linear(self, x_TI: Tensor, w_OI: Weight, bias_O: Tensor | None = None) -> Tensor:
        return F.linear(x_TI, w_OI, bias_O) if isinstance(w_OI, Tensor) else quantised_linear(x_TI, w_OI, bias_O)

    def scores(self, x_TD: Tensor, w_ED: Tensor) -> Tensor:
        if w_ED.dtype == torch.float32:
            return F.linear(x_TD.float(), w_ED)
        return torch.mm(x_TD, w_ED.T, out_dtype=torch.float32)

    def each(self, op: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return op(x)

    def experts(
        self,
        x_TD: Tensor,
        w_gate_up_E2FD: Weight,
        w_down_EDF: Weight,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        local_E: Tensor | None,
        *,
        activation: Activation = "swiglu",
        bias_in: Tensor | None = None,
        bias_down: Tensor | None = None,
    ) -> Tensor:
        return fused_moe(
            x_TD,
            w_gate_up_E2FD,
            w_down_EDF,
            expert_ids_TK,
            weights_TK,
            local_E=local_E,
            activation=activation,
            bias_in=bias_in,
            bias_down=bias_down,
        )


class InvariantProducts:
    """By the same kernel in the same tiles whatever the number of rows: :mod:`moe_kernels.invariant.op`."""

    invariant = True

    def linear(self, x_TI: Tensor, w_OI: Weight, bias_O: Tensor | None = None) -> Tensor:
        assert isinstance(w_OI, Tensor), "rules of the settings refuse it"
        return invariant.linear(x_TI, w_OI, bias_O)

    def scores(self, x_TD: Tensor, w_ED: Tensor) -> Tensor:
        return invariant.linear(x_TD.float(), w_ED.float())

    def each(self, op: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """On a GPU every element takes the same instructions anyway."""
        return op(x) if x.is_cuda else in_whole_vectors(op, x)

    def experts(
        self,
        x_TD: Tensor,
        w_gate_up_E2FD: Weight,
        w_down_EDF: Weight,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        local_E: Tensor | None,
        *,
        activation: Activation = "swiglu",
        bias_in: Tensor | None = None,
        bias_down: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(w_gate_up_E2FD, Tensor), "rules of the settings refuse it"
        assert isinstance(w_down_EDF, Tensor), "rules of the settings refuse it"
        return invariant.experts(
            x_TD,
            w_gate_up_E2FD,
            w_down_EDF,
            expert_ids_TK,
            weights_TK,
            local_E=local_E,
            activation=activation,
            bias_in=bias_in,
            bias_down=bias_down,
        )


def products_of(*, batch_invariant: bool) -> Products:
    """Return the products that ``--batch-invariant`` asks for."""
    return InvariantProducts() if batch_invariant else FastestProducts()
