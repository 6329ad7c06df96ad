"""The scheduler's side of expert seats: who is there, what each shall hold, and the table that everybody reads.

Every call that changes something carries the leader's epoch and raises :class:`StaleLeader`, having changed nothing,
once another leader was elected.
"""

from __future__ import annotations

from dataclasses import dataclass

from redis.asyncio import Redis

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
from services.queue.scripts import Scripts
from services.routing import RoutingTable, Seat, ShardGroup, decode_group, encode_group, encode_table, group_digest

_NO_REPORT = encode(SeatReport(status="waiting"))


@dataclass(frozen=True, kw_only=True, slots=True)
class SeatState:
    """A seat that was not reaped."""

    number: int
    info: ExpertInfo
    status: SeatStatus
    """``leaving`` is final; the others are as the worker reported them last."""
    report: SeatReport
    dismissed: bool
    """The scheduler asked it to leave."""
    assigned: str | None
    """Digest of the group that it shall hold; None: none yet."""

    @property
    def stays(self) -> bool:
        """Whether it neither leaves nor was asked to."""
        return self.status != "leaving" and not self.dismissed

    def serves(self, group: ShardGroup) -> bool:
        """Whether a table may send rows for ``group``, as it stands in that table, to this seat."""
        return self.status == "ready" and self.report.digest == group_digest(group)

    def has_room(self, group: ShardGroup) -> bool:
        """Whether its worker says that it can hold ``group``."""
        most = self.info.max_experts
        return most is None or group.size <= most

    def seat(self, group: int) -> Seat:
        """This seat as a table lists it."""
        info = self.info
        return Seat(
            number=self.number,
            worker=info.id,
            group=group,
            host=info.host,
            port=info.port,
            node=info.node,
            capacity=info.capacity,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TableEpochs:
    """Epochs of the routing table."""

    published: int
    """0: no table is published, or Redis lost it."""
    oldest: int | None
    """In use by attention workers that were not reaped; None: nobody uses any; 0: not known, Redis lost its data."""
    newest: int | None
    """In use likewise. Above ``published`` where Redis lost the table: publish it anew as ``following``."""
    following: int
    """What the next table may take: above all of these, and above those that Redis forgot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SeatReap:
    """What one :meth:`SeatRegistry.reap` did."""

    seats: tuple[int, ...] = ()
    """Numbers of the dead seats that were removed. The next table must do without them."""
    readers: int = 0
    """Dead attention workers whose epochs nobody waits for any more."""
    held: bool = False
    """Nothing is reclaimed, because Redis was away."""
    more: bool = False
    """The bound on work was reached: call again soon."""


class SeatRegistry:
    """A scheduler's view of the seats. All methods raise QueueUnavailable while Redis does not answer."""

    def __init__(self, redis: Redis, keys: Keys, limits: QueueLimits | None = None) -> None:
        self._scripts = Scripts(redis, keys, limits or QueueLimits())

    async def seats(self) -> list[SeatState]:
        """All seats but those that left or were reaped, by number."""
        return [
            SeatState(
                number=number,
                info=decode_expert(info),
                status=status.decode(),
                report=decode_seat_report(report or _NO_REPORT),
                dismissed=bool(dismissed),
                assigned=digest.decode() or None,
            )
            for number, info, status, report, dismissed, digest in await self._scripts.run("seats")
        ]

    async def rows(self) -> dict[int, SeatRows]:
        """Rows that the seats counted, by seat number."""
        reply = await self._scripts.run("seat_rows")
        return {number: decode_seat_rows(rows) for number, rows in zip(reply[::2], reply[1::2], strict=True)}

    async def groups(self) -> list[ShardGroup]:
        """Those that seats were told to hold, once for each seat, by seat number."""
        return [decode_group(group) for group in await self._scripts.run("seat_groups")]

    async def reap(self, epoch: int, max_items: int = 256) -> SeatReap:
        """Removes seats and table readers whose lease expired; none during a hold (:meth:`SchedulerQueue.reap`)."""
        held, more, readers, *numbers = await self._scripts.run("reap_seats", epoch, max_items)
        return SeatReap(seats=tuple(numbers), readers=readers, held=bool(held), more=bool(more))

    async def assign_group(self, epoch: int, worker_id: str, group: ShardGroup) -> bool:
        """Tells a seat to hold ``group`` instead of what it holds; False if it is gone or leaves.

        Take it out of the table first where it serves another group.
        """
        seat = (worker_id, group_digest(group), encode_group(group))
        return bool(await self._scripts.run("assign_group", epoch, *seat))

    async def dismiss(self, epoch: int, worker_id: str) -> bool:
        """Asks a seat to leave; False if it is gone."""
        return bool(await self._scripts.run("dismiss_seat", epoch, worker_id))

    async def table_epochs(self) -> TableEpochs:
        published, oldest, newest, following = await self._scripts.run("table_epochs")
        return TableEpochs(
            published=published,
            oldest=None if oldest < 0 else oldest,
            newest=None if newest < 0 else newest,
            following=following,
        )

    async def oldest_epoch_in_use(self) -> int | None:
        """Of the tables that attention workers may use; None if nobody uses any. The dead count until reaped."""
        return (await self.table_epochs()).oldest

    async def publish_table(self, epoch: int, table: RoutingTable) -> None:
        """Replaces the table and wakes its readers. Repeating the call is harmless.

        Raises StaleTable, having changed nothing, where ``table.epoch`` is not above the published epoch and those in
        use: make it anew for :attr:`TableEpochs.following`.
        """
        await self._scripts.run("publish_table", epoch, table.epoch, encode_table(table))
