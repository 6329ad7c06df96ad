"""The gateway's only access to the queue while requests run: results in; resubmissions, cancels and heartbeats out.

One blocking read returns a worker's step for all of its sequences. After Redis was away, and from time to time, the
follower surveys what the queue knows of the jobs in flight and repairs what was lost on either side.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from services.errors import DeadlineExceeded, QueueUnavailable, RequestError, Unavailable
from services.gateway.job import Choice, Job
from services.gateway.ports import Queue
from services.gateway.table import Followups, JobTable
from services.messages import WorkerInfo
from services.metrics import GatewayMetrics
from services.queue.gateway_side import FIRST_ID, RequestState
from services.request_ids import about
from services.runtime.tasks import end_tasks, first_done

log = logging.getLogger(__name__)

_BLOCK_MS = 1_000
_DRAIN_MS = 1
_LONGEST_DRAIN_S = 2.0
_RETRY_S = 0.1
_LONGEST_RETRY_S = 1.0
_SURVEY_LEASES = 2.0
_SECOND_LOOK_LEASES = 0.5  # after a survey that left doubts
_KEEPALIVE_S = 15.0
_POKED_AT_ONCE = 256  # streams that are woken in one turn of the event loop
_DELIVERED_AT_ONCE = 256
_TURN_S = 0.02
"""How long a turn of the event loop may deliver events: a new request needs several turns before it is admitted."""
Cancels = Mapping[str, int]


class ResultFollower:
    """Moves events from the queue to a :class:`JobTable` and acts on the results.

    ``up`` is False while Redis is away; ``workers`` are the workers that were live at the last look. A process of the
    deployment may be silent for ``lease_s``, a gateway for ``own_lease_s``. ``redis_ms`` is Redis's time, if that
    is known here. ``on_beat`` is called with each heartbeat.
    """

    def __init__(
        self,
        queue: Queue,
        table: JobTable,
        metrics: GatewayMetrics,
        *,
        lease_s: float,
        own_lease_s: float,
        request_timeout_s: float,
        fingerprint: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        redis_ms: Callable[[], float] | None = None,
        on_beat: Callable[[], None] = lambda: None,
    ) -> None:
        self.up = False
        self.workers: list[WorkerInfo] = []
        self._queue = queue
        self._table = table
        self._metrics = metrics
        self._lease_s = lease_s
        self._own_lease_s = own_lease_s
        self._on_beat = on_beat
        self._silence_s = request_timeout_s + 4 * lease_s
        self._fingerprint = fingerprint
        self._clock = clock
        self._redis_ms = redis_ms
        self._last_id = FIRST_ID
        self._survey_due = clock()
        self._poked_at = clock()
        self._beaten_at = clock()
        self._lapsed = False  # whether its lease expired since the last survey that left no doubts
        self._doubts: set[tuple[str, RequestState]] = set()  # states of the last survey that the stream may explain
        self._gathered: dict[str, int] = {}  # cancels that go with the next turn of the loop
        self._unsent: dict[str, int] = {}  # cancels that Redis has not got
        self._tasks: set[asyncio.Task[None]] = set()
        self._cancelling: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Runs until cancelled. Raises FingerprintMismatch where the namespace serves another model."""
        try:
            await first_done(self._follow(), self._beat())
        finally:
            await end_tasks(list(self._tasks))  # the two may have begun some while they were ended

    async def greet(self) -> None:
        """Sends the first heartbeat, so that a mismatch of the model is a start-up error. Redis may still be away."""
        try:
            await self._queue.heartbeat(self._own_lease_s, self._fingerprint)
        except QueueUnavailable as error:
            log.warning("not connected yet: %s", error.message)

    def abandon(self, job: Job) -> None:
        """Ends ``job`` here and upstream at once, because the client left."""
        self.cancel(self._table.fail(job, Unavailable("The client closed the connection."), "cancelled"))

    def fail(self, job: Job, error: RequestError) -> None:
        self.cancel(self._table.fail(job, error))

    def cancel(self, requests: Cancels) -> None:
        """Cancels upstream without waiting, and again until Redis has got it. Values are delivered tokens. All cancels
        of one turn of the loop, as of a thousand clients that leave, go in one call."""
        if not requests:
            return
        begun = bool(self._gathered)
        self._gathered |= requests
        if not begun:
            task = self._spawn(self._cancel())
            self._cancelling.add(task)
            task.add_done_callback(self._cancelling.discard)

    async def cancels_heard(self, request_ids: set[str]) -> None:
        """Waits for cancels in flight, and drops unsent ones of ``request_ids``, which are about to run again."""
        if self._cancelling:
            await asyncio.wait(set(self._cancelling))
        for request_id in request_ids:
            self._unsent.pop(request_id, None)

    async def _follow(self) -> None:
        retry_s = _RETRY_S
        while True:
            try:
                if not self.up:
                    await self._return()
                    retry_s = _RETRY_S
                await self._read(_BLOCK_MS)
            except QueueUnavailable as error:
                self._away(error)
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, _LONGEST_RETRY_S)

    async def _read(self, block_ms: int) -> None:
        """Reads once, delivers the events, and acts on them."""
        last_id, events = await self._queue.follow(self._last_id, block_ms)
        published = self._published(last_id)
        until = time.monotonic() + _TURN_S
        for start in range(0, len(events), _DELIVERED_AT_ONCE):
            if time.monotonic() > until:
                await asyncio.sleep(0)
                until = time.monotonic() + _TURN_S
            self._act(self._table.deliver(events[start : start + _DELIVERED_AT_ONCE], published))
        self._last_id = last_id

    def _published(self, entry_id: str) -> float | None:
        """Returns when the entry was published, by this process's clock; its id has the time by Redis's."""
        if self._redis_ms is None or entry_id == FIRST_ID:
            return None
        return self._clock() - max(0.0, self._redis_ms() - int(entry_id.partition("-")[0])) / 1000

    async def _beat(self) -> None:
        """Sends a heartbeat, looks at the workers, expires jobs and keeps streams alive, every quarter of a lease."""
        while True:
            try:
                await self._heartbeat()
                self.workers = await self._queue.look()
                await self._restate()
                if self.up and self._clock() > self._survey_due:
                    await self._survey()
            except QueueUnavailable as error:
                self._away(error)
            self._on_beat()
            self._expire()
            await self._keep_alive()
            await asyncio.sleep(min(self._lease_s / 4, 1.0))

    async def _heartbeat(self) -> None:
        await self._queue.heartbeat(self._own_lease_s, self._fingerprint)
        now = self._clock()
        self._lapsed = self._lapsed or now - self._beaten_at > self._own_lease_s
        self._beaten_at = now

    async def _restate(self) -> None:
        """Rewrites waiting requests for members of an earlier release that came, say by a rollback."""
        sequences = ((choice.request, choice.prompt) for _, choice in self._table.waiting())
        if written := await self._queue.restate(sequences):
            log.info("rewrote %d requests for processes of an earlier release", written)

    async def _return(self) -> None:
        """Reconnects: renews the lease, reads what the stream has (for a bounded time), then surveys."""
        await self._heartbeat()
        before, end = None, self._clock() + _LONGEST_DRAIN_S
        while before != self._last_id and self._clock() < end:
            before = self._last_id
            await self._read(_DRAIN_MS)
        await self._survey()
        unsent, self._unsent = self._unsent, {}
        self.cancel(unsent)
        self.workers = await self._queue.look()
        self.up = True
        self._metrics.queue_up.set(1)
        log.info("connected to Redis")

    def _away(self, error: QueueUnavailable) -> None:
        if self.up:
            log.warning("streams are paused: %s", error.message)
        self.up = False
        self._metrics.queue_up.set(0)

    async def _survey(self) -> None:
        """Compares the jobs in flight with the queue's records, by the rules of ``GatewayQueue.survey``."""
        waiting = {choice.request.id: (job, choice) for job, choice in self._table.waiting()}
        known = await self._queue.survey({key: choice.request.attempt for key, (_, choice) in waiting.items()})
        doubts, self._doubts = self._doubts, set()
        for key, (state, attempt) in known.items():
            job, choice = waiting[key]
            if choice.finish is not None:
                continue
            if state in ("done", "moved") and (key, state) not in doubts:
                self._doubts.add((key, state))  # the stream may have its end, not read yet
            else:
                self._repair(job, choice, state, attempt)
        self._lapsed = self._lapsed and bool(self._doubts)
        leases = _SECOND_LOOK_LEASES if self._doubts else _SURVEY_LEASES
        self._survey_due = self._clock() + leases * self._lease_s

    def _repair(self, job: Job, choice: Choice, state: RequestState, attempt: int) -> None:
        mine = choice.request.attempt
        if state == "moved" and self._lapsed:  # its end was not sent here, for this gateway counted as dead
            self.fail(job, Unavailable("The request continues on another server, where its client has retried it."))
        elif state == "moved":  # a take-up would have ended it here: Redis forgot that this gateway took it up
            self._spawn(self._resync(job, choice, retake=True))
        elif state == "done" or (choice.recovering and state not in ("missing", "lost")):
            self._spawn(self._resync(job, choice))
        elif state == "missing":
            self._spawn(self._resubmit(choice, mine))
        elif state == "lost":
            self._spawn(self._resubmit(choice, attempt))
        elif attempt < mine:
            self._spawn(self._resubmit(choice, mine))

    def _act(self, todo: Followups) -> None:
        if not todo:
            return
        self.cancel(todo.cancel)
        for choice, attempt in todo.lost:
            self._spawn(self._resubmit(choice, attempt))
        for reason, found in (("gap", todo.gaps), ("cancelled", todo.cancelled)):
            for job, choice in found:
                self._metrics.lost_attempts.labels(reason).inc()
                if choice.trace is not None:
                    choice.trace.lost(reason)
                self._spawn(self._resync(job, choice))

    async def _resubmit(self, choice: Choice, attempt: int) -> None:
        if choice.finish is not None:
            return
        request = choice.resubmission(attempt)
        choice.recovering = False  # events of the new attempt may come before the answer to this call
        ids = about(request.id, attempt, request.tenant, traceparent=request.traceparent)
        log.info("resubmitted", extra={**ids, "delivered": request.delivered})
        prompts = {request.prompt: choice.prompt}
        await self._queue.resubmit(request, prompts, by_name=not choice.whole)  # False: the next survey finds out why

    async def _resync(self, job: Job, choice: Choice, *, retake: bool = False) -> None:
        choice.recovering = True
        about_it = about(choice.request.id, choice.request.attempt, job.tenant)
        log.info("asking the queue how an attempt ended", extra=about_it)
        attempt = await self._queue.resync(choice.request.id, choice.request.attempt, retake=retake)
        if attempt is None:
            self.fail(job, Unavailable("The request was cancelled by the server.", hint="Send it again."))
        else:
            await self._resubmit(choice, attempt)

    async def _cancel(self) -> None:
        requests, self._gathered = self._gathered, {}
        try:
            await self._queue.cancel(requests, requests)
        except QueueUnavailable:
            self._unsent.update(requests)
            raise

    def _expire(self) -> None:
        """Ends jobs that got no event for longer than any queue or lease lasts, so that no client waits for ever."""
        now = self._clock()
        for job, choice in self._table.waiting():
            if now - max(job.arrived, choice.last_at or 0.0) > self._silence_s:
                self.fail(job, DeadlineExceeded("No token came within the request timeout.", hint="Try again later."))

    async def _keep_alive(self) -> None:
        """Wakes idle streams: they send a comment, so that no proxy closes them."""
        if self._clock() - self._poked_at > _KEEPALIVE_S:
            self._poked_at = self._clock()
            for number, job in enumerate(self._table.jobs(), 1):
                job.poke()
                if number % _POKED_AT_ONCE == 0:
                    await asyncio.sleep(0)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs ``work`` in a task. If Redis is away the work is lost, and the survey after its return repeats it."""

        async def guarded() -> None:
            try:
                await work
            except QueueUnavailable as error:
                self._away(error)

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
