"""Expert workers without experts, a thousand in a process: real seats, heartbeats and orders, nothing to compute.

They speak as :class:`services.experts.worker.ExpertWorker` does, and cost a tenth of its time: the machine that plays
the fleet is also the one that serves it.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from services.errors import QueueUnavailable
from services.experts.worker import FIRST_BEAT_S, HEARTBEATS_PER_LEASE, ROWS_S
from services.messages import ExpertInfo, SeatReport, SeatRows, SeatStatus
from services.queue.backoff import Backoff, until_answered
from services.queue.connect import connect
from services.queue.expert_side import Assignment, ExpertQueue
from services.queue.keys import Keys
from services.queue.limits import QueueLimits
from services.queue.tables import TableReader, unused
from services.routing import RoutingTable

CONNECTIONS = 256
"""Connections of a process to Redis, which its members share."""
START_S = 3.0
"""Many that start together do so within this time, each at its own moment: so do pods."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetShape:
    """What a fleet is of. Workers name one of ``groups`` where ``pinned``, as the chart's do."""

    url: str
    namespace: str
    lease_s: float
    layers: int
    num_experts: int
    groups: int
    pinned: bool
    rows_per_s: float
    """Rows that every seat counts for each of its experts."""
    fingerprint: str = "fleet"

    def limits(self) -> QueueLimits:
        return QueueLimits(lease_s=self.lease_s)


class Member:
    """An expert worker that is ready as soon as it knows its group."""

    def __init__(self, shape: FleetShape, queue: ExpertQueue, reader: TableReader, info: ExpertInfo) -> None:
        self._shape, self._queue, self._reader, self.info = shape, queue, reader, info
        self._status: SeatStatus = "waiting"
        self._held: Assignment | None = None
        self._since = self._rows_due = 0.0
        self._leaving = asyncio.Event()
        self.dead = False
        """A Redis command may swallow that its task was cancelled."""

    def leave(self) -> None:
        self._leaving.set()

    async def run(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        await until_answered("seat", partial(self._queue.join, self.info, self._shape.lease_s), Backoff())
        pause_s = FIRST_BEAT_S
        while not self._leaving.is_set():
            if self.dead:
                return
            with suppress(QueueUnavailable):
                if await self._beat():
                    continue
            pause_s = min(2 * pause_s, self._shape.lease_s / HEARTBEATS_PER_LEASE)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._leaving.wait()
        await self._leave()

    async def _beat(self) -> bool:
        """Whether there is news to report at once."""
        report, rows, now = self._report(), None, time.monotonic()
        if self._held and now >= self._rows_due:
            self._rows_due = now + ROWS_S
            counted = (int((now - self._since) * self._shape.rows_per_s),)
            experts = self._held.group.experts
            rows = SeatRows(
                digest=self._held.digest, rows={layer: counted * len(ids) for layer, ids in experts.items()}
            )
        orders = await self._queue.heartbeat(self.info.id, report, rows)
        wanted = orders.assignment
        if wanted is None or self._held == wanted:
            return False
        self._held, self._status = wanted, "ready"
        self._since = now
        self._rows_due = now + random.uniform(0, ROWS_S)
        return True

    def _report(self) -> SeatReport:
        held = self._held
        return SeatReport(
            status=self._status, group=held.group.number if held else None, digest=held.digest if held else ""
        )

    async def _leave(self) -> None:
        self._status = "leaving"
        await until_answered("leaving", partial(self._queue.leave, self.info.id), Backoff())
        table: RoutingTable | None = None
        while True:
            table = await self._reader.read_table(table.epoch if table else 0) or table
            orders = await self._queue.heartbeat(self.info.id, self._report())
            if unused(table, self.info.id, orders.oldest_epoch):
                break
            await asyncio.sleep(0.1)
        await self._queue.deregister(self.info.id)


class ExpertFleet:
    """The members of one process."""

    def __init__(self, shape: FleetShape, name: str) -> None:
        self._shape, self._name = shape, name
        redis = connect(shape.url, max_connections=CONNECTIONS)
        self._queue = ExpertQueue(redis, Keys(shape.namespace), shape.limits())
        self._reader = TableReader(redis, Keys(shape.namespace), shape.limits())
        self._running: dict[str, tuple[asyncio.Task[None], Member]] = {}
        self._leaving: list[asyncio.Task[None]] = []
        self._numbers = itertools.count()

    def start(self, count: int) -> list[str]:
        """Start members. Returns their ids."""
        members = [
            Member(self._shape, self._queue, self._reader, self._info(next(self._numbers))) for _ in range(count)
        ]
        for member in members:
            delay_s = random.uniform(0.0, START_S) if count > 1 else 0.0
            self._running[member.info.id] = asyncio.create_task(member.run(delay_s)), member
        return [member.info.id for member in members]

    def leave(self, count: int) -> list[str]:
        """Make members leave as after SIGTERM."""
        names = self._last(count)
        for name in names:
            task, member = self._running.pop(name)
            self._leaving.append(task)
            member.leave()
        return names

    def kill(self, count: int) -> list[str]:
        names = self._last(count)
        for name in names:
            task, member = self._running.pop(name)
            member.dead = True
            task.cancel()
        return names

    def failed(self) -> list[str]:
        tasks = [task for task, _ in self._running.values()]
        ended = [task for task in tasks if task.done()] + [task for task in self._leaving if task.done()]
        return [repr(error) for task in ended if (error := task.exception())]

    def _last(self, count: int) -> list[str]:
        return list(self._running)[len(self._running) - count :]

    def _info(self, number: int) -> ExpertInfo:
        shape = self._shape
        address = f"{number >> 8}.{number & 255}"
        return ExpertInfo(
            id=f"{self._name}-{number}",
            fingerprint=shape.fingerprint,
            host=f"10.0.{address}",
            port=7100,
            memory_bytes=80 << 30,
            pid=1,
            version="fleet",
            node=f"node-{number // 4}",
            metrics_url=f"http://10.0.{address}:9100/metrics",
            group=number % shape.groups if shape.pinned else None,
            num_experts=shape.num_experts,
            layers=tuple(range(shape.layers)),
        )


async def obey(shape: FleetShape, name: str, pipe: Connection) -> None:
    """Commands in: (what, count); answers out: (when, ids). Time is of CLOCK_MONOTONIC, one for all processes."""
    fleet = ExpertFleet(shape, name)
    commands = {"start": fleet.start, "leave": fleet.leave, "kill": fleet.kill}
    while True:
        what, count = await asyncio.to_thread(pipe.recv)
        now = time.monotonic()
        answer: Any = commands[what](count) if what in commands else fleet.failed()
        pipe.send((now, answer))
