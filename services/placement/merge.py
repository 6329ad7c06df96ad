"""Fewer groups where seats are too few: every group keeps a seat, and every expert a group."""

from __future__ import annotations

from services.errors import NotReady
from services.placement.groups import group_loads, regrouped
from services.placement.layout import Layout
from services.placement.load import Load
from services.placement.replicas import assign_seats, capacities
from services.routing import RoutingTable, ShardGroup


def merged(current: RoutingTable, rows: Load, *, limit: int | None, price: float) -> Layout:
    """Return ``current``'s layout, its seats by number. With fewer seats than groups, groups without seats and then the
    least loaded ones are merged into the others; experts of the others stay where they are.

    Raises:
        NotReady: so few seats cannot hold all experts.
        ConfigError: a capacity is not above 0.
    """
    seats = sorted(current.seats, key=lambda seat: seat.number)
    count = min(len(current.groups), len(seats))
    if count * (limit or current.num_experts) < current.num_experts:
        raise NotReady(
            f"{len(seats)} expert workers with memory for {limit or current.num_experts} experts of each layer cannot "
            f"hold {current.num_experts}.",
            hint="Start more expert workers.",
        )
    groups = _kept(current, rows, count)
    index = {group.number: position for position, group in enumerate(groups)}
    capacity_S = [seat.capacity for seat in seats]
    group_S = assign_seats(group_loads(rows, groups), capacity_S, [index.get(seat.group) for seat in seats])
    layout = Layout(groups=groups, group_S=tuple(group_S))
    if count == len(current.groups):
        return layout
    capacity_G = capacities(group_S, capacity_S, count)
    placed = regrouped(rows, groups, limit=limit, capacities=capacity_G, prices=layout.prices(price))
    return Layout(groups=placed, group_S=layout.group_S)


def _kept(current: RoutingTable, rows: Load, count: int) -> tuple[ShardGroup, ...]:
    """Return ``count`` groups, by number: those that have seats, and of them the most loaded."""
    loads = [sum(loads_L) for loads_L in zip(*group_loads(rows, current.groups), strict=True)]
    ranked = sorted(
        zip(current.groups, loads, strict=True),
        key=lambda pair: (not current.seats_of[pair[0].number], -pair[1], pair[0].number),
    )
    return tuple(sorted((group for group, _ in ranked[:count]), key=lambda group: group.number))
