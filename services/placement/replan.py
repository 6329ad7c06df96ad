"""The next routing table from the current one and measured load, with as few experts loaded as will do.

Legend: L layers, G groups, S seats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from services.errors import ConfigError
from services.placement.groups import group_loads, regrouped
from services.placement.layout import Layout, loaded_fraction
from services.placement.load import Load, checked_load, even_peak_load, peak_load
from services.placement.merge import merged
from services.placement.replicas import capacities, next_move
from services.routing import RoutingTable


@dataclass(frozen=True, kw_only=True, slots=True)
class Hysteresis:
    """When a change for the load alone is worth the experts that seats have to load for it.

    ``gain``: part of max / mean that the change has to save. ``wait_s``: seconds that a table is left alone. ``price``:
    part of max / mean that it costs if every seat loads all of its experts; fewer loads cost in proportion.
    """

    gain: float = 0.1
    wait_s: float = 60.0
    price: float = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """``table`` is the current one, not an epoch later, where nothing changes.

    ``before``, ``after``: expected max / mean load of both tables; inf where a group has no seat.
    """

    table: RoutingTable
    before: float
    after: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """Experts of a layer that a seat of any group, and of some groups, has memory for; None: not limited."""

    limit: int | None = None
    rooms: Mapping[int, int] | None = None


def replan(
    current: RoutingTable,
    load: Load,
    *,
    hysteresis: Hysteresis | None = None,
    limit: int | None = None,
    rooms: Mapping[int, int] | None = None,
) -> Plan:
    """Follow the load where that pays.

    Where seats are fewer than groups, groups are merged (:func:`services.placement.merge.merged`). Then seats change
    groups and experts change places, one improvement after the other, until none gains what ``hysteresis`` asks for.
    Planning again with the same load changes nothing.

    Args:
        limit: experts of a layer that a seat has memory for; all by default. What seats hold now fits.
        rooms: by group number, such a limit for the seats of that group.

    Raises:
        NotReady: so few seats cannot hold all experts.
        ConfigError: ``load`` does not fit the table, or a seat's capacity is not above 0.
    """
    hysteresis = hysteresis or Hysteresis()
    rows = _matching(current, load)
    seats = sorted(current.seats, key=lambda seat: seat.number)
    capacity_S = [seat.capacity for seat in seats]
    layout = merged(current, rows, limit=limit, price=hysteresis.price)
    layout = _improved(layout, rows, capacity_S, hysteresis, Room(limit=limit, rooms=rooms))
    even = even_peak_load(rows, capacity_S)
    plan_seats = tuple(
        msgspec.structs.replace(seat, group=layout.groups[group].number)
        for seat, group in zip(seats, layout.group_S, strict=True)
    )
    table = msgspec.structs.replace(current, groups=layout.groups, seats=plan_seats)
    unchanged = table.groups == current.groups and set(table.seats) == set(current.seats)
    return Plan(
        table=current if unchanged else msgspec.structs.replace(table, epoch=current.epoch + 1),
        before=_peak_load_of(current, rows) / even,
        after=_peak_load_of(table, rows) / even,
    )


def _improved(layout: Layout, rows: Load, capacity_S: Sequence[float], hysteresis: Hysteresis, room: Room) -> Layout:
    """Return ``layout`` after some improvements: few, for each gains at least ``hysteresis.gain`` of what is left."""
    while True:
        here = _layout_peak_load(layout, rows, capacity_S)
        found = [
            (value * (1 + hysteresis.price * loaded_fraction(layout, candidate)), position, candidate)
            for position, candidate in enumerate(_candidates(layout, rows, capacity_S, hysteresis.price, room))
            if (value := _layout_peak_load(candidate, rows, capacity_S)) < here * (1 - hysteresis.gain)
        ]
        score, _, best = min(found, key=lambda entry: entry[:2], default=(here, 0, layout))
        if score >= here:
            return layout
        layout = best


def _candidates(layout: Layout, rows: Load, capacity_S: Sequence[float], price: float, room: Room) -> Iterator[Layout]:
    """Yield layouts with one seat moved, two, and so on while each helps, and with experts regrouped before and after
    that: once at ``price``, once as if loading were free."""
    yield _regrouped(layout, rows, capacity_S, price, room)
    yield _regrouped(layout, rows, capacity_S, 0.0, room)
    loads_LG = group_loads(rows, layout.groups)
    group_S = next_move(loads_LG, capacity_S, layout.group_S)
    while group_S is not None:
        layout = Layout(groups=layout.groups, group_S=tuple(group_S))
        yield layout
        group_S = next_move(loads_LG, capacity_S, layout.group_S)
    yield _regrouped(layout, rows, capacity_S, price, room)
    yield _regrouped(layout, rows, capacity_S, 0.0, room)


def _regrouped(layout: Layout, rows: Load, capacity_S: Sequence[float], price: float, room: Room) -> Layout:
    capacity_G = capacities(layout.group_S, capacity_S, len(layout.groups))
    prices = layout.prices(price)
    groups = regrouped(rows, layout.groups, limit=room.limit, capacities=capacity_G, prices=prices, rooms=room.rooms)
    return Layout(groups=groups, group_S=layout.group_S)


def _layout_peak_load(layout: Layout, rows: Load, capacity_S: Sequence[float]) -> float:
    return peak_load(group_loads(rows, layout.groups), capacities(layout.group_S, capacity_S, len(layout.groups)))


def _peak_load_of(table: RoutingTable, rows: Load) -> float:
    capacity_G = [sum(seat.capacity for seat in table.seats_of[group.number]) for group in table.groups]
    return peak_load(group_loads(rows, table.groups), capacity_G)


def _matching(current: RoutingTable, load: Load) -> Mapping[int, list[float]]:
    rows = checked_load(load)
    if set(rows) != set(current.group_of) or {len(row) for row in rows.values()} != {current.num_experts}:
        raise ConfigError(
            f"The load has other layers or experts than the routing table of epoch {current.epoch}.",
            hint="Measure it on the table's model.",
        )
    return rows
