"""An expert worker's side of Redis. Reports and heartbeats go out; an assignment, or the order to leave, comes in.

The worker's id is its incarnation. All methods raise QueueUnavailable while Redis does not answer, and may be repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from services.errors import QueueUnavailable, UnreadableMessage
from services.messages import ExpertInfo, SeatReport, SeatRows, claim_of, encode
from services.queue.keys import Keys
from services.queue.limits import QueueLimits
from services.queue.quarantine import Quarantine
from services.queue.scripts import Argument, Scripts, milliseconds
from services.routing import ShardGroup, decode_group, encode_group


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """The group that a seat shall hold. The worker reports ``digest`` when it has loaded the group."""

    group: ShardGroup
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """What the scheduler wants of a seat."""

    number: int
    """The seat's number; 0 if the worker never joined or is deregistered."""
    leave: bool = False
    """Call :meth:`ExpertQueue.leave`, serve until :func:`services.queue.tables.unused`, deregister and end."""
    assignment: Assignment | None = None
    """The group to load; None: keep what is loaded."""
    table_epoch: int = 0
    """Epoch of the published table; 0: there is none."""
    oldest_epoch: int | None = None
    """Oldest epoch that attention workers may use; None: nobody uses a table; 0: unknown, for Redis lost its data."""


@dataclass(kw_only=True, slots=True)
class _Member:
    info: ExpertInfo
    lease_s: float
    number: int = 0
    assignment: Assignment | None = None


class ExpertQueue:
    """One or more expert workers' view of Redis."""

    def __init__(
        self, redis: Redis, keys: Keys, limits: QueueLimits | None = None, *, quarantine: Quarantine | None = None
    ) -> None:
        self._scripts = Scripts(redis, keys, limits or QueueLimits())
        self._quarantine = quarantine or Quarantine()
        self._members: dict[str, _Member] = {}

    async def join(self, info: ExpertInfo, lease_s: float) -> int:
        """Takes a seat under a lease and returns its number, which no other worker ever has. A worker that joins again
        keeps its number and renews ``info``. Raises FingerprintMismatch where live members serve another model.
        """
        member = self._members.get(info.id)
        joining = member or _Member(info=info, lease_s=lease_s)
        joining.info, joining.lease_s = info, lease_s
        await self._enter(joining, SeatReport(status="waiting"))
        self._members[info.id] = joining
        return joining.number

    async def heartbeat(self, worker_id: str, report: SeatReport, rows: SeatRows | None = None) -> Orders:
        """Renews the lease and reports the worker's state; call it every quarter of the lease.

        Joins again by itself where Redis forgot the worker: with what it holds, and with its number, unless another
        worker has it by now. An assignment that cannot be read counts as none: the former one stays. ``rows`` None
        leaves the reported rows as they are. Raises FingerprintMismatch where members of another model came while this
        worker was silent for two leases.
        """
        member = self._members.get(worker_id)
        if member is None:
            return Orders(number=0, leave=True)
        reply = await self._beat(member, report, rows)
        if reply is None:
            if worker_id not in self._members:  # deregistered meanwhile: it must not enter again
                return Orders(number=0, leave=True)
            await self._enter(member, report)
            reply = await self._beat(member, report, rows)
        if reply is None:
            raise QueueUnavailable("Redis lost the seat as soon as it was taken.", retry_after_s=1)
        try:
            return _orders(member, reply)
        except UnreadableMessage as error:
            await self._quarantine.put("assignment", worker_id, error, reply[5])
            return _orders(member, [*reply[:5], b""])

    async def leave(self, worker_id: str) -> bool:
        """Asks to be left out of the next table; False if Redis does not know the worker.

        The worker keeps sending heartbeats (status ``leaving``) and serving the rows that it gets.
        """
        return bool(await self._scripts.run("leave_seat", worker_id))

    async def deregister(self, worker_id: str) -> None:
        """Gives the seat up at once. Nobody gets its number."""
        self._members.pop(worker_id, None)  # first: a heartbeat on its way must not enter it again
        await self._scripts.run("deregister_seat", worker_id)

    async def _enter(self, member: _Member, report: SeatReport) -> None:
        """Joins; ``report`` and the member's assignment count where Redis does not know the seat."""
        info, assigned = member.info, member.assignment
        seat = (info.id, milliseconds(member.lease_s), encode(info), claim_of(info), member.number)
        holds = (assigned.digest, encode_group(assigned.group)) if assigned else ("", b"")
        member.number = int(await self._scripts.run("join_seat", *seat, report.status, encode(report), *holds))

    async def _beat(self, member: _Member, report: SeatReport, rows: SeatRows | None) -> Any:
        known = member.assignment.digest if member.assignment else ""
        counted: Argument = encode(rows) if rows else ""
        return await self._scripts.run("seat_heartbeat", member.info.id, report.status, encode(report), counted, known)


def _orders(member: _Member, reply: list[Any]) -> Orders:
    number, leave, table_epoch, oldest, digest, group = reply
    if not digest:
        member.assignment = None
    elif group:
        member.assignment = Assignment(group=decode_group(group), digest=digest.decode())
    return Orders(
        number=number,
        leave=bool(leave),
        assignment=member.assignment,
        table_epoch=table_epoch,
        oldest_epoch=None if oldest < 0 else oldest,
    )
