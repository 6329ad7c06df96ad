"""Which seat holds which experts: expert workers' seats in, assignments and the routing table out. The leader's task.

The groups of the published table stand until a new table changes them, whoever leads. A seat that holds no group gets
the one with the least capacity; a seat is in the table while it is ready with its group.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from services.queue.seats import SeatRegistry, SeatState
from services.queue.tables import TableReader
from services.routing import RoutingTable, ShardGroup, even_groups, group_digest

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Intentions:
    """What a look at the seats asks for: ``table`` None: the published one stands. It is published before
    ``assign``, so that a seat that changes its group is out of the table by then."""

    table: RoutingTable | None
    assign: tuple[tuple[SeatState, ShardGroup], ...]


class ExpertPlacement:
    """One term's view. ``groups`` is how many there are where no table says it; ``on_table`` hears of each table."""

    def __init__(
        self,
        registry: SeatRegistry,
        reader: TableReader,
        *,
        groups: int,
        on_table: Callable[[RoutingTable], None] = lambda _: None,
    ) -> None:
        self._registry = registry
        self._reader = reader
        self._groups = groups
        self._on_table = on_table
        self._table: RoutingTable | None = None

    async def turn(self, epoch: int) -> bool:
        """Reap, assign and publish what is due; whether anything changed.

        Raises:
            StaleLeader: another scheduler leads.
            StaleTable: another table was published meanwhile; the next turn starts from that.
            QueueUnavailable: Redis does not answer.
        """
        found = await self._reader.read_table(self._table.epoch if self._table else 0)
        if found is not None:
            self._table = found
            self._on_table(found)
        seats = await self._registry.seats()
        if not seats and self._table is None:
            return False
        if (await self._registry.reap(epoch)).seats:
            seats = await self._registry.seats()
        epochs = await self._registry.table_epochs()
        lost = epochs.published == 0
        wanted = intentions(seats, self._table, following=epochs.following, groups=self._groups)
        table = wanted.table or (self._table if lost else None)
        if table is not None:
            await self._publish(epoch, table)
        for seat, group in wanted.assign:
            log.info("seat %d is to hold group %d", seat.number, group.number)
            await self._registry.assign_group(epoch, seat.info.id, group)
        return bool(table or wanted.assign)

    async def _publish(self, epoch: int, table: RoutingTable) -> None:
        await self._registry.publish_table(epoch, table)
        self._table = table
        self._on_table(table)
        held = {number: [seat.number for seat in seats] for number, seats in table.seats_of.items()}
        log.info("routing table %d: seats by group %s", table.epoch, held)


def intentions(seats: Sequence[SeatState], table: RoutingTable | None, *, following: int, groups: int) -> Intentions:
    """What to publish and to assign. ``following`` is the next table's epoch."""
    layout = table.groups if table else _first_groups(seats, groups)
    if not layout:
        return Intentions(table=None, assign=())
    digests = {group_digest(group): group for group in layout}
    staying = [seat for seat in seats if seat.status != "leaving" and not seat.dismissed]
    holds = {seat.number: group for seat in staying if (group := _held(seat, digests)) is not None}
    assign = _assignments(staying, holds, layout)
    moved = {seat.number for seat, _ in assign}
    assign += [(seat, holds[seat.number]) for seat in staying if seat.number in holds and seat.assigned not in digests]
    listed = tuple(
        seat.seat(holds[seat.number].number)
        for seat in staying
        if seat.number in holds and seat.number not in moved and seat.serves(holds[seat.number])
    )
    fingerprint = table.fingerprint if table else seats[0].info.fingerprint
    experts = table.num_experts if table else seats[0].info.num_experts
    new = RoutingTable(epoch=following, fingerprint=fingerprint, num_experts=experts, groups=layout, seats=listed)
    changed = table is None or (table.groups, table.seats) != (new.groups, new.seats)
    return Intentions(table=new if changed else None, assign=tuple(assign))


def _held(seat: SeatState, digests: Mapping[str, ShardGroup]) -> ShardGroup | None:
    """What the seat was told to hold; what it says to hold, where Redis forgot that."""
    return digests.get(seat.assigned or "") or digests.get(seat.report.digest)


def _first_groups(seats: Sequence[SeatState], groups: int) -> tuple[ShardGroup, ...]:
    if not seats:
        return ()
    info = seats[0].info
    return even_groups(list(info.layers), info.num_experts, min(groups, info.num_experts))


def _assignments(
    seats: Sequence[SeatState], holds: Mapping[int, ShardGroup], layout: Sequence[ShardGroup]
) -> list[tuple[SeatState, ShardGroup]]:
    """A group for each seat without one; and for a group that nobody holds, a seat of the one with most capacity."""
    capacity = {group.number: 0.0 for group in layout}
    for seat in seats:
        if seat.number in holds:
            capacity[holds[seat.number].number] += seat.info.capacity
    by_number = {group.number: group for group in layout}
    found = []
    for seat in seats:
        if seat.number not in holds:
            number = _chosen_group(seat, capacity)
            capacity[number] += seat.info.capacity
            found.append((seat, by_number[number]))
    return found or _rescue(seats, holds, capacity, by_number)


def _chosen_group(seat: SeatState, capacity: Mapping[int, float]) -> int:
    """The group that the seat asks for, or the one with the least capacity."""
    wish = seat.info.group
    return (
        wish if wish is not None and wish in capacity else min(capacity, key=lambda number: (capacity[number], number))
    )


def _rescue(
    seats: Sequence[SeatState],
    holds: Mapping[int, ShardGroup],
    capacity: Mapping[int, float],
    groups: Mapping[int, ShardGroup],
) -> list[tuple[SeatState, ShardGroup]]:
    """One move at a time: the next turn sees what it brought."""
    bare = [number for number, amount in capacity.items() if amount == 0]
    if not bare:
        return []
    members: dict[int, list[SeatState]] = {}
    for seat in seats:
        members.setdefault(holds[seat.number].number, []).append(seat)
    donors = [number for number, held in members.items() if len([s for s in held if s.serves(groups[number])]) > 1]
    movable = [
        seat
        for number in sorted(donors, key=lambda number: -capacity[number])
        for seat in members[number]
        if seat.info.group is None and seat.serves(groups[number])
    ]
    return [(movable[-1], groups[bare[0]])] if movable else []
