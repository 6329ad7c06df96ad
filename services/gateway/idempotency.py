"""Idempotency-Key: requests with the same key and body get the same job.

A client attaches to a job that is in flight or recently finished in this gateway, and reads it from the start. Where
this gateway does not know the job, because it restarted or the client reached another gateway before, the queue knows
the job's id and seed, and this gateway takes it up.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from services.errors import Conflict, InvalidRequest
from services.gateway.budget import Holdings
from services.gateway.job import Job
from services.queue.gateway_side import IdempotencyKey, KeyBound

_USABLE = re.compile(r"[\x20-\x7e]{1,255}")
_MAX_JOBS = 1024
_KEPT_SHARE = 4
"""Answers kept for a retry may take one of this many parts of the memory for all answers."""
Place = tuple[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """What a job's ids and draws derive from. ``resumed`` says that the queue may know the job already. ``key`` is to
    be bound to the job when it is admitted."""

    base_id: str
    seed: int
    resumed: bool = False
    key: IdempotencyKey | None = None


Start = Callable[[Origin], Awaitable[Job]]


def new_origin(base_id: str) -> Origin:
    """Returns the origin of a new job, which draws a seed of its own."""
    return Origin(base_id=base_id, seed=secrets.randbits(63))


def fingerprint(path: str, body: bytes) -> str:
    """Returns a hash of a request's content, in which all requests with one key must agree."""
    return hashlib.sha256(path.encode() + b"\n" + body).hexdigest()


def check_key(key: str | None) -> str | None:
    """Returns ``key``. Raises InvalidRequest where there is one that is not 1 to 255 printable ASCII characters."""
    if key is not None and not _USABLE.fullmatch(key):
        raise InvalidRequest(
            "Idempotency-Key must be 1 to 255 printable ASCII characters.", hint="Use a UUID.", param="Idempotency-Key"
        )
    return key


@dataclass(frozen=True, slots=True)
class _Entry:
    fingerprint: str
    job: asyncio.Future[Job]


class _Kept(NamedTuple):
    """A finished job: its bytes, and until when it is kept."""

    size: int
    until: float


class KeyedJobs:
    """Jobs of this gateway by (tenant, key): jobs in flight, and the latest finished ones, which are kept for up to
    ``keep_s`` seconds while they fit into their part of ``holdings``."""

    def __init__(self, holdings: Holdings, *, keep_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._holdings = holdings
        self._max_bytes = holdings.limit // _KEPT_SHARE
        self._keep_s = keep_s
        self._clock = clock
        self._entries: dict[Place, _Entry] = {}
        self._finished: OrderedDict[Place, _Kept] = OrderedDict()  # the oldest first
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, tenant: str, key: str, body_fingerprint: str, base_id: str, start: Start) -> Job:
        """Returns the job of ``key``; ``start`` begins it, as ``base_id``, where there is none to attach to.

        Raises:
            Conflict: the key was used with another body.
        """
        place = (tenant, key)
        self._trim()
        while (entry := self._entries.get(place)) is not None:
            if entry.fingerprint != body_fingerprint:
                raise Conflict("This Idempotency-Key was used with a different body.", hint="Use a new key.")
            if not entry.job.done():
                await asyncio.wait([entry.job])
            elif _reusable(entry.job):
                return entry.job.result()
            else:
                self._forget(place)
        return await self._begin(place, body_fingerprint, base_id, start)

    async def _begin(self, place: Place, body_fingerprint: str, base_id: str, start: Start) -> Job:
        entry = _Entry(body_fingerprint, asyncio.get_running_loop().create_future())
        self._entries[place] = entry
        try:
            job = await self._started(place, body_fingerprint, new_origin(base_id), start)
        except BaseException:
            if self._entries.get(place) is entry:
                del self._entries[place]
            entry.job.cancel()  # a client that waits for it starts the job itself
            raise
        job.keyed = True
        job.when_done(lambda: self._keep(place, entry, job))
        entry.job.set_result(job)
        return job

    async def _started(self, place: Place, body_fingerprint: str, fresh: Origin, start: Start) -> Job:
        key = IdempotencyKey(key=place[1], fingerprint=body_fingerprint, base_id=fresh.base_id, seed=fresh.seed)
        try:
            return await start(replace(fresh, key=key))
        except KeyBound as bound:
            return await start(Origin(base_id=bound.base_id, seed=bound.seed, resumed=True))

    def _keep(self, place: Place, entry: _Entry, job: Job) -> None:
        if self._entries.get(place) is not entry:
            return
        if job.error is not None:
            self._forget(place)
        else:
            size = self._holdings.size(job)
            self._finished[place] = _Kept(size, self._clock() + self._keep_s)
            self._bytes += size
            job.when_dropped(partial(self._dropped, place))
            self._trim()

    def _dropped(self, place: Place) -> None:
        """Forgets a kept job that has dropped its answer, unless another job took its place."""
        if (entry := self._entries.get(place)) is not None and entry.job.done() and not _reusable(entry.job):
            self._forget(place)

    def _trim(self) -> None:
        """Forgets the oldest finished jobs beyond the bounds, now and when their time is over; jobs in flight stay."""
        while self._finished:
            place, kept = next(iter(self._finished.items()))
            fits = len(self._finished) <= _MAX_JOBS and self._bytes <= self._max_bytes
            if fits and kept.until > self._clock():
                if self._timer is None:
                    loop = asyncio.get_running_loop()
                    self._timer = loop.call_later(kept.until - self._clock(), self._on_time)
                return
            self._forget(place)

    def _on_time(self) -> None:
        self._timer = None
        self._trim()

    def _forget(self, place: Place) -> None:
        del self._entries[place]
        kept = self._finished.pop(place, None)
        self._bytes -= kept.size if kept else 0


def _reusable(job: asyncio.Future[Job]) -> bool:
    """Says whether a retry gets this job: not one that failed or was cancelled, which the retry runs again."""
    return not job.cancelled() and job.result().error is None
