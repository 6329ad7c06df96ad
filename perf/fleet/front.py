"""Attention workers without an engine and gateways without clients: they read tables, and end requests at once."""

from __future__ import annotations

import asyncio
import itertools
import time
from multiprocessing.connection import Connection
from typing import Any

from perf.fleet.experts import FleetShape
from services.attention.routing_table import TableFollower
from services.messages import Assign, GenerateRequest, SamplingParams, TokenEvent, WorkerInfo
from services.queue.connect import connect
from services.queue.gateway_side import GatewayQueue
from services.queue.keys import Keys
from services.queue.tables import TableReader
from services.queue.worker_side import FIRST_ID, WorkerQueue
from services.routing import RoutingTable


class NoLink:
    """A link that takes tables and does nothing."""

    def __init__(self) -> None:
        self.table: RoutingTable | None = None
        self.at = 0.0
        self.tables = 0

    def apply(self, table: RoutingTable) -> None:
        self.table, self.at, self.tables = table, time.monotonic(), self.tables + 1

    def oldest_epoch(self) -> int:
        return self.table.epoch if self.table else 0

    def missing(self) -> tuple[int, ...]:
        return ()

    def wait_ready(self, _seconds: float) -> bool:
        return True

    def stalled_s(self) -> dict[int, float]:
        return {}

    def faults(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass


class Front:
    """Readers and servers, in one process or in one each: decoding tables must not hold up measurements."""

    def __init__(self, shape: FleetShape) -> None:
        self._shape, self._keys = shape, Keys(shape.namespace)
        self.links: list[NoLink] = []
        self.queued_s: list[float] = []
        self._admitted: dict[str, float] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._numbers = itertools.count()

    def follow(self, workers: int) -> None:
        """Start readers of the table."""
        redis = connect(self._shape.url, max_connections=2 * workers)
        for number in range(workers):
            link, name = NoLink(), f"attention-{number}"
            reader = TableReader(redis, self._keys, self._shape.limits())
            follower = TableFollower(
                link, reader, worker_id=name, fingerprint=self._shape.fingerprint, lease_s=self._shape.lease_s
            )
            self.links.append(link)
            self._tasks.append(asyncio.create_task(follower.run()))

    def serve(self, workers: int, gateways: int, requests_per_s: float) -> None:
        """Start the same workers' inboxes, and what fills them."""
        redis = connect(self._shape.url, max_connections=3 * workers)
        queue = WorkerQueue(redis, self._keys, self._shape.limits())
        for number in range(workers):
            self._tasks.append(asyncio.create_task(self._beat(queue, f"attention-{number}")))
        for number in range(gateways):
            gateway = GatewayQueue(connect(self._shape.url), self._keys, f"gateway-{number}", self._shape.limits())
            self._tasks.append(asyncio.create_task(self._ask(gateway, f"gateway-{number}", gateways / requests_per_s)))

    async def _beat(self, queue: WorkerQueue, name: str) -> None:
        info = WorkerInfo(
            id=name,
            model="fleet",
            fingerprint=self._shape.fingerprint,
            kv_tokens=10**6,
            max_num_seqs=64,
            max_model_len=4096,
            host="10.0.0.1",
            pid=1,
            version="fleet",
        )
        await queue.register(info, self._shape.lease_s, credit_tokens=10**6, credit_requests=64)
        self._tasks.append(asyncio.create_task(self._answer(queue, name)))
        while True:
            await queue.heartbeat(name, {})
            await asyncio.sleep(self._shape.lease_s / 8)

    async def _answer(self, queue: WorkerQueue, name: str) -> None:
        last = FIRST_ID
        while True:
            last, messages = await queue.read_inbox(name, last, 500)
            now = time.monotonic()
            for message in messages:
                if isinstance(message, Assign):
                    request = message.request
                    self.queued_s.append(now - self._admitted.pop(request.id))
                    end = TokenEvent(request_id=request.id, attempt=request.attempt, index=0, token_id=1, finish="stop")
                    await queue.publish(name, [end])

    async def _ask(self, gateway: GatewayQueue, name: str, pause_s: float) -> None:
        await gateway.heartbeat(600.0)
        self._tasks.append(asyncio.create_task(self._listen(gateway)))
        while True:
            request = GenerateRequest(
                id=f"request-{next(self._numbers)}",
                attempt=1,
                token_ids=[1] * 100,
                prompt_len=100,
                sampling=SamplingParams(max_tokens=1),
                deadline_ms=0,
                priority=5,
                tenant="t",
                reply_to=name,
            )
            self._admitted[request.id] = time.monotonic()
            await gateway.admit([request], timeout_s=600)
            await asyncio.sleep(pause_s)

    async def _listen(self, gateway: GatewayQueue) -> None:
        last = FIRST_ID
        while True:
            last, _ = await gateway.follow(last, 500)

    async def until(self, seats: int, absent: set[str], present: set[str], timeout_s: float) -> tuple[float, float]:
        """When the first and the last reader had a table of ``seats`` (-1: any number) with these and without those."""
        fits: dict[int, bool] = {}

        def fit(table: RoutingTable | None) -> bool:
            if table is None:
                return False
            if table.epoch not in fits:
                names = {seat.worker for seat in table.seats}
                fits[table.epoch] = seats in (-1, len(names)) and present <= names and not absent & names
            return fits[table.epoch]

        first: float | None = None
        deadline = time.monotonic() + timeout_s
        while True:
            fitting = [link.at for link in self.links if fit(link.table)]
            if fitting and first is None:
                first = min(fitting)
            if len(fitting) == len(self.links):
                assert first is not None
                return first, max(fitting)
            assert time.monotonic() < deadline, f"{len(fitting)} of {len(self.links)} readers after {timeout_s} s"
            await asyncio.sleep(0.005)

    def failed(self) -> list[str]:
        return [repr(task.exception()) for task in self._tasks if task.done()]


async def stand(shape: FleetShape, pipe: Connection) -> None:
    """Commands in, answers out."""
    front = Front(shape)
    while True:
        what, *arguments = await asyncio.to_thread(pipe.recv)
        answer: Any = None
        if what == "follow":
            front.follow(*arguments)
        elif what == "serve":
            front.serve(*arguments)
        elif what == "until":
            try:
                answer = await front.until(*arguments)
            except AssertionError as error:
                answer = str(error)
        elif what == "queued":
            answer, front.queued_s = front.queued_s, []
        elif what == "tables":
            answer = front.links[0].tables, front.links[0].table
        elif what == "failed":
            answer = front.failed()
        pipe.send(answer)
