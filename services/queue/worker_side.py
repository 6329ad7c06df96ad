"""An attention worker's side of the queue: assignments come in, tokens go out, leases are renewed.

The worker's id is its incarnation. All methods raise QueueUnavailable while Redis does not answer, and may be repeated
(:meth:`WorkerQueue.publish`, too: the gateway drops repeated tokens by their index).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from redis.asyncio import Redis

from services.errors import ErrorInfo, UnreadableMessage
from services.messages import (
    Assign,
    Cancel,
    GenerateRequest,
    InboxMessage,
    TokenEvent,
    WorkerInfo,
    claim_of,
    decode_inbox,
    encode,
)
from services.queue.connect import command
from services.queue.keys import Keys
from services.queue.limits import QueueLimits
from services.queue.prompts import PromptReader
from services.queue.quarantine import Quarantine
from services.queue.scripts import CHUNK, PIECE_BYTES, Argument, Scripts, milliseconds, parts
from services.queue.streams import FIRST_ID, StreamReader

__all__ = ["FIRST_ID", "WorkerQueue"]

log = logging.getLogger(__name__)


class WorkerQueue:
    """One or more workers' view of the queue.

    ``lagging`` has the gateways that lag (``QueueLimits.lag_s``) among those that the last :meth:`publish` wrote to,
    each with the id of the last entry that it has handled.
    """

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        limits: QueueLimits | None = None,
        *,
        quarantine: Quarantine | None = None,
    ) -> None:
        self.lagging: dict[str, str] = {}
        self._redis = redis
        self._keys = keys
        self._scripts = Scripts(redis, keys, limits or QueueLimits())
        self._quarantine = quarantine or Quarantine()
        self._registrations: dict[str, tuple[Argument, ...]] = {}
        self._inboxes: dict[str, StreamReader] = {}

    async def register(self, info: WorkerInfo, lease_s: float, *, credit_tokens: int, credit_requests: int) -> None:
        """Enters the registry under a lease. Credit bounds what the scheduler assigns: tokens (prompt + max_tokens;
        an idle worker takes one larger request) and requests. Raises FingerprintMismatch where live members serve
        another model.
        """
        registration = (info.id, milliseconds(lease_s), encode(info), claim_of(info), credit_tokens, credit_requests)
        await self._scripts.run("register", *registration)
        self._registrations[info.id] = registration

    async def heartbeat(self, worker_id: str, held: Mapping[str, int]) -> set[str]:
        """Renews the leases of the worker and of ``held`` (id -> attempt). Returns the ids that it has lost.

        Registers again by itself where Redis forgot the worker. Call it every quarter of the lease.
        """
        items: list[tuple[Argument, ...]] = list(held.items())
        refused: set[str] = set()
        for part in [items[start : start + CHUNK] for start in range(0, max(len(items), 1), CHUNK)]:
            reply = await self._renew(worker_id, part)
            refused |= {str(part[index][0]) for index in reply}
        return refused

    async def _renew(self, worker_id: str, items: list[tuple[Argument, ...]]) -> list[int]:
        arguments = (worker_id, *(value for item in items for value in item))
        reply: list[int] | None = await self._scripts.run("worker_heartbeat", *arguments)
        registration = self._registrations.get(worker_id)
        if reply is None and registration is not None:
            await self._scripts.run("register", *registration)
            reply = await self._scripts.run("worker_heartbeat", *arguments)
        return reply or []

    async def hand_back(self, worker_id: str, *, begun: bool = False) -> set[str]:
        """Puts requests of a draining worker that published nothing back at their places; with ``begun`` the others
        become AttemptLost, which counts as no failure. Returns their ids, for the worker to drop. Register the worker
        without credit first, or the requests come straight back.
        """
        return {request_id.decode() for request_id in await self._scripts.run("hand_back", worker_id, int(begun))}

    async def give_up(self, worker_id: str, attempts: Mapping[str, int], error: ErrorInfo) -> None:
        """Ends ``attempts`` (id -> attempt) that the worker cannot go on with, so that any worker may try again.

        Each counts as failed. Requests that published nothing go back to their places, others become AttemptLost; at
        the cap of attempts requests end with ``error``. The worker drops them before the call.
        """
        items: list[tuple[Argument, ...]] = list(attempts.items())
        await self._scripts.run_chunks("give_up", (worker_id, msgspec.msgpack.encode(error)), items)

    async def deregister(self, worker_id: str, suspects: Mapping[str, int] | None = None) -> None:
        """Leaves at once. Requests that published nothing go back to their places in the queue, others become
        AttemptLost; neither counts as a failure. Attempts in ``suspects`` (id -> attempt) may be why the worker ends:
        they are lost as if it had died, and dead-lettered at the cap of attempts.
        """
        self._registrations.pop(worker_id, None)  # first: a heartbeat on its way must not enter it again
        flat = [value for item in (suspects or {}).items() for value in item]
        await self._scripts.run("deregister", worker_id, *flat)
        if (inbox := self._inboxes.pop(worker_id, None)) is not None:
            await inbox.close()

    async def read_inbox(self, worker_id: str, last_id: str, block_ms: int) -> tuple[str, list[InboxMessage]]:
        """Returns messages after ``last_id`` (:data:`FIRST_ID` at the start), waiting up to ``block_ms`` for the first.
        Requests come with their prompts.

        Passing an id back says that everything up to it is handled; it may then be trimmed. A message that cannot be
        read, or a request whose prompt is missing, is left out: its lease expires, and it is sent again. A prompt is
        deleted when its last request ends, so a missing prompt is quarantined only while its request is live.
        """
        inbox = self._inboxes.get(worker_id)
        if inbox is None:
            inbox = self._inboxes[worker_id] = StreamReader(self._redis, self._keys.inbox(worker_id), trim_every=16)
        last_id, entries = await inbox.read(last_id, block_ms)
        prompts = PromptReader(self._redis, self._keys)
        messages = [await self._message(worker_id, fields.get(b"m", b""), prompts) for fields in entries]
        return last_id, [message for message in messages if message is not None]

    async def _message(self, worker_id: str, data: bytes, prompts: PromptReader) -> InboxMessage | None:
        try:
            message = decode_inbox(data)
        except UnreadableMessage as error:
            await self._quarantine.put("inbox", worker_id, error, data)
            return None
        if isinstance(message, Cancel):
            return message
        try:
            return Assign(await prompts.whole(message.request))
        except UnreadableMessage as error:
            if await self._runs(worker_id, message.request):
                await self._quarantine.put("inbox", message.request.id, error, data)
            return None

    async def _runs(self, worker_id: str, request: GenerateRequest) -> bool:
        """Says whether the worker still has to run this attempt."""
        record = await command(self._redis, "HMGET", self._keys.request(request.id), "state", "holder", "attempt")
        return list(record) == [b"running", worker_id.encode(), str(request.attempt).encode()]

    async def publish(self, worker_id: str, events: Sequence[TokenEvent]) -> set[str]:
        """Writes a step's events into the result streams, one entry per gateway. Returns the ids that were refused.

        A request's events are refused where its record is gone, ended, under another attempt or held by another
        worker: stop computing it. An event with ``finish`` ends the request in the same atomic step: lease and credit
        are returned, the tenant is refunded for unused tokens, the scheduler is woken.
        """
        groups: dict[tuple[str, int], list[TokenEvent]] = {}
        for event in events:
            groups.setdefault((event.request_id, event.attempt), []).append(event)
        refused, lagging = set[str](), dict[str, str]()
        for part in parts(_rows(groups)):
            reply = await self._scripts.run("publish", worker_id, *(value for item in part for value in item))
            refused |= {str(part[index][0]) for index in reply[0]}
            lagging |= _pairs(reply[1])
        self.lagging = lagging
        return refused

    async def look_at_lag(self) -> None:
        """Removes from :attr:`lagging` the gateways that do not lag any more."""
        self.lagging = _pairs(await self._scripts.run("lagging", *self.lagging))


def _pairs(flat: Sequence[bytes]) -> dict[str, str]:
    texts = [text.decode() for text in flat]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def _rows(groups: Mapping[tuple[str, int], Sequence[TokenEvent]]) -> Iterator[tuple[Argument, ...]]:
    """Yields arguments of ``publish.lua`` for each request; several rows if its events are too long for one call."""
    for (request_id, attempt), group in groups.items():
        for events, data in _cut(group):
            yield request_id, attempt, _generated(events), data


def _cut(events: Sequence[TokenEvent]) -> Iterator[tuple[Sequence[TokenEvent], bytes]]:
    """Yields a request's events and their encoding in as many runs as it takes: a backlog's scores have tens of MiB."""
    data = encode(events)
    if len(data) <= PIECE_BYTES or len(events) == 1:
        yield events, data
        return
    half = len(events) // 2
    yield from _cut(events[:half])
    yield from _cut(events[half:])


def _generated(events: Sequence[TokenEvent]) -> int:
    """Returns how many tokens a request has generated if ``events`` end it; else -1, or -2 if they have no token."""
    last = events[-1]
    if last.finish is None:
        return -1 if any(event.token_id is not None for event in events) else -2
    return last.index + (last.token_id is not None)
