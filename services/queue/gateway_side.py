"""The gateway's side of the queue: requests go in, results come out.

In: :class:`GenerateRequest` from the API. Out: :class:`ResultEvent` lists in the order in which workers published them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from msgspec import structs
from redis.asyncio import Redis

from services.errors import Conflict
from services.messages import GenerateRequest, ResultEvent, WorkerInfo, decode_results, decode_worker, encode
from services.queue.admission import raise_refusal, tenant_arguments
from services.queue.keys import PRIORITIES, Keys
from services.queue.limits import QueueLimits, TenantLimits
from services.queue.scripts import Argument, Scripts, milliseconds
from services.queue.streams import FIRST_ID, StreamReader

__all__ = ["FIRST_ID", "GatewayQueue", "IdempotencyRecord", "QueueLimits", "RequestState", "TenantLimits"]

RequestState = Literal["queued", "claimed", "running", "lost", "done", "missing", "moved"]


@dataclass(frozen=True, kw_only=True, slots=True)
class IdempotencyRecord:
    """What an Idempotency-Key stands for. ``owner`` is the gateway that used the key before this call."""

    fresh: bool
    base_id: str
    seed: int
    owner: str


class GatewayQueue:
    """One gateway process's view of the queue. ``incarnation`` names its result stream and is never reused.

    Every method raises :class:`QueueUnavailable` while Redis does not answer; every method may then be repeated with
    the same arguments, whether or not the first call took effect.
    """

    def __init__(self, redis: Redis, keys: Keys, incarnation: str, limits: QueueLimits | None = None) -> None:
        self._incarnation = incarnation
        self._limits = limits or QueueLimits()
        self._scripts = Scripts(redis, keys, self._limits)
        self._results = StreamReader(redis, keys.results(incarnation))

    async def heartbeat(self, ttl_s: float, fingerprint: str | None = None) -> None:
        """Registers this gateway or renews its lease; call it every quarter of ``ttl_s``.

        When the lease has expired, a scheduler cancels this gateway's requests and writes their ends
        (``finish="cancelled"``) into the result stream. ``fingerprint`` claims the namespace for a model and raises
        FingerprintMismatch where live members serve another.
        """
        await self._scripts.run("gateway_heartbeat", self._incarnation, milliseconds(ttl_s), fingerprint or "")

    async def leave(self) -> None:
        """Ends the lease of a gateway that waits for nothing. One that has live requests keeps it until it expires,
        so that clients who come back can have them taken up; then the scheduler cancels them.
        """
        await self._scripts.run("gateway_leave", self._incarnation)

    async def admit(
        self, requests: Sequence[GenerateRequest], *, timeout_s: float, tenant_limits: TenantLimits | None = None
    ) -> list[GenerateRequest]:
        """Puts ``requests`` (one tenant's) into the queue, all or none; returned with attempt and deadline set.

        An id that Redis already knows is left as it is and counts as admitted. Raises QueueFull, RateLimited or
        ConcurrencyLimited with ``retry_after_s`` in 1..120.
        """
        if not requests:
            return []
        tenant = requests[0].tenant
        assert all(
            r.tenant == tenant and r.reply_to == self._incarnation and r.priority in PRIORITIES for r in requests
        )
        assert len({r.id for r in requests}) == len(requests)
        items = [(r.id, r.priority, r.cost, r.sampling.max_tokens, r.delivered, encode(r)) for r in requests]
        head = (tenant, self._incarnation, milliseconds(timeout_s), *tenant_arguments(tenant_limits))
        reply = await self._scripts.run("admit", *head, *(value for item in items for value in item))
        raise_refusal(reply, len(requests))
        pairs = zip(reply[1::2], reply[2::2], strict=True)
        return [
            structs.replace(request, attempt=attempt, deadline_ms=deadline)
            for request, (attempt, deadline) in zip(requests, pairs, strict=True)
        ]

    async def charge(self, tenant: str, limits: TenantLimits) -> None:
        """Counts a request that has come against the tenant's rate, whatever becomes of it; :meth:`admit` counts what
        it has beyond one sequence. Raises RateLimited."""
        _, interval_ms, burst = tenant_arguments(limits)
        raise_refusal(await self._scripts.run("charge", tenant, interval_ms, burst), 1)

    async def resubmit(self, request: GenerateRequest) -> bool:
        """Queues the attempt that AttemptLost or :meth:`resync` named, at the request's original place.

        ``request.token_ids`` is the prompt and all tokens delivered so far. A record that Redis lost is admitted anew,
        past the bounds. False: cancelled, ended, taken up by another gateway, or a later attempt exists.
        """
        reply = await self._scripts.run(
            "resubmit",
            *(request.id, request.attempt, self._incarnation, request.tenant, request.priority, request.cost),
            *(request.sampling.max_tokens, request.delivered, request.deadline_ms, encode(request)),
        )
        return bool(reply)

    async def take_up(
        self, request: GenerateRequest, *, timeout_s: float, tenant_limits: TenantLimits | None = None
    ) -> GenerateRequest:
        """Moves a request to this gateway: its client came back with the same Idempotency-Key.

        If no token was published it keeps its attempt and its place. Otherwise it starts from scratch as a later
        attempt (at its place if it is live, as a new admission under the limits if it ended or is unknown). The old
        gateway's stream gets ``finish="cancelled"``; a worker that ran it gets Cancel. Raises as :meth:`admit`.
        """
        assert request.delivered == 0
        reply = await self._scripts.run(
            "take_up",
            *(request.id, self._incarnation, milliseconds(timeout_s), *tenant_arguments(tenant_limits)),
            *(request.tenant, request.priority, request.cost, request.sampling.max_tokens, encode(request)),
        )
        raise_refusal(reply, 1)
        return structs.replace(request, attempt=reply[1], deadline_ms=reply[2], reply_to=self._incarnation)

    async def resync(self, request_id: str, attempt: int, *, retake: bool = False) -> int | None:
        """Ends ``attempt``, of which events are missing, and names the attempt to :meth:`resubmit` as.

        For a gap in TokenEvent.index, or a request that :meth:`survey` calls done though no end arrived. Not counted
        as a failure. None: the request was cancelled or is another gateway's; ``retake`` moves it from there to here.
        """
        attempt = await self._scripts.run("resync", request_id, attempt, self._incarnation, int(retake))
        return attempt or None

    async def cancel(self, request_ids: Iterable[str], delivered: Mapping[str, int] | None = None) -> int:
        """Ends requests of this gateway: queued ones leave the queue, a worker that runs one gets Cancel.

        No event follows. Ids that are unknown, ended or another gateway's are skipped; the number of the others is
        returned. ``delivered`` (tokens that the client got) lets the tenant be refunded for the rest.
        """
        known = delivered or {}
        items: list[tuple[Argument, ...]] = [(request_id, known.get(request_id, -1)) for request_id in request_ids]
        return sum(await self._scripts.run_chunks("cancel", (self._incarnation,), items))

    async def survey(self, attempts: Mapping[str, int]) -> dict[str, tuple[RequestState, int]]:
        """State and attempt of requests that this gateway waits for; repairs index entries that Redis lost.

        Call it when Redis comes back and every few lease periods. What to do with the answer, ``mine`` being the
        attempt that the gateway waits for:

        - ``missing``: :meth:`resubmit` with attempt ``mine``.
        - ``lost``: resubmit with the record's attempt.
        - ``queued``, ``claimed``, ``running`` with a lower attempt than ``mine``: resubmit with attempt ``mine``.
        - ``done`` in two surveys in a row without an end in the stream: :meth:`resync`, then resubmit.
        - ``moved``: it is another gateway's. If that took it up, "cancelled" is in the stream. In two surveys in a row
          without it: Redis lost the move to this gateway; :meth:`resync` with ``retake``, then resubmit.
        """
        items: list[tuple[Argument, ...]] = [(request_id,) for request_id in attempts]
        replies = await self._scripts.run_chunks("survey", (self._incarnation,), items)
        flat = [value for reply in replies for value in reply]
        return {
            request_id: (cast(RequestState, state.decode()), attempt)
            for request_id, state, attempt in zip(attempts, flat[::2], flat[1::2], strict=True)
        }

    async def claim_idempotency(
        self, tenant: str, key: str, fingerprint: str, base_id: str, seed: int
    ) -> IdempotencyRecord:
        """Binds ``key`` to (``base_id``, ``seed``), or returns what it is bound to (then ``fresh`` is False).

        Raises Conflict where the key was used with another body ``fingerprint``. This gateway becomes the owner.
        """
        suffix = f"{tenant}:{hashlib.sha256(key.encode()).hexdigest()}"
        ttl_ms = milliseconds(self._limits.idempotency_s)
        reply = await self._scripts.run("idempotency", suffix, fingerprint, base_id, seed, self._incarnation, ttl_ms)
        fresh, known, base, drawn, owner = reply
        if known.decode() != fingerprint:
            raise Conflict("The Idempotency-Key was used with another body.", hint="Use a new key for a new request.")
        return IdempotencyRecord(fresh=bool(fresh), base_id=base.decode(), seed=int(drawn), owner=owner.decode())

    async def follow(self, last_id: str, block_ms: int) -> tuple[str, list[ResultEvent]]:
        """Events after ``last_id`` (:data:`FIRST_ID` at the start), waiting up to ``block_ms`` for the first.

        Passing an id back says that everything up to it is handled; it may then be trimmed. Events of one request come
        in order; an event of a request that the gateway does not know should be answered with :meth:`cancel`.
        Ends that the queue itself wrote (errors, cancelled) carry the ``index`` of the attempt's first token, whatever
        was delivered since: do not look for gaps there.
        """
        last_id, entries = await self._results.read(last_id, block_ms)
        return last_id, [event for fields in entries for data in fields.values() for event in decode_results(data)]

    async def workers(self) -> list[WorkerInfo]:
        """Workers whose lease is live."""
        return [decode_worker(row[0]) for row in await self._scripts.run("workers")]
