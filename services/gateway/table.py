"""Jobs in flight. In: events, which wake the jobs' readers. Out: a list of calls to make to the queue. No I/O.

:meth:`JobTable.deliver` is the gateway's hot path: it runs once per engine step of a worker, for all its sequences.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from services.errors import InternalError, Overloaded, RequestError
from services.gateway.budget import Holdings
from services.gateway.job import Choice, Job, Step
from services.gateway.targets import LatencyTargets
from services.messages import AttemptLost, FinishReason, TokenEvent
from services.metrics import GatewayMetrics
from services.queue.gateway_side import Result, Unreadable
from services.request_ids import about

MAX_MISSED = 2
"""How many attempts of a sequence are repeated because a part of them will never come."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Followups:
    """Calls to the queue that a batch of events leads to."""

    lost: list[tuple[Choice, int]] = field(default_factory=list)  # resubmit as this attempt
    gaps: list[tuple[Job, Choice]] = field(default_factory=list)  # resync, then resubmit
    cancelled: list[tuple[Job, Choice]] = field(default_factory=list)  # by the queue: the same, unless it moved
    cancel: dict[str, int] = field(default_factory=dict)  # ids, and how many tokens were delivered

    def __bool__(self) -> bool:
        return bool(self.lost or self.gaps or self.cancelled or self.cancel)


class JobTable:
    """Every job that waits for events, by the ids of its sequences. ``idle`` is set while there is none; ``holdings``
    bounds the memory of the answers."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        latencies: LatencyTargets,
        holdings: Holdings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.holdings = holdings
        self._metrics = metrics
        self._latencies = latencies
        self._clock = clock
        self._owners: dict[str, tuple[Job, Choice]] = {}
        self.idle = asyncio.Event()
        self.idle.set()

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, job: Job) -> None:
        self.holdings.open(job)
        self._latencies.came(len(job.choices))
        for choice in job.choices:
            self._owners[choice.request.id] = (job, choice)
        self._count()

    def discard(self, job: Job) -> None:
        """Forgets ``job`` without ending it."""
        for choice in job.choices:
            if self._owners.get(choice.request.id, (None,))[0] is job:
                del self._owners[choice.request.id]
        self._count()

    def jobs(self) -> list[Job]:
        """Returns the jobs in flight, each once."""
        return list({id(job): job for job, _ in self._owners.values()}.values())

    def waiting(self) -> Iterator[tuple[Job, Choice]]:
        """Yields admitted sequences that have not ended."""
        for job, choice in list(self._owners.values()):
            if job.admitted and choice.finish is None:
                yield job, choice

    def deliver(self, events: Iterable[Result], published: float | None = None) -> Followups:
        """Takes ``events`` in their order and wakes the readers of their jobs. ``published`` is when they were
        published, by this table's clock, if that is known."""
        todo, tokens = Followups(), 0
        touched: dict[str, tuple[Job, Choice, int]] = {}  # by request, with the former size of the choice
        now = self._clock()
        for event in events:
            owner = self._owners.get(event.request_id)
            if owner is None:
                _answer_unknown(event, todo)
            elif isinstance(event, AttemptLost):
                self._lose(owner[1], event, todo)
            elif isinstance(event, Unreadable):
                self._miss(*owner, todo, event.reason)
            else:
                if event.request_id not in touched:
                    touched[event.request_id] = (*owner, owner[1].nbytes)
                tokens += self._accept(*owner, event, todo, now)
        if tokens:
            self._metrics.generation_tokens.inc(tokens)
        for job, choice, size in touched.values():
            self.holdings.grow(job, choice.nbytes - size)
        for job in {id(job): job for job, _, _ in touched.values()}.values():
            job.note_published(published)
            if not job.done:
                self._update(job, todo)
        todo.cancel.update(self.make_room())
        return todo

    def make_room(self) -> dict[str, int]:
        """Ends answers, also finished ones, until the others fit. Returns what to cancel upstream."""
        cancel: dict[str, int] = {}
        for job in self.holdings.excess() if self.holdings.full else ():
            size = job.nbytes
            log.warning(
                "ended an answer: the memory for answers is full",
                extra={**about(job.choices[0].request.id, tenant=job.tenant), "bytes": size},
            )
            error = Overloaded("The answer takes more memory than this gateway has for it.", hint="Ask for less.")
            cancel.update(self.fail(job, error))
            job.drop(error)
            self.holdings.dropped(job, size)
        return cancel

    def fail(self, job: Job, error: RequestError, finish: FinishReason = "error") -> dict[str, int]:
        """Ends ``job`` with ``error``. Returns what to cancel upstream."""
        if job.done:
            return {}
        open_choices = job.unfinished
        for choice in open_choices:
            choice.fail(error, finish)
            self._count_end(job, choice)
        self._end(job, error)
        return {choice.request.id: len(choice.generated) for choice in open_choices}

    def _count(self) -> None:
        self._metrics.open_streams.set(len(self._owners))
        if self._owners:
            self.idle.clear()
        else:
            self.idle.set()

    def _lose(self, choice: Choice, event: AttemptLost, todo: Followups) -> None:
        if choice.finish is None and event.attempt > choice.request.attempt:
            self._metrics.lost_attempts.labels(_lost_reason(event.reason)).inc()
            request = choice.request
            ids = about(event.request_id, event.attempt - 1, request.tenant, traceparent=request.traceparent)
            log.info("lost an attempt", extra={**ids, "why": event.reason})
            if choice.trace is not None:
                choice.trace.lost(event.reason)
            todo.lost.append((choice, event.attempt))
            choice.resubmission(event.attempt)  # events of the old attempt are ignored from here on

    def _miss(self, job: Job, choice: Choice, todo: Followups, reason: str) -> None:
        """Repeats an attempt of which a part will never come, up to :data:`MAX_MISSED` times: a worker that never sends
        the part, or whose messages cannot be read, would fail for ever."""
        if choice.finish is not None or choice.recovering:
            return
        choice.missed += 1
        if choice.missed > MAX_MISSED:
            todo.cancel.update(self.fail(job, InternalError(f"The answer cannot be read: {reason}")))
        else:
            choice.recovering = True
            todo.gaps.append((job, choice))

    def _accept(self, job: Job, choice: Choice, event: TokenEvent, todo: Followups, now: float) -> int:
        before = len(choice.generated)
        step = choice.accept(event)
        new = len(choice.generated) - before
        if new:
            self._time_token(job, choice, now)
        if step is Step.GAP and event.index <= before:
            self._miss(job, choice, todo, "scores of the prompt are missing.")
        elif step in (Step.GAP, Step.UNREAD):
            choice.recovering = True
            todo.gaps.append((job, choice))
        elif step is Step.CANCELLED:
            choice.recovering = True
            todo.cancelled.append((job, choice))
        elif step is Step.STOPPED:
            todo.cancel[choice.request.id] = len(choice.generated)
        if step in (Step.FINISHED, Step.STOPPED, Step.FAILED):
            self._count_end(job, choice)
        return new

    def _update(self, job: Job, todo: Followups) -> None:
        """Wakes the job's readers, or ends the job when all of its choices have ended or one has failed."""
        failed = next((choice.error for choice in job.choices if choice.error is not None), None)
        if failed is not None:
            todo.cancel.update(self.fail(job, failed))
        elif any(choice.finish is None for choice in job.choices):
            job.notify()
        else:
            self._end(job, None)

    def _end(self, job: Job, error: RequestError | None) -> None:
        self.discard(job)
        job.end(error)

    def _time_token(self, job: Job, choice: Choice, now: float) -> None:
        if choice.last_at is None:
            choice.first_at = now
            if choice.trace is not None:
                choice.trace.first_token()
            self._metrics.ttft.observe(now - job.arrived, exemplar=choice.exemplar)
            self._latencies.first_token(now - job.arrived)
        else:
            self._metrics.inter_token.observe(now - choice.last_at)
        choice.last_at = now

    def _count_end(self, job: Job, choice: Choice) -> None:
        metrics, count = self._metrics, len(choice.generated)
        metrics.requests.labels(choice.finish).inc()
        self._latencies.ended()
        ttft_s = None if choice.first_at is None else choice.first_at - job.arrived
        if choice.finish != "cancelled":
            self._latencies.judge(choice.error, ttft_s=ttft_s, tpot_s=choice.per_token_s)
        if choice.error is not None:
            if choice.finish == "error":
                metrics.errors.labels(choice.error.code).inc()
            return
        metrics.e2e.observe(self._clock() - job.arrived, exemplar=choice.exemplar)
        metrics.output_len.observe(count)
        if choice.per_token_s is not None:
            metrics.tpot.observe(choice.per_token_s)
            self._latencies.per_token(choice.per_token_s)


def _answer_unknown(event: Result, todo: Followups) -> None:
    """Cancels the unknown request of ``event``, which still costs a worker; an end needs no answer."""
    if not isinstance(event, TokenEvent) or event.finish is None:
        todo.cancel.setdefault(event.request_id, 0)


def _lost_reason(reason: str) -> str:
    """Returns the first word of ``reason``, as a bounded label."""
    word = reason.split(maxsplit=1)[0] if reason.strip() else "unknown"
    return word[:32] if word.replace("_", "").replace("-", "").isalnum() else "other"
