"""A deployment by Redis: leader, gateways, workers, seats by shard group, queue. Reads only."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from redis.asyncio import Redis

from services.errors import QueueUnavailable
from services.queue.connect import command, known_faults, queue_errors
from services.queue.keys import Keys
from services.queue.limits import QueueLimits
from services.queue.scheduler_side import QueueDepth, SchedulerQueue, WorkerState
from services.queue.seats import SeatRegistry, SeatState
from services.queue.tables import TableReader
from services.routing import RoutingTable

TIMEOUT_S = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A shard group: ``seats`` that the table lists, the names of their ``workers``, and its other workers, counted by
    status in ``coming``."""

    seats: int
    coming: Mapping[str, int] = field(default_factory=dict)
    workers: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Queue:
    """A reading of Redis. ``problem``: why Redis is away; then nothing else is known."""

    problem: str = ""
    leader: str = ""
    gateways: int = 0
    workers: tuple[str, ...] = ()
    """Names of the attention workers whose lease is live."""
    blocked: tuple[str, ...] = ()
    """Names of those that take no requests now, as they miss experts."""
    epoch: int = 0
    """Epoch of the routing table; 0: there is none."""
    groups: Mapping[int, Group] = field(default_factory=dict)
    surplus: tuple[int, ...] = ()
    """Groups that workers were started for and that the table does not have."""
    requests: int = 0
    tokens: int = 0
    dead_letters: int = 0
    sleep: int = 0
    """The level at which the model is to sleep; 0: it is to serve."""
    faults: str = ""
    """Known faults of this version of Redis."""


class QueueReader:
    """Reads one namespace of Redis. ``asked``: number of shard groups that the scheduler is to make, if known."""

    def __init__(self, redis: Redis, namespace: str, asked: int | None = None) -> None:
        keys, limits = Keys(namespace), QueueLimits()
        self._redis = redis
        self._keys = keys
        self._asked = asked
        self._queue = SchedulerQueue(redis, keys, limits)
        self._seats = SeatRegistry(redis, keys, limits)
        self._tables = TableReader(redis, keys, limits)

    async def read(self) -> Queue:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._read()
        except QueueUnavailable as error:
            return Queue(problem=error.message)
        except TimeoutError:
            return Queue(problem=f"Redis does not answer within {TIMEOUT_S:g} s.")

    async def _read(self) -> Queue:
        seconds, microseconds = await command(self._redis, "TIME")
        now_ms = int(seconds) * 1000 + int(microseconds) // 1000
        leader = await command(self._redis, "GET", self._keys.leader)
        gateways = await command(self._redis, "ZCOUNT", self._keys.gateways, now_ms, "+inf")
        table = await self._tables.read_table()
        with queue_errors():
            info = await self._redis.info("server")
        found = self._queue_of(
            (leader or b"").decode(errors="replace"),
            int(gateways),
            await self._queue.workers(),
            table,
            await self._seats.seats(),
            await self._queue.depth(),
        )
        return replace(found, sleep=await self._queue.sleep_level(), faults=known_faults(info))

    def _queue_of(
        self,
        leader: str,
        gateways: int,
        workers: list[WorkerState],
        table: RoutingTable | None,
        seats: list[SeatState],
        depth: QueueDepth,
    ) -> Queue:
        found = groups(table, seats, self._asked)
        surplus = {group for state in seats if (group := _group(state)) is not None} - set(found)
        return Queue(
            leader=leader,
            gateways=gateways,
            workers=tuple(state.info.name for state in workers),
            blocked=tuple(state.info.name for state in workers if state.credit_requests == 0),
            epoch=table.epoch if table else 0,
            groups=found,
            surplus=tuple(sorted(surplus)),
            requests=depth.requests,
            tokens=depth.tokens,
            dead_letters=depth.dead_letters,
        )


def groups(table: RoutingTable | None, seats: list[SeatState], asked: int | None) -> dict[int, Group]:
    """Return the groups by number: those of the table or, before there is one, those that are asked for or that seats
    name. A seat counts for its group while the table lists it and its worker is there."""
    known = {state.number: state for state in seats}
    listed = {number: [seat.number for seat in its] for number, its in (table.seats_of if table else {}).items()}
    named = {group for state in seats if (group := _group(state)) is not None}
    found = {}
    for number in sorted(listed or {*range(asked or 0), *named}):
        serving = [each for each in listed.get(number, ()) if each in known and known[each].status == "ready"]
        coming: dict[str, int] = {}
        for state in seats:
            if _group(state) == number and state.number not in serving:
                word = state.status if state.status != "ready" else "not in the table yet"
                coming[word] = coming.get(word, 0) + 1
        names = tuple(known[each].info.name for each in serving)
        found[number] = Group(seats=len(serving), coming=coming, workers=names)
    return found


def _group(state: SeatState) -> int | None:
    return state.info.group if state.report.group is None else state.report.group
