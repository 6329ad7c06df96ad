"""What seats that came and went force on a table: every group has a seat, every seat a group, every expert a place."""

from __future__ import annotations

from collections.abc import Sequence

from services.errors import ConfigError, NotReady
from services.placement.groups import check_groups, group_loads, regrouped
from services.placement.load import Load
from services.placement.moves import Layout
from services.placement.replicas import assign_seats, capacities
from services.routing import RoutingTable, Seat, ShardGroup


def settled(
    current: RoutingTable, rows: Load, seats: Sequence[Seat], *, wanted: int, limit: int | None, price: float
) -> Layout:
    """``current`` with ``seats``; experts stay where they are unless groups merge, split or hold more than ``limit``.

    Raises:
        NotReady: so few seats cannot hold all experts.
        ConfigError: a number is given twice, or a capacity is not above 0.
    """
    if len({seat.number for seat in seats}) < len(seats):
        raise ConfigError("Two seats have one number.", hint="Number each seat once.")
    count = min(wanted, len(seats))
    if count * (limit or current.num_experts) < current.num_experts:
        raise NotReady(
            f"{len(seats)} expert workers with memory for {limit or current.num_experts} experts of each layer cannot "
            f"hold {current.num_experts}.",
            hint="Start more expert workers.",
        )
    check_groups(current.num_experts, count, limit)
    groups = _counted(current, rows, seats, count, limit)
    capacity_S = [seat.capacity for seat in seats]
    group_S = assign_seats(group_loads(rows, groups), capacity_S, _stayed(current, groups, seats))
    layout = Layout(groups=groups, group_S=tuple(group_S))
    if groups != _sorted(current.groups):
        capacity_G = capacities(group_S, capacity_S, count)
        prices = layout.prices(price if count <= len(current.groups) else 0.0)  # a split evens all, whatever it loads
        placed = regrouped(rows, groups, limit=limit, capacities=capacity_G, prices=prices)
        layout = Layout(groups=placed, group_S=layout.group_S)
    return layout


def _counted(
    current: RoutingTable, rows: Load, seats: Sequence[Seat], count: int, limit: int | None
) -> tuple[ShardGroup, ...]:
    """``count`` groups, by number; experts of those merged away and those beyond the limit are in none."""
    numbers = {seat.number for seat in seats}
    alive = {seat.group for seat in current.seats if seat.number in numbers}
    loads = [sum(loads_L) for loads_L in zip(*group_loads(rows, current.groups), strict=True)]
    ranked = sorted(
        zip(current.groups, loads, strict=True),
        key=lambda pair: (pair[0].number not in alive, -pair[1], pair[0].number),
    )
    kept = [_trimmed(group, rows, limit) for group, _ in ranked[:count]]
    free = (number for number in range(count) if number not in {group.number for group in kept})
    kept += [ShardGroup(number=next(free), experts={}) for _ in range(count - len(kept))]
    return _sorted(_seeded(kept, rows))


def _trimmed(group: ShardGroup, rows: Load, limit: int | None) -> ShardGroup:
    """The most popular experts of each layer, as many as fit."""
    if all(len(ids) <= (limit or len(ids)) for ids in group.experts.values()):
        return group
    experts = {
        layer: tuple(sorted(sorted(ids, key=lambda expert: (-rows[layer][expert], expert))[:limit]))
        for layer, ids in group.experts.items()
    }
    return ShardGroup(number=group.number, experts=experts)


def _seeded(groups: Sequence[ShardGroup], rows: Load) -> list[ShardGroup]:
    """A group without experts of a layer gets the least popular one of the group with most."""
    held = {group.number: {layer: set(group.experts.get(layer, ())) for layer in rows} for group in groups}
    for group in groups:
        for layer in rows:
            largest = max(held.values(), key=lambda experts: len(experts[layer]))
            if not held[group.number][layer] and len(largest[layer]) > 1:
                expert = min(largest[layer], key=lambda expert: (rows[layer][expert], expert))
                largest[layer].remove(expert)
                held[group.number][layer].add(expert)
    return [
        ShardGroup(
            number=group.number, experts={layer: tuple(sorted(ids)) for layer, ids in held[group.number].items()}
        )
        for group in groups
    ]


def _stayed(current: RoutingTable, groups: Sequence[ShardGroup], seats: Sequence[Seat]) -> list[int | None]:
    index = {group.number: position for position, group in enumerate(groups)}
    before = {seat.number: seat.group for seat in current.seats}
    return [index.get(before.get(seat.number, -1)) for seat in seats]


def _sorted(groups: Sequence[ShardGroup]) -> tuple[ShardGroup, ...]:
    return tuple(sorted(groups, key=lambda group: group.number))
