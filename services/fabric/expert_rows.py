"""How many rows each expert took: every link counts what it dispatches.

Legend: T rows, K experts chosen per row, E experts, S = T x K pairs.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class ExpertRows:
    """Counts on the device of the ids and does not wait for it: the sum is read only when metrics are."""

    def __init__(self, layers: Iterable[int], num_experts: int) -> None:
        self._rows = {layer: torch.zeros(num_experts, dtype=torch.int64) for layer in layers}

    def count(self, layer: int, expert_ids_TK: Tensor) -> None:
        counts_E = self._rows[layer]
        if counts_E.device != expert_ids_TK.device:
            counts_E = self._rows[layer] = counts_E.to(expert_ids_TK.device)
        ids_S = expert_ids_TK.flatten()
        counts_E.scatter_add_(0, ids_S.clamp(min=0), (ids_S >= 0).to(counts_E.dtype))

    def totals(self) -> dict[int, list[int]]:
        """Rows by layer and expert since the start. Waits for the device."""
        return {layer: counts.tolist() for layer, counts in self._rows.items()}
