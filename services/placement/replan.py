"""The next routing table from the current one, measured load and the seats alive: as few experts loaded as will do.

Legend: L layers, G groups, S seats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from services.errors import ConfigError
from services.placement.groups import group_loads, regrouped
from services.placement.load import Load, checked_load, even_peak_load, peak_load
from services.placement.membership import settled
from services.placement.moves import Layout, Move, loaded_fraction, moves_between
from services.placement.replicas import capacities, next_move
from services.routing import RoutingTable, Seat


@dataclass(frozen=True, kw_only=True, slots=True)
class Hysteresis:
    """When a change that nobody forces is worth its loads.

    ``gain``: part of max / mean that it has to save. ``wait_s``: seconds that a table is left alone. ``price``: part of
    max / mean for which every seat would load everything anew; what is in between costs in proportion.
    """

    gain: float = 0.1
    wait_s: float = 60.0
    price: float = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """``table`` is the current one, not an epoch later, where nothing changes.

    ``moves``: in an order in which, carried out one by one, none takes a group's last seat, where there is one.
    ``before``, ``after``: expected max / mean load, both against an even split over the seats now alive; ``before`` is
    of those that the current table had, inf where it leaves a group without any.
    """

    table: RoutingTable
    moves: tuple[Move, ...]
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
    seats: Sequence[Seat],
    *,
    elapsed_s: float,
    hysteresis: Hysteresis | None = None,
    limit: int | None = None,
    rooms: Mapping[int, int] | None = None,
    groups: int | None = None,
) -> Plan:
    """Follow changes of membership at once, and shifts of load where that pays.

    A seat that joined goes where it lowers the maximum most. Where seats are fewer than groups, groups without seats,
    then the least loaded, are merged into the others. Then seats change groups and experts change places, one
    improvement after the other, until none gains what ``hysteresis`` asks for. Planning again at once, with the same
    load and seats, changes nothing.

    Args:
        seats: those alive; ``group`` is not read. One whose number the table has under another ``worker`` stays in
            its group and loads everything.
        elapsed_s: since ``current`` came into force.
        limit: experts of a layer that a seat has memory for; all by default.
        rooms: by group number, the same of the seats of that group; what they hold now fits.
        groups: how many to have, seats permitting; by default as many as now. Splitting merged groups again may even
            the load less than the replicas of before did: it saves memory traffic.

    Raises:
        NotReady: so few seats cannot hold all experts.
        ConfigError: ``load`` does not fit the table, or a seat's number or capacity is impossible.
    """
    hysteresis = hysteresis or Hysteresis()
    rows = _matching(current, load)
    seats = sorted(seats, key=lambda seat: seat.number)
    capacity_S = [seat.capacity for seat in seats]
    wanted = groups or len(current.groups)
    layout = settled(current, rows, seats, wanted=wanted, limit=limit, price=hysteresis.price)
    if elapsed_s >= hysteresis.wait_s:
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
        moves=moves_between(current, table),
        before=_peak_load_of(current, rows, [seat for seat in current.seats if _stays(seat, seats)]) / even,
        after=_peak_load_of(table, rows, table.seats) / even,
    )


def _improved(layout: Layout, rows: Load, capacity_S: Sequence[float], hysteresis: Hysteresis, room: Room) -> Layout:
    """Each step gains at least ``hysteresis.gain`` of what is left, so there are few."""
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
    """One seat moved, two, and so on while each helps; experts regrouped, sparingly and freely, before and after."""
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


def _peak_load_of(table: RoutingTable, rows: Load, seats: Sequence[Seat]) -> float:
    capacity_G = [sum(seat.capacity for seat in seats if seat.group == group.number) for group in table.groups]
    return peak_load(group_loads(rows, table.groups), capacity_G)


def _stays(seat: Seat, seats: Sequence[Seat]) -> bool:
    return any((seat.number, seat.worker) == (other.number, other.worker) for other in seats)


def _matching(current: RoutingTable, load: Load) -> Mapping[int, list[float]]:
    rows = checked_load(load)
    if set(rows) != set(current.group_of) or {len(row) for row in rows.values()} != {current.num_experts}:
        raise ConfigError(
            f"The load has other layers or experts than the routing table of epoch {current.epoch}.",
            hint="Measure it on the model that the table is of.",
        )
    return rows
