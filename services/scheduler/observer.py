"""Writes the scheduler's series and its log lines about requests: from what the loop does, and from the queue's depth
and workers in Redis.

A first assignment is a line at debug, so that a scheduler of thousands of requests a second writes little; a further
one, and whatever ends a request or its attempt here, is a line at info."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from prometheus_client import Gauge

from services.messages import GenerateRequest
from services.metrics import OTHER, TOP_TENANTS, SchedulerMetrics
from services.queue.fates import log_fates
from services.queue.scheduler_side import Assignment, ReapReport, SchedulerQueue, Waiting
from services.request_ids import about
from services.routing import RoutingTable
from services.runtime.tracing import Attributes, TraceContext, Tracer
from services.scheduler.experts import Change, PlacementEvents
from services.scheduler.kube.observed import Observed
from services.scheduler.policy import Choice
from services.scheduler.scaling import Decision, ReplicaCounts, Replicas, Target

_RECLAIMED = ("requeued", "lost", "dead", "abandoned", "cancelled", "expired")
"""Fields of :class:`ReapReport` that are outcomes of ``reclaimed_leases_total``."""

log = logging.getLogger(__name__)


class Observer(PlacementEvents):
    """Keeps the metrics of one scheduler, and adds to the traces of requests if it has a ``tracer``."""

    def __init__(
        self,
        metrics: SchedulerMetrics,
        queue: SchedulerQueue,
        replicas: ReplicaCounts | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._tracer = tracer
        self._metrics = metrics
        self._queue = queue
        self._replicas = replicas
        self._observed = Observed()
        metrics.imbalance.set(math.nan)
        self.model: str | None = None
        """Name of the model that workers serve; None while none is known."""

    def leads(self) -> None:
        self._metrics.leader.set(1)

    def follows(self) -> None:
        """Show that this scheduler does not lead: a leader's gauges go to zero, so that sums over all are right."""
        metrics = self._metrics
        for gauge in (metrics.leader, metrics.queued_requests, metrics.queued_tokens, metrics.dead_letters):
            gauge.set(0)
        metrics.oldest.set(0)
        metrics.waiting_requests.clear()
        metrics.waiting_tokens.clear()
        metrics.imbalance.set(math.nan)
        metrics.sleep_level.set(0)
        metrics.workers.set(0)
        metrics.outstanding_tokens.clear()
        metrics.seats.clear()
        metrics.table_epoch.set(0)
        for series in self._scaling_series():
            series.clear()
        self._observed = Observed()

    def _scaling_series(self) -> tuple[Gauge, ...]:
        """Return series that have no values while nobody decides: whoever scales by them then keeps the replicas."""
        metrics = self._metrics
        return (
            *(metrics.spec_replicas, metrics.ready_replicas),
            *(
                metrics.wanted_replicas,
                metrics.wanted_reason,
                metrics.needed_replicas,
                metrics.boost,
                metrics.latency_over_target,
            ),
            *(metrics.shard_rows, metrics.shard_busy, metrics.shard_waiting, metrics.shard_stall),
        )

    def decided(self, decision: Decision) -> None:
        """Show what is wanted, and why."""
        metrics, state, signals = self._metrics, decision.state, decision.signals
        metrics.wanted_reason.clear()
        for target, reason in state.reasons.items():
            metrics.wanted_reason.labels(target.role, target.label, reason).set(1)
        for target, wanted in state.targets.items():
            labels = (target.role, target.label)
            metrics.wanted_replicas.labels(*labels).set(wanted)
            metrics.needed_replicas.labels(*labels).set(state.courses[target].need)
            metrics.boost.labels(*labels).set(state.courses[target].boost)
        for group, reading in decision.groups.items():
            metrics.shard_rows.labels(group).set(reading.rows)
            metrics.shard_busy.labels(group).set(reading.busy)
            metrics.shard_waiting.labels(group).set(reading.waiting)
            metrics.shard_stall.labels(group).set(reading.stall)
        for latency, ratio in (("ttft", signals.ttft), ("tpot", signals.tpot)):
            metrics.latency_over_target.labels(latency).set(math.nan if ratio is None else ratio)
        if self._replicas is not None:
            self._observed.note(state.targets, self._replicas.counts() or {})

    def tabled(self, table: RoutingTable) -> None:
        """Show ``table``, which is in use."""
        self._metrics.table_epoch.set(table.epoch)
        self._metrics.seats.clear()
        for group, seats in table.seats_of.items():
            self._metrics.seats.labels(group).set(len(seats))

    def changed(self, shard: int, change: Change) -> None:
        """Count a seat that the table gained or lost."""
        self._metrics.seat_changes.labels(shard, change).inc()

    def repartitioned(self) -> None:
        """Count a change of the shard groups' experts."""
        self._metrics.repartitions.inc()

    def balanced(self, ratio: float | None) -> None:
        """Show how evenly the seats are loaded."""
        self._metrics.imbalance.set(math.nan if ratio is None else ratio)

    def placed(self, seconds: float) -> None:
        """Note how long a turn of the placement took."""
        self._metrics.placement_turn.observe(seconds)

    async def refresh(self) -> None:
        """Bring the gauges up to date."""
        depth = await self._queue.depth()
        workers = await self._queue.workers()
        self._metrics.sleep_level.set(await self._queue.sleep_level())
        self._metrics.queued_requests.set(depth.requests)
        self._metrics.queued_tokens.set(depth.tokens)
        self._metrics.dead_letters.set(depth.dead_letters)
        self._metrics.workers.set(len(workers))
        self._metrics.outstanding_tokens.clear()
        for worker in workers:
            self.model = worker.info.model
            self._metrics.outstanding_tokens.labels(worker.info.id).set(worker.outstanding_tokens)
        self._show_waiting(await self._queue.waiting())
        if self._replicas is not None:
            self._counted(self._replicas.counts() or {})

    def _show_waiting(self, waiting: Waiting) -> None:
        """Show the lines of the tenants with the most tokens, and those of all others together."""
        metrics, tokens = self._metrics, Counter[str]()
        for line in waiting.lines:
            tokens[line.tenant] += line.tokens
        shown = {tenant for tenant, _ in tokens.most_common(TOP_TENANTS)}
        metrics.oldest.set(waiting.oldest_s)
        metrics.waiting_requests.clear()
        metrics.waiting_tokens.clear()
        for line in waiting.lines:
            labels = line.tenant if line.tenant in shown else OTHER, line.priority
            metrics.waiting_requests.labels(*labels).inc(line.requests)
            metrics.waiting_tokens.labels(*labels).inc(line.tokens)

    def _counted(self, counts: Mapping[Target, Replicas]) -> None:
        spec, ready = self._metrics.spec_replicas, self._metrics.ready_replicas
        spec.clear()
        ready.clear()
        for target, replicas in counts.items():
            spec.labels(target.role, target.label).set(replicas.wanted)
            ready.labels(target.role, target.label).set(replicas.ready)

    def assigned(self, choices: Sequence[Choice], answers: Sequence[Assignment], began_ns: int) -> None:
        """Count and log what the queue made of ``choices``, which it was asked for at ``began_ns``."""
        for choice, answer in zip(choices, answers, strict=True):
            _log_assignment(choice, answer)
            if self._tracer is not None and choice.request.traceparent:
                _trace_assignment(self._tracer, choice, answer, began_ns)
            if answer.queued_s is not None:
                self._metrics.dispatched.labels("prefix" if choice.held_tokens else "load").inc()
                self._metrics.queue_time.observe(answer.queued_s)

    def refused(self, request: GenerateRequest, why: str) -> None:
        """Log a request that ends because no worker can hold it."""
        log.info("ended a request", extra={**about(request.id, request.attempt, request.tenant), "why": why})

    def reaped(self, report: ReapReport) -> None:
        """Count what was taken back, and log what ended."""
        log_fates(report.fates)
        for outcome in _RECLAIMED:
            if count := getattr(report, outcome):
                self._metrics.reclaimed.labels(outcome).inc(count)


def _log_assignment(choice: Choice, answer: Assignment) -> None:
    request = choice.request
    level = logging.DEBUG if request.attempt == 1 or not answer else logging.INFO
    if log.isEnabledFor(level):
        said = "assigned" if answer else "not assigned: the worker has no credit left, or the request is gone"
        waited = {} if answer.queued_s is None else {"queue_ms": round(1000 * answer.queued_s)}
        ids = about(request.id, request.attempt, request.tenant, traceparent=request.traceparent)
        log.log(level, said, extra={**ids, "worker": choice.worker_id, **waited})


def _trace_assignment(tracer: Tracer, choice: Choice, answer: Assignment, began_ns: int) -> None:
    """Record how long the attempt waited in the queue, by Redis' clock, and which worker it then got. The times of the
    spans are this process's."""
    attempt, now = TraceContext.parse(choice.request.traceparent), time.time_ns()
    if attempt is None or answer.queued_s is None:
        return
    waited: Attributes = {"expertmesh.tenant": choice.request.tenant, "expertmesh.priority": choice.request.priority}
    tracer.record("queue", attempt, now - round(answer.queued_s * 1e9), began_ns, waited)
    chosen: Attributes = {"expertmesh.worker": choice.worker_id, "expertmesh.held_tokens": choice.held_tokens}
    tracer.record("assign", attempt, began_ns, now, chosen)
