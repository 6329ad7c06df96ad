"""What expert workers have memory for: no seat is told to hold a group that is too large for it (--expert-capacity)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from services.queue.seats import SeatState
from services.routing import ShardGroup

log = logging.getLogger(__name__)


def rooms_of(seats: Sequence[SeatState], layout: Sequence[ShardGroup]) -> dict[int, int]:
    """By group number, the most experts of a layer that each of its seats can have, where that is limited."""
    number_of = {group.digest: group.number for group in layout}
    rooms: dict[int, int] = {}
    for seat in seats:
        most, number = seat.info.max_experts, number_of.get(seat.assigned or "")
        if most is not None and number is not None:
            rooms[number] = min(most, rooms.get(number, most))
    return rooms


def can_hold_some(seat: SeatState, layout: Sequence[ShardGroup]) -> bool:
    """Whether there is a group for ``seat``: the one that it asks for, or any, that it has room for."""
    return any(seat.has_room(group) for group in layout if seat.info.group in (None, group.number))


def with_room(
    wanted: Sequence[tuple[SeatState, ShardGroup]], holds: Mapping[int, ShardGroup], layout: Sequence[ShardGroup]
) -> list[tuple[SeatState, ShardGroup]]:
    """``wanted``, but for seats that cannot hold theirs: those get one that they can hold, with the fewest seats, if
    there is one."""
    taken = [group.number for group in holds.values()] + [
        group.number for seat, group in wanted if seat.has_room(group)
    ]
    found = []
    for seat, group in wanted:
        if seat.has_room(group):
            found.append((seat, group))
        elif seat.info.group is None and (others := [other for other in layout if seat.has_room(other)]):
            other = min(others, key=lambda other: taken.count(other.number))
            taken.append(other.number)
            found.append((seat, other))
    return found


class Shortage:
    """Says once of each group that no seat can hold it, and of each seat that there is no group for it."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._idle: set[int] = set()

    def note(self, seats: Sequence[SeatState], layout: Sequence[ShardGroup]) -> None:
        able = [seat for seat in seats if seat.stays]
        for seat in able:
            if layout and seat.number not in self._idle and not can_hold_some(seat, layout):
                self._idle.add(seat.number)
                asked = "" if seat.info.group is None else f" asks for group {seat.info.group}, which is none or"
                log.warning(
                    "seat %d%s has room for none of the %d groups: it waits; see --expert-capacity, --expert-group and "
                    "--expert-groups",
                    seat.number,
                    asked,
                    len(layout),
                )
        for group in layout:
            digest = group.digest
            if able and digest not in self._said and not any(seat.has_room(group) for seat in able):
                self._said.add(digest)
                log.warning(
                    "no expert worker has room for the %d experts of a layer in group %d: raise --expert-capacity or "
                    "--expert-groups",
                    group.size,
                    group.number,
                )
