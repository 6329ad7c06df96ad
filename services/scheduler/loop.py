"""A scheduler campaigns, leads and steps down. Requests go from the queue into workers' inboxes; nothing else does.

    wait for work -> workers with credit? -> claim that much -> plan -> assign -> (release what found no credit)

One coroutine does it all, so there is nothing to lock: each call is one short round trip, and every call that changes
something carries the epoch, so that a leader that was paused cannot disturb its successor. While all credit is in use
nothing is claimed; the end of a request wakes the loop. Between wakes it ticks, to prolong its lock, to reap what
expired and to refresh the gauges. Placement and scaling have coroutines of their own.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.errors import ContextLengthExceeded, QueueUnavailable, StaleLeader, StaleTable
from services.messages import GenerateRequest
from services.queue.backoff import Backoff
from services.queue.scheduler_side import SchedulerQueue, WorkerState
from services.runtime.tasks import end_tasks
from services.scheduler.experts import ExpertPlacement
from services.scheduler.observer import Observer
from services.scheduler.policy import Choice, DispatchPolicy
from services.scheduler.scaling import Autoscaler

MAX_TAKEOVER_S = 3.0
"""A leader that was killed has a successor within this time, or a lease if that is shorter."""
MAX_CLAIM = 64
"""Requests per claim: bounds the time of one script call and what a crash leaves to be requeued."""
PLACEMENT_REST = 3.0
"""The placement rests for this many times the CPU time of its turn: it takes a quarter of a core at most."""
REFUSED_RETRY_S = 0.02
"""Pause after a worker left between being chosen and being assigned to."""
MIN_BLOCK_S = 0.1
"""Redis ends blocking reads ten times a second; shorter waits are slept."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Intervals:
    """Intervals of the loop, seconds. ``lock_ttl`` plus two of a standby's polls is the time of a takeover."""

    lock_ttl: float
    poll: float
    renew: float
    reap: float
    experts: float
    scaling: float
    gauges: float
    tick: float

    @classmethod
    def of(cls, lease_s: float) -> Intervals:
        takeover = min(lease_s, MAX_TAKEOVER_S)
        return cls(
            lock_ttl=takeover * 0.9,
            poll=takeover / 25,
            renew=takeover * 0.3,
            reap=min(0.5, lease_s / 8),
            experts=min(0.25, lease_s / 16),
            scaling=1.0,
            gauges=1.0,
            tick=min(0.25, lease_s / 16),
        )


class Timer:
    """Says when ``interval_s`` has passed since it last said so; at once the first time."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._due = 0.0

    def due(self) -> bool:
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + self._interval_s
        return True

    def expire(self) -> None:
        """Be due at the next question."""
        self._due = 0.0


class Scheduler:
    """One scheduler process, leader or standby.

    ``token`` names it in the lock and is never reused. ``placement`` and ``autoscaler`` make what each term needs for
    placing experts and for wanting replicas.
    """

    def __init__(
        self,
        queue: SchedulerQueue,
        policy: DispatchPolicy,
        observer: Observer,
        *,
        token: str,
        lease_s: float,
        placement: Callable[[], ExpertPlacement] | None = None,
        autoscaler: Callable[[], Autoscaler] | None = None,
    ) -> None:
        self._queue = queue
        self._policy = policy
        self._observer = observer
        self._token = token
        self._autoscaler = autoscaler
        self._lease_s = lease_s
        self._placement = placement
        self._intervals = Intervals.of(lease_s)
        self._redis = Backoff()
        self._campaigned = False

    def missing(self) -> list[str]:
        """Return what keeps this process from leading and from waiting for the lock; for /ready."""
        return [] if self._campaigned and not self._redis.failing else ["Redis"]

    async def run(self, stop: asyncio.Event) -> None:
        """Lead whenever nobody else does, until ``stop`` is set; then resign."""
        while not stop.is_set():
            try:
                await self._campaign(stop)
            except StaleLeader:
                log.warning("another scheduler is the leader; stepping down")
            except QueueUnavailable as error:
                await self._wait_for_redis(stop, error)
            finally:
                self._observer.follows()

    async def _campaign(self, stop: asyncio.Event) -> None:
        if self._redis.failing:  # nothing is reclaimed before the living had a lease's time to report
            await self._queue.hold_reclaims(self._lease_s)
            log.info("Redis answers again")
        epoch = await self._queue.campaign(self._token, self._intervals.lock_ttl)
        self._redis.succeeded()
        self._campaigned = True
        if epoch is None:
            await _sleep(stop, self._intervals.poll * random.uniform(0.5, 1.0))
            return
        log.info("became leader", extra={"epoch": epoch})
        self._observer.leads()
        placement = self._placement() if self._placement else None
        autoscaler = self._autoscaler() if self._autoscaler else None
        term = _Term(self._queue, self._policy, self._observer, self._intervals, epoch, placement, autoscaler)
        await term.serve(stop)

    async def _wait_for_redis(self, stop: asyncio.Event, error: QueueUnavailable) -> None:
        if not self._redis.failing:
            log.warning("scheduling is paused: %s", error.message)
        await _sleep(stop, self._redis.failed())


class _Term:
    """One epoch of leadership."""

    def __init__(
        self,
        queue: SchedulerQueue,
        policy: DispatchPolicy,
        observer: Observer,
        intervals: Intervals,
        epoch: int,
        placement: ExpertPlacement | None,
        autoscaler: Autoscaler | None,
    ) -> None:
        self._queue = queue
        self._policy = policy
        self._observer = observer
        self._intervals = intervals
        self._epoch = epoch
        self._placement = placement
        self._autoscaler = autoscaler
        self._renewal = Timer(intervals.renew)
        self._reaping = Timer(intervals.reap)
        self._gauges = Timer(intervals.gauges)
        self._head_waits = False

    async def serve(self, stop: asyncio.Event) -> None:
        """Dispatch until ``stop``, then give the lock up.

        Raises:
            StaleLeader: another scheduler leads.
            QueueUnavailable: Redis does not answer.
        """
        tasks = [asyncio.create_task(self._keep_placing(self._placement))] if self._placement else []
        tasks += [asyncio.create_task(self._keep_scaling(self._autoscaler))] if self._autoscaler else []
        try:
            pause_s = 0.0
            while not stop.is_set():
                await self._wait(pause_s)
                pause_s = await self._dispatch()
                await self._keep_house()
                for task in tasks:
                    if task.done():
                        task.result()
        finally:
            await end_tasks(tasks)
        await self._queue.resign(self._epoch)
        log.info("gave up leadership", extra={"epoch": self._epoch})

    async def _wait(self, seconds: float) -> None:
        if seconds < MIN_BLOCK_S:
            await asyncio.sleep(seconds)
        else:
            await self._queue.wait_for_work(seconds)

    async def _keep_house(self) -> None:
        if self._renewal.due() and not await self._queue.renew(self._epoch, self._intervals.lock_ttl):
            raise StaleLeader(f"Epoch {self._epoch} is no longer the leader's.")
        if self._reaping.due():
            await self._reap()
        if self._gauges.due():
            await self._observer.refresh()

    async def _keep_placing(self, placement: ExpertPlacement) -> None:
        """Place experts while requests are dispatched: a turn over thousands of seats takes a while."""
        while True:
            began, spent, changed = time.monotonic(), time.process_time(), False
            try:
                changed = await placement.turn(self._epoch)
            except StaleTable as error:
                log.warning("%s", error.message)
            self._observer.placed(time.monotonic() - began)
            rest_s = PLACEMENT_REST * (time.process_time() - spent)
            await asyncio.sleep(max(0.0 if changed else self._intervals.experts, rest_s))

    async def _keep_scaling(self, autoscaler: Autoscaler) -> None:
        """Scale while requests are dispatched."""
        while True:
            await autoscaler.turn(self._epoch)
            await asyncio.sleep(self._intervals.scaling)

    async def _reap(self) -> None:
        report = await self._queue.reap(self._epoch)
        self._observer.reaped(report)
        if report.more:
            self._reaping.expire()

    async def _dispatch(self) -> float:
        """Assign what there is credit for. Returns how long to wait for news; 0: look again at once."""
        workers = await self._queue.workers()
        places, tokens = free_credit(workers)
        if not places:
            return self._intervals.tick
        # While the first in line waits for credit, it is looked at alone: no claims just to give them back.
        limit = 1 if self._head_waits else min(places, MAX_CLAIM)
        claims = await self._queue.claim(self._epoch, limit, tokens)
        if not claims:
            self._head_waits = False
            return self._intervals.tick
        plan = self._policy.plan(claims, workers)
        refused = await self._assign(plan.choices)
        self._head_waits = bool(plan.waiting)
        if later := [*plan.waiting, *plan.deferred]:
            await self._queue.release(self._epoch, later)
        for request in plan.hopeless:
            await self._fail(request, workers)
        if refused:
            return REFUSED_RETRY_S
        # Fewer than asked for: the queue is empty, or what is left needs credit, and either's end wakes us.
        return 0.0 if len(claims) == limit and not later else self._intervals.tick

    async def _assign(self, choices: Sequence[Choice]) -> int:
        """Assign ``choices``. Returns how many were refused; the queue has put their requests back."""
        if not choices:
            return 0
        began_ns = time.time_ns()
        answers = await self._queue.assign(self._epoch, [(choice.request, choice.worker_id) for choice in choices])
        self._observer.assigned(choices, answers, began_ns)
        return sum(not answer for answer in answers)

    async def _fail(self, request: GenerateRequest, workers: Sequence[WorkerState]) -> None:
        longest = max(worker.info.max_model_len for worker in workers)
        error = ContextLengthExceeded(
            f"No worker can hold more than {longest} tokens, but the prompt and max_tokens need {request.max_len}.",
            hint="Shorten the prompt or lower max_tokens.",
            param="max_tokens",
        )
        if await self._queue.fail(self._epoch, request, error.info()):
            self._observer.refused(request, error.message)


def free_credit(workers: Sequence[WorkerState]) -> tuple[int, int]:
    """Return requests and tokens that ``workers`` can be given. Tokens may be 0 where an idle worker has a place."""
    open_ = [worker for worker in workers if worker.has_credit(1)]
    places = sum(worker.credit_requests - worker.outstanding_requests for worker in open_)
    tokens = sum(max(0, worker.credit_tokens - worker.outstanding_tokens) for worker in open_)
    return places, tokens


async def _sleep(stop: asyncio.Event, seconds: float) -> None:
    """Sleep, but not past ``stop``."""
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        pass
