"""Counts how many rows each expert took, in every link that dispatches them.

Legend: T rows, K experts chosen per row, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from moe_kernels import count_pairs
from services.fabric.device_counters import Counters
from services.fabric.link import SynchronousLink


class ExpertRows:
    """Counts on the device of the ids, and does not wait for it: only :meth:`totals` reads the counts."""

    def __init__(self, layers: Iterable[int], num_experts: int) -> None:
        self._rows = {layer: torch.zeros(num_experts, dtype=torch.int64) for layer in layers}
        self._counters = Counters()

    def count(self, layer: int, expert_ids_TK: Tensor) -> None:
        """Add the pairs of one dispatch of ``layer``; ``expert_ids_TK`` is int64, and -1 counts for no expert."""
        counts_E = self._rows[layer]
        if counts_E.device != expert_ids_TK.device:
            counts_E = self._rows[layer] = counts_E.to(expert_ids_TK.device)
        count_pairs(counts_E, expert_ids_TK)

    def totals(self) -> dict[int, list[int]]:
        """Return the rows since the start by layer and expert; a running step may be counted in part."""
        by_device: dict[torch.device, dict[int, Tensor]] = {}
        for layer, counts_E in self._rows.items():
            by_device.setdefault(counts_E.device, {})[layer] = counts_E
        found: dict[int, list[int]] = {}
        for counts in by_device.values():
            found |= zip(counts, self._counters.read(list(counts.values())), strict=True)
        return {layer: found[layer] for layer in self._rows}


class CountedLink(SynchronousLink):
    """Base class of links that count in ``rows`` what they dispatch."""

    def __init__(self, rows: ExpertRows) -> None:
        self._rows = rows

    def expert_rows(self) -> dict[int, list[int]]:
        """Return layer -> rows by expert that this link has dispatched; rows that are sent again count once."""
        return self._rows.totals()
