"""Shard groups from measured load: which experts are together on every seat of a group.

Legend: G groups, B bins of the search (here the groups).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.placement.load import Load
from services.placement.local_search import Arrangement, Bins
from services.routing import ShardGroup


def regrouped(
    rows: Load,
    groups: Sequence[ShardGroup],
    *,
    limit: int | None,
    capacities: Sequence[float],
    prices: Sequence[float],
    rooms: Mapping[int, int] | None = None,
) -> tuple[ShardGroup, ...]:
    """Return ``groups`` with experts moved or exchanged where that evens the load by more than loading them costs.

    Experts of ``rows`` that are in none of the groups are placed first, the most popular ones first, as ExpertFlow
    proposes (section 3.3). A group has experts of every layer, not equally many of each.

    Args:
        limit: experts of a layer that a seat has memory for; None: all of them.
        capacities: of the seats of each group together.
        prices: by group: what loading one more expert is worth, in units of max / mean.
        rooms: by group number, experts of a layer that its seats have memory for, where that is less than ``limit``.
    """
    experts: list[dict[int, tuple[int, ...]]] = [{} for _ in groups]
    for layer, loads_E in rows.items():
        limit_here = limit or len(loads_E)
        room_B = [min(limit_here, (rooms or {}).get(group.number, limit_here)) for group in groups]
        bins = Bins(capacity_B=capacities, room_B=room_B, price_B=prices, replicate=False)
        home = [set(group.experts.get(layer, ())) for group in groups]
        found = Arrangement([loads_E], bins, home, home)
        found.climb()
        for of_group, held in zip(experts, found.held, strict=True):
            of_group[layer] = tuple(sorted(held))
    return tuple(ShardGroup(number=group.number, experts=held) for group, held in zip(groups, experts, strict=True))


def group_loads(load: Load, groups: Sequence[ShardGroup]) -> list[list[float]]:
    """Return ``[layers, groups]``: the load that falls to each group, in the order of ``groups``."""
    return [
        [sum(loads_E[expert] for expert in group.experts.get(layer, ())) for group in groups]
        for layer, loads_E in load.items()
    ]
