"""Idempotency-Key: the same key and body get the same job, whoever of them is still there.

Alive or recently finished in this gateway: the client attaches and reads from the start. Unknown here, because the
gateway restarted or the client reached another one: the queue knows its id and seed, and it is taken up.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from services.errors import Conflict, InvalidRequest
from services.gateway.job import Job
from services.gateway.ports import Queue

_USABLE = re.compile(r"[\x20-\x7e]{1,255}")
_MOST_TOKENS = 1_000_000  # kept by finished jobs
_MOST_JOBS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """What a job's ids and draws derive from. ``resumed``: the queue may know the job already."""

    base_id: str
    seed: int
    resumed: bool = False


Start = Callable[[Ticket], Awaitable[Job]]


def new_ticket() -> Ticket:
    return Ticket(base_id=uuid.uuid4().hex, seed=secrets.randbits(63))


def fingerprint(path: str, body: bytes) -> str:
    """Names a request's content: two requests with one key must agree in it."""
    return hashlib.sha256(path.encode() + b"\n" + body).hexdigest()


def check_key(key: str) -> str:
    """Raises InvalidRequest where ``key`` is not 1 to 255 printable ASCII characters."""
    if not _USABLE.fullmatch(key):
        raise InvalidRequest(
            "Idempotency-Key must be 1 to 255 printable ASCII characters.", hint="Use a UUID.", param="Idempotency-Key"
        )
    return key


@dataclass(frozen=True, slots=True)
class _Entry:
    fingerprint: str
    job: asyncio.Future[Job]


class KeyedJobs:
    """Jobs of this gateway by (tenant, key): those in flight, and the last ones that finished."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()

    async def run(self, tenant: str, key: str, body_fingerprint: str, start: Start) -> Job:
        """The job that ``key`` names; ``start`` begins it where there is none to attach to.

        Raises:
            Conflict: the key was used with another body.
        """
        place = (tenant, key)
        while (entry := self._entries.get(place)) is not None:
            if entry.fingerprint != body_fingerprint:
                raise Conflict("This Idempotency-Key was used with another body.", hint="Use a new key.")
            if not entry.job.done():
                await asyncio.wait([entry.job])
            elif _reusable(entry.job):
                self._entries.move_to_end(place)
                return entry.job.result()
            else:
                self._entries.pop(place, None)
        return await self._begin(place, body_fingerprint, start)

    async def _begin(self, place: tuple[str, str], body_fingerprint: str, start: Start) -> Job:
        entry = _Entry(body_fingerprint, asyncio.get_running_loop().create_future())
        self._entries[place] = entry
        try:
            job = await start(await self._ticket(place, body_fingerprint))
        except BaseException:
            if self._entries.get(place) is entry:
                del self._entries[place]
            entry.job.cancel()  # whoever waits for it begins anew
            raise
        job.keyed = True
        entry.job.set_result(job)
        self._trim()
        return job

    async def _ticket(self, place: tuple[str, str], body_fingerprint: str) -> Ticket:
        tenant, key = place
        fresh = new_ticket()
        record = await self._queue.claim_idempotency(tenant, key, body_fingerprint, fresh.base_id, fresh.seed)
        return Ticket(base_id=record.base_id, seed=record.seed, resumed=not record.fresh)

    def _trim(self) -> None:
        """Forgets the oldest finished jobs beyond the bounds; jobs in flight stay."""
        kept = tokens = 0
        for place, entry in reversed(list(self._entries.items())):
            if not entry.job.done() or entry.job.cancelled() or not entry.job.result().done:
                continue
            kept += 1
            tokens += sum(len(choice.prompt_ids) + len(choice.generated) for choice in entry.job.result().choices)
            if kept > _MOST_JOBS or tokens > _MOST_TOKENS:
                del self._entries[place]


def _reusable(job: asyncio.Future[Job]) -> bool:
    """A job that failed or was cancelled is not worth a replay: the retry runs it again."""
    return not job.cancelled() and job.result().error is None
