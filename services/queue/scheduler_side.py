"""The scheduler's side of the queue: leadership, claims in fair order, assignment, and repair of what was lost.

Every call that changes something carries the leader's epoch and raises :class:`StaleLeader`, having changed nothing,
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
from services.queue.keys import Keys
from services.queue.limits import QueueLimits
from services.queue.prompts import HEAD_TOKENS, PromptReader, unpack_ids
from services.queue.quarantine import Quarantine
from services.queue.scripts import Argument, Scripts, milliseconds, parts
from services.wire import NAMED_PROMPTS


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerState:
    """A live worker and how much of its credit is in use. Tokens are prompt + max_tokens of unfinished requests."""

    info: WorkerInfo
    outstanding_tokens: int
    outstanding_requests: int
    credit_tokens: int
    credit_requests: int
    unproven: int = 0
    """Requests that have not got on under it: most have no token. Counted while there are suspects."""
    guarded: bool = False
    """One of those is a suspect, which runs alone."""

    def has_credit(self, cost: int) -> bool:
        """Whether :meth:`SchedulerQueue.assign` would accept a request of ``cost`` tokens."""
        idle = self.outstanding_requests == 0
        return self.outstanding_requests < self.credit_requests and (
            idle or self.outstanding_tokens + cost <= self.credit_tokens
        )


@dataclass(frozen=True, slots=True)
class Claim:
    """A request that the leader took out of the queue. ``head``: how its prompt begins, as far as that is of use.
    ``suspect``: its last worker died before it had sent a token of it, or several did."""

    request: GenerateRequest
    head: Sequence[int]
    suspect: bool = False


@dataclass(frozen=True, slots=True)
class Assignment:
    """The outcome of one assignment; true if it was made."""

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
    """Claims of an older epoch or of a leader that forgot them, back in the queue."""
    lost: int = 0
    """AttemptLost was written."""
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
    """Reclaiming of leases is on hold, because Redis was away."""
    more: bool = False
    """The bound on work was reached: call again soon."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueDepth:
    requests: int
    tokens: int
    dead_letters: int


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
        self._asked = -math.inf  # for the lock, last
        self._reads: dict[str, int] = {}  # versions, by worker, at the last look

    async def campaign(self, token: str, ttl_s: float) -> int | None:
        """Takes the leader's lock if it is free (or ours); the new epoch, or None. Epochs only rise, by Redis TIME.

        Raises VersionMismatch where live members read nothing that this one writes, unless it asked less than a lease
        ago: then they cannot be.
        """
        again = self._clock() - self._asked < self._lease_s
        epoch = await self._scripts.run("campaign", token, milliseconds(ttl_s), int(again))
        self._asked = self._clock()
        if not epoch:
            return None
        self._token = token
        return int(epoch)

    async def renew(self, epoch: int, ttl_s: float) -> bool:
        """Prolongs the lock; False if this epoch does not lead any more."""
        return bool(await self._scripts.run("renew", epoch, self._token, milliseconds(ttl_s)))

    async def resign(self, epoch: int) -> None:
        """Gives the lock up; claims go back when the next leader reaps."""
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
        for request_id, body, attempt, deadline_ms, reply_to, head, suspect in rows:
            try:
                request = decode_request(body)
            except UnreadableMessage as error:
                await self._end_unreadable(epoch, request_id.decode(), error, body)
                continue
            if head:
                heads[request.prompt] = unpack_ids(head)
            known = heads.get(request.prompt, ()) if request.prompt else request.token_ids[:HEAD_TOKENS]
            taken = structs.replace(request, attempt=attempt, deadline_ms=deadline_ms, reply_to=reply_to.decode())
            claims.append(Claim(taken, known, suspect == b"1"))
        return claims

    async def _end_unreadable(self, epoch: int, request_id: str, error: UnreadableMessage, body: bytes) -> None:
        """A gateway of another version wrote it: it ends here, or every leader would stumble over it."""
        await self._quarantine.put("request", request_id, error, body)
        info = InternalError(f"The scheduler cannot read the request: {error}", hint="Run one version everywhere.")
        await self._scripts.run("release", epoch, msgspec.msgpack.encode(info.info()), request_id)

    async def assign(self, epoch: int, pairs: Sequence[tuple[GenerateRequest, str]]) -> list[Assignment]:
        """Moves leases to workers and writes Assign into their inboxes, one answer per pair. Workers that cannot read
        how a request names its prompt get the prompt itself.

        False: the worker's lease or credit is gone, or one that it has or this one is to run alone, and the request is
        back at its place; or the request itself is gone
        (cancelled, taken up, its claim expired). Either way the scheduler forgets it.
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
        """Without its prompt, where that is nowhere: the worker refuses it, and its gateway sends it again."""
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
        """Workers whose lease is live. One whose record cannot be read gets nothing to do."""
        states: list[WorkerState] = []
        self._reads.clear()
        for worker_id, info, *counts in await self._scripts.run("workers"):
            try:
                states.append(_worker_state(decode_worker(info), *counts))
                self._reads[states[-1].info.id] = states[-1].info.wire
            except UnreadableMessage as error:
                await self._quarantine.put("worker", worker_id.decode(errors="replace"), error, info)
        return states

    async def reap(self, epoch: int, max_items: int = 256) -> ReapReport:
        """Ends what expired and takes back what was lost, up to ``max_items`` of each kind.

        Deadlines in the queue and claims of older epochs at any time; leases of requests, workers and gateways only
        while no hold is on. A hold of one lease period starts by itself when the Redis server's run id changes, or
        when nobody has called this for two thirds of a lease: the server may have stood still.
        """
        expired, stale_claims, more_queue = await self._scripts.run("reap_queue", epoch, max_items)
        removed, lost_workers, dead_workers, more_workers = await self._scripts.run("reap_workers", epoch, max_items)
        held, claims, lost, dead, abandoned, more = await self._scripts.run("reap_leases", epoch, max_items)
        gateways, cancelled, more_gateways = await self._scripts.run("reap_gateways", epoch, max_items)
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
        )

    async def hold_reclaims(self, for_s: float) -> None:
        """No lease is reclaimed for ``for_s`` seconds: call it after a connection error. Never shortens a hold."""
        await self._scripts.run("hold", milliseconds(for_s))

    async def depth(self) -> QueueDepth:
        """What waits, for metrics."""
        stats = await command(self._redis, "HMGET", self._keys.stats, "requests", "tokens")
        dead = await command(self._redis, "ZCARD", self._keys.dead)
        return QueueDepth(requests=int(stats[0] or 0), tokens=int(stats[1] or 0), dead_letters=int(dead))


def _worker_state(
    info: WorkerInfo,
    outstanding_tokens: int,
    outstanding_requests: int,
    credit_tokens: int,
    credit_requests: int,
    unproven: int,
    guarded: int,
) -> WorkerState:
    return WorkerState(
        info=info,
        outstanding_tokens=outstanding_tokens,
        outstanding_requests=outstanding_requests,
        credit_tokens=credit_tokens,
        credit_requests=credit_requests,
        unproven=unproven,
        guarded=bool(guarded),
    )
