"""Shard groups from measured load: which experts lie together on every seat of a group.

Legend: G groups, B bins of the search (here the groups).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.errors import ConfigError
from services.placement.load import Load, checked_load
from services.placement.local_search import Arrangement, Bins
from services.routing import ShardGroup


def shard_groups(
    load: Load, *, groups: int, limit: int | None = None, capacities: Sequence[float] | None = None
) -> tuple[ShardGroup, ...]:
    """Experts of each layer, the most popular first, each to the group that is least loaded for its capacity.

    Popularity decides as ExpertFlow proposes (section 3.3); exchanges of experts then even out what is left. A group
    has experts of every layer, not equally many of each. The same load always gives the same groups.

    Args:
        groups: they are numbered from 0.
        limit: experts of a layer that a seat has memory for; all of them by default.
        capacities: of the seats of each group together; equal by default.

    Raises:
        ConfigError: so many groups cannot hold the experts, or the load is none.
    """
    rows = checked_load(load)
    capacities = [1.0] * groups if capacities is None else capacities
    experts = len(next(iter(rows.values())))
    check_groups(experts, groups, limit)
    if len(capacities) != groups or min(capacities) <= 0:
        raise ConfigError(f"{groups} groups need as many capacities, all above 0.", hint="Give one per group.")
    empty = tuple(ShardGroup(number=number, experts={}) for number in range(groups))
    return regrouped(rows, empty, limit=limit, capacities=capacities, prices=[0.0] * groups)


def regrouped(
    rows: Load,
    groups: Sequence[ShardGroup],
    *,
    limit: int | None,
    capacities: Sequence[float],
    prices: Sequence[float],
    rooms: Mapping[int, int] | None = None,
) -> tuple[ShardGroup, ...]:
    """``groups`` with experts moved or exchanged where that evens the load by more than the price of loading them.

    Experts in none of the groups are placed; ids are those of ``rows``.

    Args:
        prices: by group: what loading one more expert is worth, in units of max / mean.
        rooms: by group number, experts of a layer that its seats have memory for, where that is less than ``limit``.
    """
    experts: list[dict[int, tuple[int, ...]]] = [{} for _ in groups]
    for layer, loads_E in rows.items():
        most = limit or len(loads_E)
        room_B = [min(most, (rooms or {}).get(group.number, most)) for group in groups]
        bins = Bins(capacity_B=capacities, room_B=room_B, price_B=prices, replicate=False)
        home = [set(group.experts.get(layer, ())) for group in groups]
        found = Arrangement([loads_E], bins, home, home)
        found.climb()
        for of_group, held in zip(experts, found.held, strict=True):
            of_group[layer] = tuple(sorted(held))
    return tuple(ShardGroup(number=group.number, experts=held) for group, held in zip(groups, experts, strict=True))


def check_groups(experts: int, groups: int, limit: int | None) -> None:
    """Raises ConfigError where ``groups`` of at most ``limit`` experts a layer cannot hold ``experts``."""
    if not 1 <= groups <= experts:
        raise ConfigError(f"{experts} experts cannot be split into {groups} groups.", hint=f"Choose 1 to {experts}.")
    if limit is not None and groups * limit < experts:
        raise ConfigError(
            f"{groups} groups of at most {limit} experts a layer cannot hold {experts}.",
            hint="Allow more groups, or give expert workers more memory.",
        )


def group_loads(load: Load, groups: Sequence[ShardGroup]) -> list[list[float]]:
    """``[layers, groups]``: the load that falls to each group, in the order of ``groups``."""
    return [
        [sum(loads_E[expert] for expert in group.experts.get(layer, ())) for group in groups]
        for layer, loads_E in load.items()
    ]
