"""Series of a scheduler."""

from __future__ import annotations

from typing import Literal, get_args

from prometheus_client import CollectorRegistry

from services.metrics.common import LATENCY_BUCKETS_S, SHARD, STEP_BUCKETS_S, TOP_TENANTS, unreadable
from services.metrics.series import Label, Series

_TENANT = Label(
    "tenant", f"the {TOP_TENANTS} tenants with the most tokens waiting; other is all others", most=TOP_TENANTS
)
_PRIORITY = Label("priority", "0 is served first", values=tuple(map(str, range(10))))
_WORKER = Label("worker", "id of a live attention worker", most=4096)
_SCALED = Label("role", values=("experts", "attention", "gateway"))
_ITS_SHARD = Label("shard", "number of a shard group; empty for the other roles", most=1024)
_LATENCY = Label("latency", values=("ttft", "tpot"))
_LEADER = "on the leader"
_SCALING = "on the leader, with --autoscale"
_KUBERNETES = "on the leader, with --kubernetes-selector"
_EXPERTS = "on the leader, with expert or colocated workers"
ScalingReason = Literal["load", "latency", "floor", "ceiling", "hold", "unknown", "asleep"]
"""Why so many replicas are wanted: for the load; for latencies that miss their target; the minimum or maximum that is
set; fewer would do but not for long enough; loads that are not known; no requests for a while."""


class SchedulerMetrics:
    """The queue, the dispatch, the placement and the scaling. Written by the scheduler."""

    def __init__(self, registry: CollectorRegistry) -> None:
        series = Series(registry, "scheduler")
        self.definitions = series.definitions
        self.unreadable = unreadable(series)
        self.leader = series.gauge("scheduler_leader", "1 on the leading scheduler, 0 on a standby.")
        self.sleep_level = series.gauge(
            "sleep_level",
            "How deeply the model is to sleep: 0: it serves; 1: weights stay in the memory of hosts; 2: they do not. 0 "
            "on a standby.",
        )
        self._queue(series)
        self._placement(series)
        self._scaling(series)

    def _queue(self, series: Series) -> None:
        gauge = series.gauge
        self.queued_requests = gauge("queue_requests", "Requests in the queue; 0 on a standby.")
        self.queued_tokens = gauge(
            "queue_tokens", "Tokens of the requests in the queue (prompt + max_tokens); 0 on a standby."
        )
        self.waiting_requests = gauge(
            "queue_waiting_requests", "Requests in the queue, by tenant and priority.", _TENANT, _PRIORITY, only=_LEADER
        )
        self.waiting_tokens = gauge(
            "queue_waiting_tokens",
            "Tokens of the requests in the queue (prompt + max_tokens), by tenant and priority. Of a long line the "
            "first requests are read, and stand for the others.",
            _TENANT,
            _PRIORITY,
            only=_LEADER,
        )
        self.oldest = gauge(
            "queue_oldest_seconds",
            "The longest time that a request has waited which is first in its tenant's line; 0 with an empty queue.",
        )
        self.dead_letters = gauge("dead_letters", "Requests in the dead-letter list; 0 on a standby.")
        self.workers = gauge("workers", "Attention workers with a valid lease; 0 on a standby.")
        self.outstanding_tokens = gauge(
            "worker_outstanding_tokens",
            "Tokens (prompt + max_tokens) of the requests assigned to a worker and not yet finished.",
            _WORKER,
            only=_LEADER,
        )
        self.queue_time = series.histogram(
            "request_queue_seconds",
            "Time from a request's admission to its assignment to a worker.",
            buckets=LATENCY_BUCKETS_S,
        )
        self.dispatched = series.counter(
            "dispatched_requests_total",
            "Requests assigned, by what chose the worker: a cached prefix or its load.",
            Label("affinity", values=("prefix", "load")),
        )
        self.reclaimed = series.counter(
            "reclaimed_leases_total",
            "Expired leases reclaimed, by outcome.",
            Label("outcome", values=("requeued", "lost", "dead", "abandoned", "cancelled", "expired")),
        )

    def _placement(self, series: Series) -> None:
        gauge = series.gauge
        self.seats = gauge("expert_seats", "Replicas of each shard group in the routing table.", SHARD, only=_EXPERTS)
        self.table_epoch = gauge("routing_table_epoch", "Epoch of the routing table; 0 if there is none.")
        self.seat_changes = series.counter(
            "seat_changes_total",
            "Seats that the routing table gained (join) or lost, because they left or moved (leave) or died (death).",
            SHARD,
            Label("change", values=("join", "leave", "death")),
            only=_EXPERTS,
        )
        self.repartitions = series.counter(
            "repartitions_total", "Changes of the shard groups' experts by load, completed."
        )
        self.imbalance = gauge(
            "shard_imbalance_ratio",
            "Rows per second and seat of the busiest shard group, over the mean of the groups; NaN where unknown.",
        )
        self.placement_turn = series.histogram(
            "placement_turn_seconds",
            "Duration of one pass over the expert workers: read their seats, update the routing table.",
            buckets=STEP_BUCKETS_S,
        )

    def _scaling(self, series: Series) -> None:
        gauge = series.gauge
        scaled = (_SCALED, _ITS_SHARD)
        self.wanted_replicas = gauge(
            "wanted_replicas",
            "Desired replicas computed by the leading scheduler; 0 when scaled to zero. Absent without a leader.",
            *scaled,
            only=_SCALING,
        )
        self.wanted_reason = gauge(
            "wanted_replicas_reason",
            "1 for the reason why so many replicas are wanted: the load; latencies that miss their target; the minimum "
            "(floor) or maximum (ceiling); hold: fewer would do, but not for long enough; unknown: loads are missing; "
            "asleep: no requests for a while.",
            *scaled,
            Label("reason", values=get_args(ScalingReason)),
            only=_SCALING,
        )
        self.spec_replicas = gauge(
            "told_replicas",
            "Desired replicas currently set in Kubernetes; absent where unknown.",
            *scaled,
            only=_KUBERNETES,
        )
        self.ready_replicas = gauge(
            "ready_replicas", "Ready replicas reported by Kubernetes; absent where unknown.", *scaled, only=_KUBERNETES
        )
        self.needed_replicas = gauge(
            "needed_replicas",
            "Current demand in replicas, before rounding, min/max and the scale-down delay.",
            *scaled,
            only=_SCALING,
        )
        self.boost = gauge(
            "scaling_boost",
            "Factor by which latency targets raise demand above what the load alone needs; 1 means no boost.",
            *scaled,
            only=_SCALING,
        )
        self.shard_rows = gauge(
            "shard_rows_in_flight",
            "Rows (token hidden states) in flight per replica of a shard group.",
            SHARD,
            only=_SCALING,
        )
        self.shard_busy = gauge(
            "shard_busy_ratio",
            "Mean share of time that the replicas of a shard group spend computing.",
            SHARD,
            only=_SCALING,
        )
        self.shard_waiting = gauge(
            "shard_waiting_calls",
            "Calls queued behind another call, per replica of a shard group.",
            SHARD,
            only=_SCALING,
        )
        self.shard_stall = gauge(
            "shard_stall_ratio",
            "Share of the attention workers' step time spent waiting for a shard group.",
            SHARD,
            only=_SCALING,
        )
        self.latency_over_target = gauge(
            "latency_over_target_ratio",
            "Recent p90 latency divided by its target, by latency (ttft, tpot); NaN with too few requests.",
            _LATENCY,
            only=_SCALING,
        )
