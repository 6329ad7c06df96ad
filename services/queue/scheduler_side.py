"""The scheduler's side of the queue. Claims in fair order come in; assignments, and repairs of what was lost, go out.

Every call that changes something carries the leader's epoch. It raises :class:`StaleLeader`, having changed nothing,
once another leader was elected.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec
from msgspec import structs
from redis.asyncio import Redis

from services.errors import ErrorInfo, InternalError, UnreadableMessage
from services.messages import Assign, GenerateRequest, WorkerInfo, decode_request, decode_worker, encode
from services.queue.connect import MAX_BLOCK_MS, command
from services.queue.fates import Fate, fates_of
from services.queue.keys import Keys
from services.queue.limits import QueueLimits
from services.queue.prompts import HEAD_TOKENS, PromptReader, unpack_ids
from services.queue.quarantine import Quarantine
from services.queue.scripts import Argument, Scripts, milliseconds, parts
from services.wire import NAMED_PROMPTS

LINE_READ, LINES_READ = 64, 1024
"""How many requests of a line, and of all lines, are read to count the tokens that wait: Redis serves nobody else
meanwhile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerState:
    """A live worker and how much of its credit is in use. Tokens are prompt + max_tokens of unfinished requests."""

    info: WorkerInfo
    outstanding_tokens: int
    outstanding_requests: int
    credit_tokens: int
    credit_requests: int
    unproven: int = 0
    """Its requests that are unproven: most have no token yet. Counted while there are suspects."""
    guarded: bool = False
    """Whether one of those is a suspect, which runs alone."""

    def has_credit(self, cost: int) -> bool:
        """Says whether :meth:`SchedulerQueue.assign` would accept a request of ``cost`` tokens."""
        idle = self.outstanding_requests == 0
        return self.outstanding_requests < self.credit_requests and (
            idle or self.outstanding_tokens + cost <= self.credit_tokens
        )


@dataclass(frozen=True, slots=True)
class Claim:
    """A request that the leader took out of the queue. ``head`` is the beginning of its prompt. ``suspect`` says that
    its last worker died before it had sent a token of the request, or that several workers died."""

    request: GenerateRequest
    head: Sequence[int]
    suspect: bool = False


@dataclass(frozen=True, slots=True)
class Assignment:
    """The outcome of one assignment; true if the request was assigned."""

    queued_s: float | None
    """How long the request had waited in the queue; None if it was not assigned."""

    def __bool__(self) -> bool:
        return self.queued_s is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReapReport:
    """What one :meth:`SchedulerQueue.reap` did, in requests unless said otherwise."""

    expired: int = 0
    """Ended with DeadlineExceeded in the queue."""
    requeued: int = 0
    """Claims that went back into the queue: of an older epoch, or of a leader that forgot them."""
    lost: int = 0
    """Attempts for which AttemptLost was written."""
    dead: int = 0
    """Moved to the dead-letter list."""
    abandoned: int = 0
    """Lost attempts that no gateway resubmitted in time, ended."""
    cancelled: int = 0
    """Requests of dead gateways."""
    workers: int = 0
    """Dead workers removed."""
    gateways: int = 0
    """Dead gateways removed."""
    held: bool = False
    """Whether reclaiming of leases is on hold, because Redis was away."""
    more: bool = False
    """Whether the bound on work was reached: call again soon."""
    fates: Sequence[Fate] = ()
    """Each request counted above but those that went back into the queue."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueDepth:
    requests: int
    tokens: int
    dead_letters: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """The requests of one tenant and priority in the queue. ``tokens`` of a long line are estimated."""

    priority: int
    tenant: str
    requests: int
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """What waits in the queue. ``oldest_s``: the longest wait of a request that is first in its line."""

    oldest_s: float
    lines: list[Line]


class SchedulerQueue:
    """A scheduler's view of the queue. All methods raise QueueUnavailable while Redis does not answer."""

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        limits: QueueLimits | None = None,
        *,
        quarantine: Quarantine | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._scripts = Scripts(redis, keys, limits or QueueLimits())
        self._quarantine = quarantine or Quarantine()
        self._token = ""
        self._lease_s = (limits or QueueLimits()).lease_s
        self._clock = clock
        self._asked = -math.inf  # when it asked for the lock last
        self._reads: dict[str, int] = {}  # the version that each worker reads, at the last look

    async def campaign(self, token: str, ttl_s: float) -> int | None:
        """Takes the leader's lock if it is free (or ours) and returns the new epoch, else None. Epochs only rise.

        Raises VersionMismatch where live members read nothing that this one writes, unless it asked less than a lease
        ago: no such member can have come since.
        """
        again = self._clock() - self._asked < self._lease_s
        epoch = await self._scripts.run("campaign", token, milliseconds(ttl_s), int(again))
        self._asked = self._clock()
        if not epoch:
            return None
        self._token = token
        return int(epoch)

    async def renew(self, epoch: int, ttl_s: float) -> bool:
        """Renews the lock; False if this epoch does not lead any more."""
        return bool(await self._scripts.run("renew", epoch, self._token, milliseconds(ttl_s)))

    async def resign(self, epoch: int) -> None:
        """Gives the lock up. Claims go back into the queue when the next leader reaps."""
        await self._scripts.run("renew", epoch, self._token, 0)

    async def wait_for_work(self, timeout_s: float) -> bool:
        """Sleeps until a request was admitted or ended, or a worker came; False after ``timeout_s``. Leader only."""
        seconds = max(min(timeout_s, MAX_BLOCK_MS / 1000), 0.001)  # 0 would block forever
        return await command(self._redis, "BLPOP", self._keys.wake, seconds) is not None

    async def claim(self, epoch: int, max_requests: int, max_tokens: int | None = None) -> list[Claim]:
        """Takes requests out of the queue in fair order, under a lease of the leader.

        Strict between priorities; deficit round-robin over tokens between tenants; deadline and then admission order
        within a tenant. ``max_tokens`` bounds their cost, but one request is always taken.
        """
        rows = await self._scripts.run("claim", epoch, max_requests, max_tokens or 0)
        claims: list[Claim] = []
        heads: dict[str, Sequence[int]] = {}
        for request_id, body, attempt, deadline_ms, reply_to, head, suspect, queued_ms in rows:
            try:
                request = decode_request(body)
            except UnreadableMessage as error:
                await self._end_unreadable(epoch, request_id.decode(), error, body)
                continue
            if head:
                heads[request.prompt] = unpack_ids(head)
            known = heads.get(request.prompt, ()) if request.prompt else request.token_ids[:HEAD_TOKENS]
            granted = {"attempt": attempt, "deadline_ms": deadline_ms, "queued_ms": queued_ms}
            taken = structs.replace(request, reply_to=reply_to.decode(), **granted)
            claims.append(Claim(taken, known, suspect == b"1"))
        return claims

    async def _end_unreadable(self, epoch: int, request_id: str, error: UnreadableMessage, body: bytes) -> None:
        """Ends a claimed request that a gateway of another version wrote: every leader would fail on it."""
        await self._quarantine.put("request", request_id, error, body)
        info = InternalError(f"The scheduler cannot read the request: {error}", hint="Run one version everywhere.")
        await self._scripts.run("release", epoch, msgspec.msgpack.encode(info.info()), request_id)

    async def assign(self, epoch: int, pairs: Sequence[tuple[GenerateRequest, str]]) -> list[Assignment]:
        """Moves leases to workers and writes Assign into their inboxes, with one answer per pair. Workers of an earlier
        release get the prompt itself instead of its name.

        False: the request is back at its place, because the worker's lease or credit is gone or a suspect has to run
        alone; or the request is gone (cancelled, taken up, its claim expired). Either way the scheduler forgets it.
        """
        if any(worker_id not in self._reads for _, worker_id in pairs):
            await self.workers()
        answers: list[Assignment] = []
        prompts = PromptReader(self._redis, self._keys)
        for part in parts([await self._assign_row(*pair, prompts) for pair in pairs]):
            reply = await self._scripts.run("assign", epoch, *(value for row in part for value in row))
            answers += [Assignment(None if ms < 0 else ms / 1000) for ms in reply]
        return answers

    async def _assign_row(
        self, request: GenerateRequest, worker_id: str, prompts: PromptReader
    ) -> tuple[Argument, ...]:
        """Returns one pair's arguments. A worker refuses a request whose prompt is nowhere; its gateway resends it."""
        if self._reads.get(worker_id, NAMED_PROMPTS) < NAMED_PROMPTS:
            with suppress(UnreadableMessage):
                request = await prompts.whole(request)
        return request.id, request.attempt, worker_id, encode(Assign(request))

    async def release(self, epoch: int, requests: Sequence[GenerateRequest]) -> None:
        """Puts claimed requests back at their places and restores their tenants' deficits."""
        items: list[tuple[Argument, ...]] = [(request.id,) for request in requests]
        await self._scripts.run_chunks("release", (epoch, ""), items)

    async def fail(self, epoch: int, request: GenerateRequest, error: ErrorInfo) -> bool:
        """Ends a claimed request with ``error`` (say, no worker could ever hold it); False if it is gone."""
        return bool(await self._scripts.run("release", epoch, msgspec.msgpack.encode(error), request.id))

    async def workers(self) -> list[WorkerState]:
        """Returns the workers whose lease is live and whose record can be read; other workers get nothing to do."""
        states: list[WorkerState] = []
        self._reads.clear()
        rows = await self._scripts.run("workers")
        for worker_id, data, tokens, requests, credit_tokens, credit_requests, unproven, guarded in rows:
            try:
                info = decode_worker(data)
            except UnreadableMessage as error:
                await self._quarantine.put("worker", worker_id.decode(errors="replace"), error, data)
                continue
            self._reads[info.id] = info.wire
            states.append(
                WorkerState(
                    info=info,
                    outstanding_tokens=tokens,
                    outstanding_requests=requests,
                    credit_tokens=credit_tokens,
                    credit_requests=credit_requests,
                    unproven=unproven,
                    guarded=bool(guarded),
                )
            )
        return states

    async def reap(self, epoch: int, max_items: int = 256) -> ReapReport:
        """Ends what expired and takes back what was lost, up to ``max_items`` of each kind.

        It handles deadlines in the queue and claims of older epochs at any time; leases of requests, workers and
        gateways only while no hold is on. A hold of one lease period starts by itself when the Redis server's run id
        changes, or when nobody has called this for two thirds of a lease: the server may have stood still.
        """
        expired, stale_claims, more_queue, of_queue = await self._scripts.run("reap_queue", epoch, max_items)
        removed, lost_workers, dead_workers, more_workers, of_workers = await self._scripts.run(
            "reap_workers", epoch, max_items
        )
        held, claims, lost, dead, abandoned, more, of_leases = await self._scripts.run("reap_leases", epoch, max_items)
        gateways, cancelled, more_gateways, of_gateways = await self._scripts.run("reap_gateways", epoch, max_items)
        return ReapReport(
            expired=expired,
            requeued=stale_claims + claims,
            lost=lost_workers + lost,
            dead=dead_workers + dead,
            abandoned=abandoned,
            cancelled=cancelled,
            workers=removed,
            gateways=gateways,
            held=bool(held),
            more=bool(more_queue or more_workers or more or more_gateways),
            fates=[*fates_of(of_queue), *fates_of(of_workers), *fates_of(of_leases), *fates_of(of_gateways)],
        )

    async def hold_reclaims(self, for_s: float) -> None:
        """Keeps leases from being reclaimed for at least ``for_s`` seconds; call it after a connection error."""
        await self._scripts.run("hold", milliseconds(for_s))

    async def waiting(self) -> Waiting:
        """Returns the lines in the queue, for metrics."""
        longest_ms, lines = await self._scripts.run("waiting", LINE_READ, LINES_READ)
        return Waiting(
            oldest_s=longest_ms / 1000,
            lines=[
                Line(priority=priority, tenant=tenant.decode(errors="replace"), requests=requests, tokens=tokens)
                for priority, tenant, requests, tokens in lines
            ],
        )

    async def sleep_level(self) -> int:
        """Returns how deeply the model is to sleep; 0: it is to be awake."""
        return int(await command(self._redis, "GET", self._keys.sleep) or 0)

    async def depth(self) -> QueueDepth:
        """Returns how much waits, for metrics."""
        stats = await command(self._redis, "HMGET", self._keys.stats, "requests", "tokens")
        dead = await command(self._redis, "ZCARD", self._keys.dead)
        return QueueDepth(requests=int(stats[0] or 0), tokens=int(stats[1] or 0), dead_letters=int(dead))
