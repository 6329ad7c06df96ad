"""The scheduler's side of expert seats. Seats and their reports come in; assignments of groups and tables go out.

Every call that changes something carries the leader's epoch. It raises :class:`StaleLeader`, having changed nothing,
once another leader was elected.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from services.errors import UnreadableMessage
from services.messages import (
    ExpertInfo,
    SeatReport,
    SeatRows,
    SeatStatus,
    decode_expert,
    decode_seat_report,
    decode_seat_rows,
    encode,
)
from services.queue.keys import Keys
from services.queue.limits import QueueLimits
from services.queue.quarantine import Quarantine
from services.queue.scripts import Argument, Scripts
from services.routing import RoutingTable, Seat, ShardGroup, decode_group, encode_group, encode_table

WHOLE_S = 2.0
"""How often all seats are read instead of those that changed: a worker of an earlier version notes no changes, and
Redis may lose its last second."""
_NO_REPORT = encode(SeatReport(status="waiting"))


@dataclass(frozen=True, kw_only=True, slots=True)
class SeatState:
    """A seat that was not reaped."""

    number: int
    info: ExpertInfo
    status: SeatStatus
    """``leaving`` is final; any other status is the one that the worker reported last."""
    report: SeatReport
    dismissed: bool
    """Whether the scheduler asked the seat to leave."""
    assigned: str | None
    """Digest of the group that the seat shall hold; None: none yet."""

    @property
    def title(self) -> str:
        """The seat in log lines: its worker's name and its number."""
        return f"{self.info.name} (seat {self.number})"

    @property
    def stays(self) -> bool:
        """Whether the seat neither leaves nor was asked to leave."""
        return self.status != "leaving" and not self.dismissed

    def serves(self, group: ShardGroup) -> bool:
        """Says whether a table with ``group`` may send rows for the group to this seat."""
        return self.status == "ready" and self.report.digest == group.digest

    def has_room(self, group: ShardGroup) -> bool:
        """Says whether the worker can hold ``group``, by its own report."""
        return self.info.max_experts is None or group.size <= self.info.max_experts

    def seat(self, group: int) -> Seat:
        """Returns the entry of this seat in a table."""
        info = self.info
        return Seat(
            number=self.number,
            worker=info.id,
            group=group,
            host=info.host,
            port=info.port,
            node=info.node,
            capacity=info.capacity,
            process=info.process,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TableEpochs:
    """Epochs of the routing table."""

    published: int
    """The published epoch; 0: no table is published, or Redis lost it."""
    oldest: int | None
    """The oldest in use by attention workers that were not reaped; None: nobody uses a table; 0: unknown, for Redis
    lost its data."""
    newest: int | None
    """The newest in use. It is above ``published`` where Redis lost the table: publish it again as ``following``."""
    following: int
    """The epoch that the next table may take: above all of these, and above those that Redis forgot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SeatReap:
    """What one :meth:`SeatRegistry.reap` did."""

    seats: tuple[int, ...] = ()
    """Numbers of the dead seats that were removed. The next table must not list them."""
    readers: int = 0
    """How many dead attention workers were removed as readers of tables."""
    held: bool = False
    """Whether nothing is reclaimed, because Redis was away."""
    more: bool = False
    """Whether the bound on work was reached: call again soon."""


class SeatRegistry:
    """A scheduler's view of the seats. All methods raise QueueUnavailable while Redis does not answer."""

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        limits: QueueLimits | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        quarantine: Quarantine | None = None,
    ) -> None:
        self._scripts = Scripts(redis, keys, limits or QueueLimits())
        self._quarantine = quarantine or Quarantine()
        self._clock = clock
        self._reading = asyncio.Lock()
        self._version = 0
        self._whole_at = 0.0
        self._seats: dict[int, tuple[list[Any], SeatState]] = {}

    async def seats(self) -> list[SeatState]:
        """Returns all seats that neither left nor were reaped, by number. A seat that did not change is the same object
        as before; a seat whose record or report cannot be read is left out.

        Only changes travel, except that all seats are read every :data:`WHOLE_S`; until then the rows in flight and the
        load of a report may be out of date.
        """
        async with self._reading:  # placement and scaling share this
            return await self._read_seats()

    async def _read_seats(self) -> list[SeatState]:
        whole = self._clock() >= self._whole_at + WHOLE_S
        version, every, ended, numbers, rows = await self._scripts.run("seats", 0 if whole else self._version)
        if every:
            self._whole_at = self._clock()
            numbers = [row[0] for row in rows]
        if every or ended:
            self._seats = {number: self._seats[number] for number in numbers if number in self._seats}
        for row in rows:
            if row[0] not in self._seats or self._seats[row[0]][0] != row:
                await self._take(row)
        self._version = int(version)
        return [self._seats[number][1] for number in sorted(self._seats)]

    async def _take(self, row: list[Any]) -> None:
        number = row[0]
        try:
            self._seats[number] = row, _state(row)
        except UnreadableMessage as error:
            self._seats.pop(number, None)
            await self._quarantine.put("seat", f"seat {number}", error, row[1])

    async def rows(self) -> dict[int, SeatRows]:
        """Returns the rows that the seats counted, by seat number; reports that cannot be read are left out."""
        reply = await self._scripts.run("seat_rows")
        rows, unreadable = await asyncio.to_thread(_rows, reply)
        for number, error, data in unreadable:
            await self._quarantine.put("seat", f"rows of seat {number}", error, data)
        return rows

    async def groups(self) -> list[ShardGroup]:
        """Returns the groups that seats were assigned, one for each seat, by seat number, without unreadable ones."""
        groups: list[ShardGroup] = []
        for group in await self._scripts.run("seat_groups"):
            try:
                groups.append(decode_group(group))
            except UnreadableMessage as error:
                await self._quarantine.put("assignment", "a seat", error, group)
        return groups

    async def reap(self, epoch: int, max_items: int = 256) -> SeatReap:
        """Removes seats and table readers whose lease expired, unless a hold is on (:meth:`SchedulerQueue.reap`)."""
        held, more, readers, *numbers = await self._scripts.run("reap_seats", epoch, max_items)
        return SeatReap(seats=tuple(numbers), readers=readers, held=bool(held), more=bool(more))

    async def assign_groups(self, epoch: int, pairs: Sequence[tuple[str, ShardGroup]]) -> list[bool]:
        """Assigns each worker's seat its group instead of what it holds; False for a seat that is gone or leaves.

        Take a seat that serves another group out of the table first.
        """
        items: list[tuple[Argument, ...]] = [(worker, group.digest, encode_group(group)) for worker, group in pairs]
        replies = await self._scripts.run_chunks("assign_groups", (epoch,), items)
        return [bool(answer) for reply in replies for answer in reply]

    async def dismiss(self, epoch: int, worker_id: str) -> bool:
        """Asks a seat to leave; False if the seat is gone."""
        return bool(await self._scripts.run("dismiss_seat", epoch, worker_id))

    async def table_epochs(self) -> TableEpochs:
        published, oldest, newest, following = await self._scripts.run("table_epochs")
        return TableEpochs(
            published=published,
            oldest=None if oldest < 0 else oldest,
            newest=None if newest < 0 else newest,
            following=following,
        )

    async def publish_table(self, epoch: int, table: RoutingTable) -> None:
        """Replaces the table and wakes its readers. Repeating the call is harmless.

        Raises StaleTable, having changed nothing, where ``table.epoch`` is not above the published epoch and the epochs
        in use: make the table again for :attr:`TableEpochs.following`.
        """
        await self._scripts.run("publish_table", epoch, table.epoch, encode_table(table))


def _state(row: list[Any]) -> SeatState:
    number, info, status, report, dismissed, digest = row
    return SeatState(
        number=number,
        info=decode_expert(info),
        status=status.decode(),
        report=decode_seat_report(report or _NO_REPORT),
        dismissed=bool(dismissed),
        assigned=digest.decode() or None,
    )


def _rows(reply: list[Any]) -> tuple[dict[int, SeatRows], list[tuple[int, UnreadableMessage, bytes]]]:
    """Returns rows by seat number, and what is unreadable. Call it in a thread: thousands of seats report megabytes."""
    found: dict[int, SeatRows] = {}
    unreadable: list[tuple[int, UnreadableMessage, bytes]] = []
    for number, rows in zip(reply[::2], reply[1::2], strict=True):
        try:
            found[number] = decode_seat_rows(rows)
        except UnreadableMessage as error:
            unreadable.append((number, error, rows))
    return found, unreadable
