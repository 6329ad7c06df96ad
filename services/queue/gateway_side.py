"""The gateway's side of the queue. In: :class:`GenerateRequest` from the API. Out: lists of :class:`Result` in the
order in which workers published them.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from msgspec import structs
from redis.asyncio import Redis

from services.errors import UnreadableMessage
from services.messages import (
    GenerateRequest,
    ResultEvent,
    WorkerInfo,
    decode_results,
    decode_worker,
)
from services.queue.admission import IdempotencyKey, KeyBound, binding, bound_already, raise_refusal, tenant_arguments
from services.queue.keys import PRIORITIES, Keys
from services.queue.limits import QueueLimits, TenantLimits
from services.queue.prompts import PromptStore
from services.queue.quarantine import Quarantine
from services.queue.scripts import Argument, Scripts, items, milliseconds, parts, pieces
from services.queue.streams import FIRST_ID, StreamReader
from services.wire import NAMED_PROMPTS, OLDEST_WIRE

__all__ = ["FIRST_ID", "GatewayQueue", "IdempotencyKey", "KeyBound", "QueueLimits", "RequestState", "TenantLimits"]

RequestState = Literal["queued", "claimed", "running", "lost", "done", "missing", "moved"]


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Events of a request that this gateway cannot read, so that later events come with a gap. ``reason`` says why."""

    request_id: str
    reason: str


Result = ResultEvent | Unreadable
READ_STEPS = 8
"""Workers' steps in one read, each with hundreds of events: the event loop serves nobody else while it decodes them,
and workers see by a gateway's reads that it does not lag."""
Prompts = Mapping[str, "array[int]"]


class GatewayQueue:
    """One gateway process's view of the queue. ``incarnation`` names its result stream and is never reused.

    Every method raises :class:`QueueUnavailable` while Redis does not answer; every method may then be repeated with
    the same arguments, whether or not the first call took effect.
    """

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        incarnation: str,
        limits: QueueLimits | None = None,
        *,
        quarantine: Quarantine | None = None,
    ) -> None:
        self._incarnation = incarnation
        self._limits = limits or QueueLimits()
        self._scripts = Scripts(redis, keys, self._limits)
        self._results = StreamReader(
            redis,
            keys.results(incarnation),
            trim_bytes=self._limits.lag_bytes // 4,
            count=READ_STEPS,
            position=keys.handled(incarnation),
        )
        self._quarantine = quarantine or Quarantine()
        self._by_name = False  # whether all readers of records find a prompt by its name: see look()
        self._claimed, self._claimed_at = "", 0.0  # the fingerprint of the last heartbeat that Redis got, and when
        self._old_readers = False  # whether a reader is known that does not

    async def heartbeat(self, ttl_s: float, fingerprint: str | None = None) -> None:
        """Registers this gateway or renews its lease; call it every quarter of ``ttl_s``.

        When the lease has expired, a scheduler cancels this gateway's requests and writes their ends
        (``finish="cancelled"``) into the result stream. ``fingerprint`` claims the namespace for a model. A claim that
        is the first in two leases raises FingerprintMismatch where live members serve another model; a later claim
        overwrites another model, which no member can have written.
        """
        claim, began = fingerprint or "", time.monotonic()
        age_ms = round(1000 * (began - self._claimed_at)) if claim and claim == self._claimed else -1
        await self._scripts.run("gateway_heartbeat", self._incarnation, milliseconds(ttl_s), claim, age_ms)
        self._claimed, self._claimed_at = claim, began

    async def leave(self) -> None:
        """Ends the lease of a gateway that waits for nothing. A gateway with live requests keeps its lease until it
        expires, so that clients can return to them at another gateway; then the scheduler cancels them.
        """
        await self._results.close()
        await self._scripts.run("gateway_leave", self._incarnation)

    async def admit(
        self,
        requests: Sequence[GenerateRequest],
        *,
        timeout_s: float,
        tenant_limits: TenantLimits | None = None,
        key: IdempotencyKey | None = None,
        prompts: Prompts | None = None,
    ) -> list[GenerateRequest]:
        """Puts ``requests`` of one tenant into the queue, all or none; returns them with attempt and deadline set.

        ``prompts`` has the prompts that the requests name (:func:`services.queue.prompts.prompt_name`); a request that
        names none holds its own. An id that Redis already knows counts as admitted and is left as it is. Many or long
        requests take several calls; the first reserves room for the others. Where a later call raises QueueUnavailable,
        cancel all requests or repeat.

        Raises:
            QueueFull, RateLimited, ConcurrencyLimited: with ``retry_after_s`` in 1..120.
            KeyBound: ``key`` is bound to a request of the same fingerprint already; this gateway owns it now.
            Conflict: ``key`` is bound to a request of another fingerprint.
        """
        if not requests:
            return []
        tenant = requests[0].tenant
        assert all(
            r.tenant == tenant and r.reply_to == self._incarnation and r.priority in PRIORITIES for r in requests
        )
        assert len({r.id for r in requests}) == len(requests)
        head = (tenant, self._incarnation, milliseconds(timeout_s), *tenant_arguments(tenant_limits))
        store, by_name = PromptStore(prompts), self._by_name
        later, tokens = len(requests), sum(request.cost for request in requests)
        bound = binding(tenant, key)
        admitted: list[GenerateRequest] = []
        for piece in pieces(store.stored(request, by_name=by_name) for request in requests):
            later, tokens = later - len(piece), tokens - sum(stored.request.cost for stored in piece)
            reply = await self._scripts.run("admit", *head, later, tokens, requests[0].id, *bound, *items(piece))
            if reply[0] == b"key":
                raise bound_already(key, *reply[1:])
            raise_refusal(reply, len(requests))
            for stored, attempt, deadline in zip(piece, reply[1::2], reply[2::2], strict=True):
                admitted.append(structs.replace(stored.request, attempt=attempt, deadline_ms=deadline))
        return admitted

    async def charge(self, tenant: str, limits: TenantLimits) -> None:
        """Counts a request against the tenant's rate when it comes, whatever becomes of it; :meth:`admit` counts its
        sequences beyond the first. Raises RateLimited."""
        _, interval_ms, burst = tenant_arguments(limits)
        raise_refusal(await self._scripts.run("charge", tenant, interval_ms, burst), 1)

    async def resubmit(self, request: GenerateRequest, prompts: Prompts | None = None, *, by_name: bool = True) -> bool:
        """Queues the attempt that AttemptLost or :meth:`resync` named, at the request's original place.

        ``request.token_ids`` ends with all tokens delivered so far. A record that Redis lost is admitted again, past
        the bounds. With ``by_name`` False the record holds the prompt itself. Returns False where the request was
        cancelled, ended, taken up by another gateway, or has a later attempt.
        """
        stored = PromptStore(prompts).stored(request, by_name=by_name and self._by_name)
        arguments = (
            *(request.id, request.attempt, self._incarnation, request.tenant, request.priority, request.cost),
            *(request.sampling.max_tokens, request.delivered, request.deadline_ms, stored.body, stored.name),
        )
        reply = await self._scripts.run("resubmit", *arguments, b"")
        if reply < 0:
            reply = await self._scripts.run("resubmit", *arguments, stored.ids)
        return bool(reply)

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
        """Moves a request to this gateway, because its client returned with the same Idempotency-Key. The request is
        number ``place`` (from 0) ``of`` the sequences that came together; :meth:`charge` counted the first of them.

        A request without a published token keeps its attempt and place. Any other starts from scratch as a later
        attempt: at its place if it is live, else as a new admission under the limits, which counts against the tenant's
        rate unless it is the first. The former gateway's stream gets ``finish="cancelled"``; a worker that ran the
        request gets Cancel. Raises as :meth:`admit`.
        """
        assert request.delivered == 0
        stored = PromptStore(prompts).stored(request, by_name=self._by_name)
        arguments = (
            *(request.id, self._incarnation, milliseconds(timeout_s), *tenant_arguments(tenant_limits)),
            *(request.tenant, request.priority, request.cost, request.sampling.max_tokens, stored.body, stored.name),
        )
        reply = await self._scripts.run("take_up", *arguments, b"", place, of)
        if reply[0] == b"prompt":
            reply = await self._scripts.run("take_up", *arguments, stored.ids, place, of)
        raise_refusal(reply, 1)
        return structs.replace(request, attempt=reply[1], deadline_ms=reply[2], reply_to=self._incarnation)

    async def resync(self, request_id: str, attempt: int, *, retake: bool = False) -> int | None:
        """Ends ``attempt``, whose events are missing, and returns the attempt to :meth:`resubmit` as.

        Call it for a gap in TokenEvent.index, or a request that :meth:`survey` calls done though no end arrived. No
        failure is counted. Returns None where the request was cancelled or is another gateway's; ``retake`` moves it
        from that gateway to this one.
        """
        attempt = await self._scripts.run("resync", request_id, attempt, self._incarnation, int(retake))
        return attempt or None

    async def cancel(self, request_ids: Iterable[str], delivered: Mapping[str, int] | None = None) -> int:
        """Ends requests of this gateway: queued ones leave the queue, a worker that runs one gets Cancel.

        No event follows. Returns how many requests ended; ids that are unknown, ended or another gateway's are skipped.
        ``delivered`` (tokens that the client got) lets the tenant be refunded for the rest.
        """
        known = delivered or {}
        each: list[tuple[Argument, ...]] = [(request_id, known.get(request_id, -1)) for request_id in request_ids]
        return sum(await self._scripts.run_chunks("cancel", (self._incarnation,), each))

    async def survey(self, attempts: Mapping[str, int]) -> dict[str, tuple[RequestState, int]]:
        """Returns the state and attempt of requests that this gateway waits for; repairs index entries that Redis lost.

        Call it when Redis comes back and every few lease periods. A gateway that waits for attempt ``mine`` answers:

        - ``missing``: :meth:`resubmit` with attempt ``mine``.
        - ``lost``: resubmit with the record's attempt.
        - ``queued``, ``claimed``, ``running`` with a lower attempt than ``mine``: resubmit with attempt ``mine``.
        - ``done`` in two surveys in a row without an end in the stream: :meth:`resync`, then resubmit.
        - ``moved``: another gateway has it. If that gateway took it up, "cancelled" is in the stream. In two surveys in
          a row without "cancelled" Redis lost the move to this gateway: :meth:`resync` with ``retake``, then resubmit.
        """
        each: list[tuple[Argument, ...]] = [(request_id,) for request_id in attempts]
        replies = await self._scripts.run_chunks("survey", (self._incarnation,), each)
        flat = [value for reply in replies for value in reply]
        return {
            request_id: (cast(RequestState, state.decode()), attempt)
            for request_id, state, attempt in zip(attempts, flat[::2], flat[1::2], strict=True)
        }

    async def follow(self, last_id: str, block_ms: int) -> tuple[str, list[Result]]:
        """Returns events after ``last_id`` (:data:`FIRST_ID` at the start), waiting up to ``block_ms`` for the first.

        Passing an id back says that everything up to it is handled; now and then this is reported to workers, and the
        stream is trimmed. Events of one request come in order; answer an event of an unknown request with
        :meth:`cancel`. Ends that the queue itself wrote (errors, cancelled) carry the ``index`` of the attempt's first
        token, whatever was delivered since: do not look for gaps there. Events that cannot be read come as
        :class:`Unreadable`.
        """
        last_id, entries = await self._results.read(last_id, block_ms)
        results: list[Result] = []
        for fields in entries:
            for name, data in fields.items():
                try:
                    results += decode_results(data)
                except UnreadableMessage as error:
                    results.append(await self._unreadable(name.decode(errors="replace"), error, data))
        return last_id, results

    async def _unreadable(self, request_id: str, error: UnreadableMessage, data: bytes) -> Unreadable:
        await self._quarantine.put("event", request_id, error, data)
        return Unreadable(request_id, error.message)

    async def look(self) -> list[WorkerInfo]:
        """Returns the workers whose lease is live; call it with each heartbeat. Requests are then written in a form
        that these workers and the leading scheduler can read. A worker with an unreadable record counts as of the
        oldest version.
        """
        wire, flat = await self._scripts.run("audience")
        workers, versions = [], [wire]
        for worker_id, info in zip(flat[::2], flat[1::2], strict=True):
            try:
                workers.append(decode_worker(info))
                versions.append(workers[-1].wire)
            except UnreadableMessage as error:
                await self._quarantine.put("worker", worker_id.decode(errors="replace"), error, info)
                versions.append(OLDEST_WIRE)
        self._by_name = min(versions) >= NAMED_PROMPTS
        self._old_readers = any(0 < version < NAMED_PROMPTS for version in versions)
        return workers

    async def restate(self, sequences: Iterable[tuple[GenerateRequest, array[int]]]) -> int:
        """Writes prompts into those records of ``sequences`` (requests and their prompts) that name them, so that no
        member of an earlier release gets a request without its prompt. Returns how many records it wrote. Call it after
        each :meth:`look`; it does nothing where all members find prompts by name.
        """
        if not self._old_readers:
            return 0
        known = {request.id: (request, prompt) for request, prompt in sequences}
        asked: list[tuple[Argument, ...]] = [(key, request.attempt, 0, b"") for key, (request, _) in known.items()]
        replies = await self._scripts.run_chunks("restate", (self._incarnation,), asked)
        named = [name for name, found in zip(known, (one for reply in replies for one in reply), strict=True) if found]
        written = 0
        for part in parts(_restated(*known[name]) for name in named):
            reply = await self._scripts.run("restate", self._incarnation, *(value for row in part for value in row))
            written += sum(reply)
        return written


def _restated(request: GenerateRequest, prompt: array[int]) -> tuple[Argument, ...]:
    stored = PromptStore({request.prompt: prompt}).stored(request, by_name=False)
    return request.id, request.attempt, request.delivered, stored.body
