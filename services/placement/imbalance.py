"""The peak load of a placement while capacity moves between shard groups, without a whole sum for each change.

Legend: L layers, G groups.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from services.placement.load import per_capacity


class PeakLoads:
    """Keeps for each layer the three groups with the highest load per capacity: a change of two groups leaves one.

    :meth:`add` changes ``capacity_G``.
    """

    def __init__(self, loads_LG: Sequence[Sequence[float]], capacity_G: Sequence[float]) -> None:
        self._loads_LG = loads_LG
        self.capacity_G = list(capacity_G)
        self._ratios_LG = [list(map(per_capacity, loads_G, self.capacity_G)) for loads_G in loads_LG]
        self._top_L = [_top(ratios_G) for ratios_G in self._ratios_LG]

    @property
    def value(self) -> float:
        """The value of :func:`services.placement.load.peak_load`."""
        return sum(top[0][0] for top in self._top_L)

    def deciding(self) -> set[int]:
        """Return groups that alone have the highest ratio of a layer: capacity for other groups lowers no peak load."""
        return {top[0][1] for top in self._top_L if len(top) == 1 or top[0][0] > top[1][0]}

    def after(self, change: Mapping[int, float]) -> float:
        """Return the peak load with other capacities for at most two groups."""
        total = 0.0
        for loads_G, top in zip(self._loads_LG, self._top_L, strict=True):
            highest = 0.0
            for ratio, group in top:
                if group not in change:
                    highest = ratio
                    break
            for group, capacity in change.items():
                ratio = per_capacity(loads_G[group], capacity)
                if ratio > highest:
                    highest = ratio
            total += highest
        return total

    def add(self, group: int, capacity: float) -> None:
        """Give ``group`` more capacity."""
        self.capacity_G[group] += capacity
        for layer, loads_G in enumerate(self._loads_LG):
            before = self._ratios_LG[layer][group]
            now = self._ratios_LG[layer][group] = per_capacity(loads_G[group], self.capacity_G[group])
            if max(before, now) >= self._top_L[layer][-1][0]:
                self._top_L[layer] = _top(self._ratios_LG[layer])


def _top(ratios_G: Sequence[float]) -> list[tuple[float, int]]:
    return heapq.nlargest(3, zip(ratios_G, range(len(ratios_G)), strict=True))
