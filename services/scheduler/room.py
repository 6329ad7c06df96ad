"""What expert workers have memory for: no seat is assigned a group that is too large for it (--expert-capacity)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from services.queue.seats import SeatState
from services.routing import ShardGroup

log = logging.getLogger(__name__)


def rooms_of(seats: Sequence[SeatState], layout: Sequence[ShardGroup]) -> dict[int, int]:
    """Return group number -> experts of a layer that each of its seats has room for, where that is limited."""
    number_of = {group.digest: group.number for group in layout}
    rooms: dict[int, int] = {}
    for seat in seats:
        limit, number = seat.info.max_experts, number_of.get(seat.assigned or "")
        if limit is not None and number is not None:
            rooms[number] = min(limit, rooms.get(number, limit))
    return rooms


def can_hold_some(seat: SeatState, layout: Sequence[ShardGroup]) -> bool:
    """Say whether ``seat`` has room for the group that it asks for, or for any if it asks for none."""
    return any(seat.has_room(group) for group in layout if seat.info.group in (None, group.number))


def with_room(
    wanted: Sequence[tuple[SeatState, ShardGroup]], holds: Mapping[int, ShardGroup], layout: Sequence[ShardGroup]
) -> list[tuple[SeatState, ShardGroup]]:
    """Return ``wanted``, with other groups for seats that have no room for theirs: of those that fit, the one that has
    the least seats."""
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
    """Warns once of each layout of another size than ``asked`` (--expert-groups; None: any), of each group that no seat
    can hold, and of each seat that there is no group for."""

    def __init__(self, asked: int | None = None) -> None:
        self._asked = asked
        self._sizes: set[int] = set()
        self._too_large: set[str] = set()
        self._idle: set[int] = set()

    def note(self, seats: Sequence[SeatState], layout: Sequence[ShardGroup]) -> None:
        if not seats or not layout:
            return
        self._compare(len(layout), seats[0].info.num_experts)
        able = [seat for seat in seats if seat.stays]
        for seat in able:
            if seat.number not in self._idle and not can_hold_some(seat, layout):
                self._idle.add(seat.number)
                any_of = f"any of the {len(layout)} shard groups"
                asked = any_of if seat.info.group is None else f"shard group {seat.info.group}, which it asks for"
                log.warning(
                    "%s cannot hold %s, so it stays idle; check --expert-capacity, --expert-group and --expert-groups",
                    *(seat.title, asked),
                )
        for group in layout:
            if able and group.digest not in self._too_large and not any(seat.has_room(group) for seat in able):
                self._too_large.add(group.digest)
                log.warning(
                    "no expert worker has room for shard group %d (%d experts of a layer): raise --expert-capacity or "
                    "--expert-groups",
                    *(group.number, group.size),
                )

    def _compare(self, groups: int, experts: int) -> None:
        if self._asked is not None and groups != min(self._asked, experts) and groups not in self._sizes:
            self._sizes.add(groups)
            log.warning(
                "keeping the %d shard groups in use although --expert-groups asks for %d: workers started for other "
                "groups stay idle; another number of groups needs another --namespace",
                *(groups, self._asked),
            )
