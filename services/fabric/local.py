"""ExpertLink within one process: rows never leave it, the experts are called where they are dispatched.

Legend: T rows, D hidden size, K experts chosen per row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(x_TD, expert_ids_TK, weights_TK) -> y_TD``: all experts of one layer; -1 in the ids is skipped."""


@dataclass(frozen=True, slots=True)
class LocalHandle:
    """A dispatch whose result is already there."""

    y_TD: Tensor


class LocalLink:
    """Calls a layer's experts in place and counts the rows each expert took.

    Args:
        experts: layer index -> the layer's experts.
        num_experts: experts per layer, the width of the counts.
    """

    def __init__(self, experts: Mapping[int, Experts], *, num_experts: int) -> None:
        self._experts = dict(experts)
        self._rows = {layer: torch.zeros(num_experts, dtype=torch.int64) for layer in experts}

    def dispatch(self, layer: int, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> LocalHandle:
        self._count(layer, expert_ids_TK)
        return LocalHandle(self._experts[layer](x_TD, expert_ids_TK, weights_TK))

    def combine(self, handle: LocalHandle) -> Tensor:
        return handle.y_TD

    def expert_rows(self) -> dict[int, list[int]]:
        """Rows that each expert of each layer has taken since the link was made. Waits for the device."""
        return {layer: counts.tolist() for layer, counts in self._rows.items()}

    def _count(self, layer: int, expert_ids_TK: Tensor) -> None:
        # Stays on the device and does not wait for it: the sum is read only when metrics are.
        counts_E = self._rows[layer]
        if counts_E.device != expert_ids_TK.device:
            counts_E = self._rows[layer] = counts_E.to(expert_ids_TK.device)
        ids_S = expert_ids_TK.flatten()
        counts_E.scatter_add_(0, ids_S.clamp(min=0), (ids_S >= 0).to(counts_E.dtype))
