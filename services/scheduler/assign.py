"""Which group each seat is to hold next: seats and what they hold in, assignments out. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from services.errors import NotReady
from services.placement import Load, assign_seats, peak_load
from services.placement.groups import group_loads
from services.placement.replicas import capacities, next_move
from services.queue.seats import SeatState
from services.routing import ShardGroup
from services.scheduler.room import can_hold_some, with_room


def assignments(
    seats: Sequence[SeatState],
    holds: Mapping[int, ShardGroup],
    layout: Sequence[ShardGroup],
    load: Load | None,
    gain: float,
) -> list[tuple[SeatState, ShardGroup]]:
    """Choose a group for each seat without one. If there is none, at most one seat changes its group: to a group that
    no seat holds or, where ``load`` is known, where that evens the load by ``gain``. The next turn sees what that
    brought."""
    seats = [seat for seat in seats if seat.number in holds or can_hold_some(seat, layout)]
    if len(holds) < len(seats):
        return _groups_for_new(seats, holds, layout, load)
    held = {group.number for group in holds.values()}
    if bare := [group for group in layout if group.number not in held]:
        movable = [seat for seat in reversed(seats) if seat.info.group is None]
        fitting = ((seat, group) for group in bare for seat in movable if seat.has_room(group))
        return list(islice((move for move in fitting if _spared(move[0], seats, holds)), 1))
    return _evened(seats, holds, layout, load, gain) if load is not None else []


def _groups_for_new(
    seats: Sequence[SeatState], holds: Mapping[int, ShardGroup], layout: Sequence[ShardGroup], load: Load | None
) -> list[tuple[SeatState, ShardGroup]]:
    """Choose groups for the seats that hold none: the ones that they ask for, or where they lower the load most."""
    index: dict[int | None, int] = {group.number: position for position, group in enumerate(layout)}
    places = [index.get(holds[seat.number].number if seat.number in holds else seat.info.group) for seat in seats]
    loads_LG = group_loads(load or even_load(layout), layout)
    try:
        group_S = assign_seats(loads_LG, [seat.info.capacity for seat in seats], places)
    except NotReady:
        group_S = _in_turn(places, len(layout))
    wanted = [
        (seat, layout[group if place is None else place])
        for seat, group, place in zip(seats, group_S, places, strict=True)
        if seat.number not in holds
    ]
    return with_room(wanted, holds, layout)


def _in_turn(places: Sequence[int | None], groups: int) -> list[int]:
    """Return groups of all seats where these are fewer than the groups: each new seat gets one that no seat holds."""
    bare = iter(group for group in range(groups) if group not in places)
    return [next(bare) if place is None else place for place in places]


def _evened(
    seats: Sequence[SeatState],
    holds: Mapping[int, ShardGroup],
    layout: Sequence[ShardGroup],
    load: Load,
    gain: float,
) -> list[tuple[SeatState, ShardGroup]]:
    """Return the move that lowers the highest load per capacity most, if it lowers it by ``gain`` and is allowed."""
    index = {group.number: position for position, group in enumerate(layout)}
    group_S = [index[holds[seat.number].number] for seat in seats]
    capacity_S, loads_LG = [seat.info.capacity for seat in seats], group_loads(load, layout)
    moved = next_move(loads_LG, capacity_S, group_S)
    if moved is None:
        return []
    before, after = (peak_load(loads_LG, capacities(each, capacity_S, len(layout))) for each in (group_S, moved))
    if after >= before * (1 - gain):
        return []
    return [
        (seat, layout[group])
        for seat, group, own in zip(seats, moved, group_S, strict=True)
        if group != own and seat.info.group is None and _spared(seat, seats, holds) and seat.has_room(layout[group])
    ]


def _spared(seat: SeatState, seats: Sequence[SeatState], holds: Mapping[int, ShardGroup]) -> bool:
    """Say whether the group of ``seat`` is served without it."""
    group = holds[seat.number]
    return any(other is not seat and holds.get(other.number) == group and other.serves(group) for other in seats)


def even_load(layout: Sequence[ShardGroup]) -> Load:
    """Return the load to assume where none is known: every expert takes as many rows."""
    layers = layout[0].experts
    return {layer: [1.0] * sum(len(group.experts[layer]) for group in layout) for layer in layers}
