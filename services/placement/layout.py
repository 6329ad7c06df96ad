"""Groups and their seats while a plan changes them, and what a change makes the seats load."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from services.routing import ShardGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A table as the planner changes it. ``group_S``: index into ``groups`` of each seat."""

    groups: tuple[ShardGroup, ...]
    group_S: tuple[int, ...]

    def prices(self, price: float) -> list[float]:
        """Return the price by group of one more expert of a layer, if all that the seats hold costs ``price``."""
        seats = Counter(self.group_S)
        layers = max(1, len(self.groups[0].experts))
        held = sum(seats[index] * _size(group) for index, group in enumerate(self.groups)) / layers
        return [price * seats[index] / held for index in range(len(self.groups))]


def loaded_fraction(before: Layout, after: Layout) -> float:
    """Return the experts that the seats have to load, over all that they hold afterwards."""
    loaded = sum(
        len(set(experts) - set(before.groups[old].experts.get(layer, ())))
        for old, new in zip(before.group_S, after.group_S, strict=True)
        for layer, experts in after.groups[new].experts.items()
    )
    return loaded / sum(_size(after.groups[group]) for group in after.group_S)


def _size(group: ShardGroup) -> int:
    return sum(map(len, group.experts.values()))
