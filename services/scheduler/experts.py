"""The leader decides which seat holds which experts: seats in, assignments and the routing table out.

A new leader keeps the groups of the published table. A seat without a group gets the one that it was started for, or
else the one where it lowers the highest load most. Seats follow the load that they count, one at a time, where that
gains enough and the table has stood for a while; so do the groups themselves (:mod:`services.scheduler.repartition`).
When a seat has died, the others follow the load at once: the seat that came in its place may have got another group
while the dead seat still counted. A seat is in the table while it is ready with its group.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from services.errors import ConfigError
from services.messages import ExpertInfo
from services.placement import Hysteresis, Load
from services.queue.seats import SeatRegistry, SeatState, TableEpochs
from services.queue.tables import TableReader
from services.routing import RoutingTable, Seat, ShardGroup, even_groups
from services.scheduler.assign import assignments, even_load
from services.scheduler.load import LoadMeter, imbalance
from services.scheduler.repartition import Repartitioner, Step, next_step
from services.scheduler.room import Shortage, can_hold_some, rooms_of

WINDOW_S = 2.0
"""Seconds between two readings of the load; more with many seats, see SEATS_PER_S."""
SEATS_PER_S = 200
"""The seats' counters are read at most at this rate, all seats at once."""
NAMED = 16
"""How many seats a line of the log names."""
HYSTERESIS = Hysteresis()
"""What a change for the load alone has to gain, and how long a table stands before it."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Intentions:
    """What the leader is to publish (``table``; None: nothing) and then to assign.

    The table comes first, so that a seat that changes its group is out of the table by then.
    """

    table: RoutingTable | None
    assign: tuple[tuple[SeatState, ShardGroup], ...]


Change = Literal["join", "leave", "death"]


class PlacementEvents:
    """What happens while experts are placed, for metrics. By itself it does nothing."""

    def tabled(self, table: RoutingTable) -> None:
        """``table`` is in use."""

    def changed(self, shard: int, change: Change) -> None:
        """The table in use gained or lost a seat of the shard group."""

    def repartitioned(self) -> None:
        """The shard groups have the experts that were planned by load."""

    def balanced(self, ratio: float | None) -> None:
        """A load was measured: :func:`services.scheduler.load.imbalance`."""


class ExpertPlacement:
    """Places experts during one term of leadership.

    Args:
        groups: how many groups there are before there is a table.
        asked: --expert-groups.
        events: hears what happens.
        staying: marks seats as dismissed that something else is about to end.
    """

    def __init__(
        self,
        registry: SeatRegistry,
        reader: TableReader,
        *,
        groups: int,
        asked: int | None = None,
        events: PlacementEvents | None = None,
        staying: Callable[[Sequence[SeatState]], list[SeatState]] = list,
        hysteresis: Hysteresis = HYSTERESIS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._reader = reader
        self._groups = groups
        self._events = events or PlacementEvents()
        self._staying = staying
        self._clock = clock
        self._meter = LoadMeter()
        self._hysteresis = hysteresis
        self._repartitioner = self._new_repartitioner()
        self._shortage = Shortage(asked)
        self._next_reading = 0.0
        self._changed_at = clock()
        self._bereaved = False
        """Whether a seat has died since the seats were last found to be as the load wants them."""
        self._dead: set[int] = set()
        """Seats that died since a table was published."""
        self._table: RoutingTable | None = None
        self._seen: tuple[object, RoutingTable | None, int] | None = None

    async def turn(self, epoch: int) -> bool:
        """Reap, assign and publish what is due. Returns whether anything changed.

        Raises:
            StaleLeader: another scheduler leads.
            StaleTable: another table was published meanwhile; the next turn starts from that.
            QueueUnavailable: Redis does not answer.
        """
        await self._follow()
        seats = self._staying(await self._registry.seats())
        if seats and self._table and self._table.fingerprint != seats[0].info.fingerprint:
            self._forget()  # a model that this namespace served before
        if not seats and self._table is None:
            return False
        reaped = await self._registry.reap(epoch)
        if reaped.seats:
            self._bereaved = True
            self._dead.update(reaped.seats)
            seats = self._staying(await self._registry.seats())
        epochs = await self._registry.table_epochs()
        if self._table is None and reaped.held and epochs.oldest == 0:
            return False  # Redis lost the table: the seats that it listed are about to report what they hold
        layout = self._table.groups if self._table else await self._first_layout(seats)
        load = await self._measured(seats)
        if self._table is not None:
            self._repartitioner.follow(self._table, load, rooms_of(seats, layout))
            if load is None and self._bereaved and _in_place(seats, layout):
                load = self._meter.load or even_load(layout)
        if self._stands(seats, epochs, load):
            return False
        wanted = await asyncio.to_thread(self._intentions, seats, layout, epochs.following, load)
        self._bereaved = self._bereaved and (load is None or bool(wanted.assign))
        return await self._carry_out(wanted, epoch, epochs)

    async def _follow(self) -> None:
        found = await self._reader.read_table(self._table.epoch if self._table else 0)
        if found is not None:
            self._table = found
            self._events.tabled(found)

    def _stands(self, seats: Sequence[SeatState], epochs: TableEpochs, load: Load | None) -> bool:
        """Say whether the last turn found the same, wanted nothing, and nothing else asks for another look."""
        placed = [(seat.number, seat.status, seat.dismissed, seat.assigned, seat.report.digest) for seat in seats]
        seen, self._seen = self._seen, (placed, self._table, epochs.published)
        return load is None and self._repartitioner.target is None and self._seen == seen

    async def _carry_out(self, wanted: Intentions, epoch: int, epochs: TableEpochs) -> bool:
        table = wanted.table
        if table is None and self._table and epochs.published < self._table.epoch:  # Redis lost it
            table = msgspec.structs.replace(self._table, epoch=epochs.following)
        if table is None and not wanted.assign:
            return False
        self._seen = None
        if table is not None:
            await self._publish(epoch, table)
        if wanted.assign:
            await self._registry.assign_groups(epoch, [(seat.info.id, group) for seat, group in wanted.assign])
            for seat, group in wanted.assign:
                log.info("assigned %s to shard group %d", seat.title, group.number)
        return True

    def _intentions(
        self, seats: Sequence[SeatState], layout: Sequence[ShardGroup], following: int, load: Load | None
    ) -> Intentions:
        """Runs off the event loop: with thousands of seats it takes longer than a request should wait."""
        self._shortage.note(seats, layout)
        step = None
        if self._repartitioner.target is not None:
            if not self._repartitioner.late:
                step = next_step([seat for seat in seats if seat.stays], layout, self._repartitioner.target)
            if step is None:
                self._repartitioner.give_up()
        if step is not None:
            return intentions(seats, self._table, step.layout, following=following, step=step)
        gain = self._hysteresis.gain
        return intentions(seats, self._table, layout, following=following, load=load, gain=gain)

    async def _first_layout(self, seats: Sequence[SeatState]) -> tuple[ShardGroup, ...]:
        """Return the groups that were assigned before the table was lost, if they are whole; else even groups."""
        if not seats:
            return ()
        info = seats[0].info
        known = {group.number: group for group in await self._registry.groups()}
        if are_whole(known, info):
            return tuple(known[number] for number in sorted(known))
        return even_groups(list(info.layers), info.num_experts, min(self._groups, info.num_experts))

    async def _measured(self, seats: Sequence[SeatState]) -> Load | None:
        """Return the load if it is time to follow it: all seats are in place, and the table has stood for a while."""
        now = self._clock()
        if self._table is None or now < self._next_reading:
            return None
        self._next_reading = now + max(WINDOW_S, len(seats) / SEATS_PER_S)
        await asyncio.to_thread(self._meter.read, await self._registry.rows(), self._table)
        self._events.balanced(imbalance(self._meter.load, self._table))
        waited = now >= self._changed_at + self._hysteresis.wait_s
        return self._meter.load if waited and _in_place(seats, self._table.groups) else None

    def _forget(self) -> None:
        """Drop what was measured and begun for another model."""
        self._table, self._meter = None, LoadMeter()
        self._repartitioner = self._new_repartitioner()

    def _new_repartitioner(self) -> Repartitioner:
        return Repartitioner(self._hysteresis, clock=self._clock, on_done=self._events.repartitioned)

    async def _publish(self, epoch: int, table: RoutingTable) -> None:
        await self._registry.publish_table(epoch, table)
        before = {seat.number: seat for seat in self._table.seats} if self._table else {}
        self._table, self._changed_at = table, self._clock()
        self._events.tabled(table)
        now = {seat.number: seat for seat in table.seats}
        news = [_titles(now, now.keys() - before), _titles(before, before.keys() - now)]
        self._note_changes(before, now)
        log.info(
            "published routing table %d: %d seats in %d shard groups; added: %s; removed: %s",
            table.epoch,
            len(now),
            len(table.groups),
            *news,
        )

    def _note_changes(self, before: Mapping[int, Seat], now: Mapping[int, Seat]) -> None:
        for number, seat in before.items():
            if number not in now or now[number].group != seat.group:
                self._events.changed(seat.group, "death" if number in self._dead else "leave")
        for number, seat in now.items():
            if number not in before or before[number].group != seat.group:
                self._events.changed(seat.group, "join")
        self._dead.clear()


def _titles(seats: Mapping[int, Seat], numbers: Iterable[int]) -> str:
    return ", ".join(seats[number].title for number in sorted(numbers)[:NAMED]) or "none"


def intentions(
    seats: Sequence[SeatState],
    table: RoutingTable | None,
    layout: Sequence[ShardGroup],
    *,
    following: int,
    load: Load | None = None,
    gain: float = HYSTERESIS.gain,
    step: Step | None = None,
) -> Intentions:
    """Return what to publish and to assign.

    The first table waits until each group has a seat: an older one, which Redis lost, may be in use.

    Args:
        layout: the groups.
        following: the next table's epoch.
        load: if given, a seat may move for it, where that saves the part ``gain`` of the highest load per capacity.
        step: a step towards another cut of the groups.
    """
    if not layout:
        return Intentions(table=None, assign=())
    digests = {group.digest: group for group in layout}
    ahead = step.ahead if step else frozenset()
    staying = [seat for seat in seats if seat.stays and seat.number not in ahead]
    holds = {seat.number: group for seat in staying if (group := _held(seat, digests)) is not None}
    assign = assignments(staying, holds, layout, load, gain)
    moved = {seat.number for seat, _ in assign}
    assign += [(seat, holds[seat.number]) for seat in staying if seat.number in holds and seat.assigned not in digests]
    listed = tuple(
        seat.seat(holds[seat.number].number)
        for seat in staying
        if seat.number in holds and seat.number not in moved and seat.serves(holds[seat.number])
    )
    fingerprint = table.fingerprint if table else seats[0].info.fingerprint
    experts = table.num_experts if table else seats[0].info.num_experts
    assign += step.assign if step else ()
    cut = tuple(layout)
    new = RoutingTable(epoch=following, fingerprint=fingerprint, num_experts=experts, groups=cut, seats=listed)
    changed = all(new.seats_of.values()) if table is None else (table.groups, table.seats) != (new.groups, new.seats)
    return Intentions(table=new if changed else None, assign=tuple(assign))


def _in_place(seats: Sequence[SeatState], layout: Sequence[ShardGroup]) -> bool:
    """Say whether each seat that can hold a group of ``layout`` serves one."""
    return all(seat.status == "ready" for seat in seats if can_hold_some(seat, layout))


def _held(seat: SeatState, digests: Mapping[str, ShardGroup]) -> ShardGroup | None:
    """Return the group that was assigned to the seat or, where Redis forgot that, the one that it reports."""
    return digests.get(seat.assigned or "") or digests.get(seat.report.digest)


def are_whole(groups: Mapping[int, ShardGroup], info: ExpertInfo) -> bool:
    """Say whether ``groups`` hold every expert once."""
    table = RoutingTable(epoch=0, fingerprint="", num_experts=info.num_experts, groups=tuple(groups.values()))
    try:
        return set(table.group_of) == set(info.layers)
    except ConfigError:
        return False
