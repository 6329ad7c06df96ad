"""The queue as gateways see it, without Redis: tests play the scheduler, the workers and the faults.

``tests/contract/test_followers.py`` holds it to what the real queue does.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from services.errors import QueueUnavailable, RequestError
from services.messages import AttemptLost, GenerateRequest, TokenEvent, WorkerInfo
from services.queue.gateway_side import IdempotencyKey, KeyBound, Prompts, Result
from services.queue.limits import TenantLimits
from services.queue.prompts import whole
from services.queue.sleep import Sleep
from testkit.waiting import eventually

Answer = Callable[[GenerateRequest], Iterable[TokenEvent]]


@dataclass
class Record:
    """What the queue knows of a request; ``request`` has its prompt."""

    request: GenerateRequest
    state: Any = "queued"
    streamed: bool = False
    cancelled: bool = False

    @property
    def owner(self) -> str:
        return self.request.reply_to

    def change(self, state: str, **fields: Any) -> None:
        self.state, self.request = state, structs.replace(self.request, **fields)
        self.streamed = self.streamed and state != "lost"


class ScriptedQueue:
    """One gateway's side. What it asked for is recorded; ``emit`` sends events to it, ``answer`` those for a request.

    ``other`` is the queue of another gateway, with which it shares the records.
    """

    def __init__(self, name: str = "gw", *, other: ScriptedQueue | None = None) -> None:
        self.name = name
        self.records: dict[str, Record] = other.records if other else {}
        self.keys: dict[tuple[str, str], tuple[str, str, int]] = other.keys if other else {}
        self.gateways: dict[str, ScriptedQueue] = other.gateways if other else {}
        self.gateways[name] = self
        self.admitted: list[GenerateRequest] = []
        self.resubmitted: list[GenerateRequest] = []
        self.taken_up: list[GenerateRequest] = []
        self.places: list[tuple[int, int]] = []
        self.cancelled: dict[str, int] = {}
        self.limits: list[TenantLimits | None] = []
        self.charged: list[str] = []
        self.over_rate: RequestError | None = None
        self.surveys = 0
        self.refusal: RequestError | None = None
        self.answer: Answer | None = None
        self.live_workers: list[WorkerInfo] = []
        self.restated: list[GenerateRequest] = []
        self.kept_whole: list[str] = []  # resubmitted with their prompts in their records
        self.left = False
        self._down = False
        self._changed = asyncio.Event()
        self.events: list[Result] = []

    @property
    def down(self) -> bool:
        return self._down

    @down.setter
    def down(self, value: bool) -> None:
        self._down = value
        self._changed.set()

    def emit(self, *events: Result) -> None:
        """Sends ``events`` as they are; the records follow."""
        for event in events:
            record = self.records.get(event.request_id)
            if record is None or record.owner != self.name or record.state == "done":
                continue
            if isinstance(event, AttemptLost):
                record.change("lost", attempt=event.attempt)
            elif isinstance(event, TokenEvent) and event.attempt >= record.request.attempt:
                record.streamed = True
                record.change("done" if event.finish else "running", attempt=event.attempt)
        self.events.extend(events)
        self._changed.set()

    def publish(self, *events: TokenEvent) -> set[str]:
        """Sends events as a worker does; returns the requests of those that came too late."""
        gone = set()
        for event in events:
            record = self.records.get(event.request_id)
            if record is not None and record.state == "running" and record.request.attempt == event.attempt:
                self.gateways[record.owner].emit(event)
            else:
                gone.add(event.request_id)
        return gone

    def lose(self, request_id: str) -> None:
        """The worker of a request dies."""
        request = self.records[request_id].request
        self.gateways[request.reply_to].emit(
            AttemptLost(request_id=request_id, attempt=request.attempt + 1, reason="lease_expired")
        )

    def end(self, request_id: str) -> None:
        """The scheduler cancels a request, whose gateway counts as dead."""
        request = self.records[request_id].request
        self.gateways[request.reply_to].emit(_cancelled(request))

    async def wait_for(self, attribute: str, count: int = 1) -> Any:
        """The recorded calls ``attribute`` once there are ``count``."""
        await eventually(lambda: len(getattr(self, attribute)) >= count, f"{count} calls in {attribute}")
        return getattr(self, attribute)

    def check_up(self) -> None:
        if self._down:
            raise QueueUnavailable("Redis is away.", retry_after_s=1)

    async def heartbeat(self, ttl_s: float, fingerprint: str | None = None) -> None:  # noqa: ARG002
        self.check_up()

    async def leave(self) -> None:
        self.left = True

    async def admit(
        self,
        requests: Sequence[GenerateRequest],
        *,
        timeout_s: float,
        tenant_limits: TenantLimits | None = None,
        key: IdempotencyKey | None = None,
        prompts: Prompts | None = None,
    ) -> list[GenerateRequest]:
        self.check_up()
        self._bind(requests[0].tenant, key)
        if self.refusal is not None:
            raise self.refusal
        granted = [structs.replace(request, attempt=1, deadline_ms=int(timeout_s * 1000)) for request in requests]
        joined = [_joined(request, prompts) for request in granted]
        self.admitted += joined
        self.limits.append(tenant_limits)
        for request in joined:
            self._queue(Record(request))
        return granted

    def _bind(self, tenant: str, key: IdempotencyKey | None) -> None:
        if key is None:
            return
        bound = self.keys.get((tenant, key.key))
        if bound is not None:
            raise KeyBound(base_id=bound[1], seed=bound[2], owner="gw")
        if self.refusal is None:
            self.keys[tenant, key.key] = (key.fingerprint, key.base_id, key.seed)

    def _queue(self, record: Record) -> None:
        self.records[record.request.id] = record
        if self.answer is not None:
            self.emit(*self.answer(record.request))

    async def charge(self, tenant: str, limits: TenantLimits) -> None:  # noqa: ARG002
        self.check_up()
        if self.over_rate is not None:
            raise self.over_rate
        self.charged.append(tenant)

    async def resubmit(self, request: GenerateRequest, prompts: Prompts | None = None, *, by_name: bool = True) -> bool:
        self.check_up()
        self.kept_whole += [] if by_name else [request.id]
        joined = _joined(request, prompts)
        self.resubmitted.append(joined)
        record = self.records.get(request.id)
        if record is not None:
            mine = record.request.attempt
            if record.state == "done" or record.owner != self.name or mine > request.attempt:
                return False
            if mine == request.attempt and record.state != "lost":
                return True
        self.records[request.id] = Record(joined)
        return True

    async def take_up(
        self,
        request: GenerateRequest,
        *,
        timeout_s: float,
        tenant_limits: TenantLimits | None = None,
        prompts: Prompts | None = None,
        place: int = 0,
        of: int = 1,
    ) -> GenerateRequest:
        self.check_up()
        granted = structs.replace(request, attempt=1, deadline_ms=int(timeout_s * 1000), reply_to=self.name)
        record, state = self.records.get(request.id), "queued"
        if record is not None:
            self._move(record)
            untouched = record.state != "done" and not record.streamed and not record.request.delivered
            granted = structs.replace(granted, attempt=record.request.attempt + (not untouched))
            state = record.state if untouched and record.state != "lost" else state
        joined = _joined(granted, prompts)
        self.taken_up.append(joined)
        self.places.append((place, of))
        self.limits.append(tenant_limits)
        self._queue(Record(joined, state))
        return granted

    def _move(self, record: Record) -> None:
        if record.owner != self.name and record.state != "done":
            former = self.gateways[record.owner]
            former.events.append(_cancelled(record.request))
            former._changed.set()
        record.change(record.state, reply_to=self.name)

    async def resync(self, request_id: str, attempt: int, *, retake: bool = False) -> int | None:
        self.check_up()
        record = self.records.get(request_id)
        if record is None:
            return attempt + 1
        if record.cancelled if record.owner == self.name else not retake:
            return None
        self._move(record)
        known = record.request.attempt
        if record.state == "done":
            del self.records[request_id]
        elif record.state == "lost" and known > attempt:
            return known
        record.change("lost", attempt=max(known, attempt) + 1)
        return record.request.attempt

    async def cancel(self, request_ids: Iterable[str], delivered: Mapping[str, int] | None = None) -> int:
        self.check_up()
        found = {request_id: (delivered or {}).get(request_id, 0) for request_id in request_ids}
        self.cancelled.update(found)
        known = [self.records[request_id] for request_id in found if request_id in self.records]
        live = [record for record in known if record.owner == self.name and record.state != "done"]
        for record in live:
            record.state, record.cancelled = "done", True
        return len(live)

    async def survey(self, attempts: Mapping[str, int]) -> dict[str, tuple[Any, int]]:
        self.check_up()
        self.surveys += 1
        known = {request_id: self.records.get(request_id) for request_id in attempts}
        return {
            request_id: ("missing", 0)
            if record is None
            else (record.state if record.owner == self.name else "moved", record.request.attempt)
            for request_id, record in known.items()
        }

    async def follow(self, last_id: str, block_ms: int) -> tuple[str, list[Result]]:
        self.check_up()
        position = int(last_id.removesuffix("-0"))
        if position == len(self.events) and block_ms:
            self._changed.clear()
            try:
                async with asyncio.timeout(block_ms / 1000):
                    await self._changed.wait()
            except TimeoutError:
                return last_id, []
            self.check_up()
        return f"{len(self.events)}-0", self.events[position:]

    async def look(self) -> list[WorkerInfo]:
        self.check_up()
        return self.live_workers

    async def restate(self, sequences: Iterable[tuple[GenerateRequest, array[int]]]) -> int:
        self.check_up()
        self.restated = [whole(request, prompt) for request, prompt in sequences]
        return 0


def _cancelled(request: GenerateRequest) -> TokenEvent:
    return TokenEvent(request_id=request.id, attempt=request.attempt, index=request.delivered, finish="cancelled")


def _joined(request: GenerateRequest, prompts: Prompts | None) -> GenerateRequest:
    """``request`` with its prompt, as a worker gets it."""
    return whole(request, (prompts or {})[request.prompt])


@dataclass
class ScriptedSwitch:
    """A switch whose workers do what is ordered after ``looks`` looks at them."""

    looks: int = 0
    ordered: int = 0

    async def order(self, level: int) -> int:
        self.ordered = max(level, self.ordered) if level else 0
        return self.ordered

    async def look(self) -> Sleep:
        self.looks -= 1
        state = self.ordered if self.looks < 0 else -1
        return Sleep(ordered=self.ordered, notes={"w": state})
