"""Autoscaler: what it needs, wants, set in Kubernetes and got, and why."""

from __future__ import annotations

from grafana_foundation_sdk.builders import timeseries
from observability.boards.board import Board, Row
from observability.panels import Limits, Query, Says, lines, states
from observability.queries import most, quantile

_SEEN = {
    "needed": "needed_replicas",
    "wanted": "wanted_replicas",
    "set": "told_replicas",
    "ready": "ready_replicas",
}
_ROLES = {"gateway": "Gateways", "attention": "Attention workers", "experts": "Expert workers, by shard group"}


def _replicas(role: str) -> timeseries.Panel:
    says = Says(
        title=_ROLES[role],
        unit="none",
        shows="Replicas that the load needs, that the leader wants after rounding, bounds and delays, that "
        "Kubernetes is set to, and that are ready. Both of the latter are absent outside a cluster.",
        act="where two neighbours part: needed and wanted, see why below; wanted and set, is KEDA there (runbook "
        "replicas); set and ready, do pods start (runbook replicas)?",
        span=24 if role == "experts" else 12,
    )
    shown = " {{shard}}" if role == "experts" else ""
    return lines(
        says,
        *(Query(expr=most(name, "shard", f'role="{role}"'), legend=legend + shown) for legend, name in _SEEN.items()),
    )


_COUNTS = Row(title="Replicas", panels=tuple(_replicas(role) for role in _ROLES))
_WHY = Row(
    title="Why",
    panels=(
        states(
            Says(
                title="Why it wants what it wants",
                unit="none",
                shows="The reason that holds for each role and shard group: load, latency (a boost), floor and "
                "ceiling (bounds), hold (fewer would do, but not for long enough), unknown (loads are missing), "
                "asleep.",
                act="a ceiling that stays: runbook capacity. Unknown that stays: does the leader reach its workers?",
                span=24,
                height=10,
            ),
            Query(
                expr=f"{most('wanted_replicas_reason', 'role, shard, reason')} == 1",
                legend="{{role}} {{shard}}: {{reason}}",
            ),
            names={"1": "holds"},
        ),
        lines(
            Says(
                title="Boost",
                unit="none",
                shows="Factor by which latency targets raise the demand above what the load alone needs; 1 is none.",
                act="a boost that stays says that the load alone does not explain the latency: prompts are long, or "
                "workers slow.",
                limits=Limits(amber=1.5, red=2),
            ),
            Query(expr=most("scaling_boost", "role, shard"), legend="{{role}} {{shard}}"),
        ),
        lines(
            Says(
                title="Latency over target",
                unit="none",
                shows="The p90 of recent requests divided by its target. Above 1 the autoscaler boosts.",
                act="above 1 with replicas at their most: raise the most, or the target.",
                limits=Limits(amber=0.8, red=1),
            ),
            Query(expr=most("latency_over_target_ratio", "latency"), legend="{{latency}}"),
        ),
        lines(
            Says(
                title="Load of shard groups",
                unit="percentunit",
                shows="What the demand for expert workers follows from: time spent computing, and waited for.",
                act="busy near 1 and wanted replicas that do not grow: see the reason above.",
                limits=Limits(amber=0.8, red=0.95),
            ),
            Query(expr=most("shard_busy_ratio", "shard"), legend="busy {{shard}}"),
            Query(expr=most("shard_stall_ratio", "shard"), legend="waited for {{shard}}"),
        ),
        lines(
            Says(
                title="Work of attention workers",
                unit="short",
                shows="Tokens (prompt + max_tokens) in the queue, and assigned to each worker and not finished.",
                act="workers that differ much: one is slow, or was just started.",
            ),
            Query(expr=most("queue_tokens"), legend="queued"),
            Query(expr=most("worker_outstanding_tokens", "worker"), legend="{{worker}}"),
        ),
        lines(
            Says(
                title="Pass over the expert workers",
                unit="s",
                shows="How long the leader takes to read all expert workers and update the routing table.",
                act="above a second with thousands of workers: see docs/scale.md. Else Redis is slow.",
                limits=Limits(amber=0.5, red=1),
            ),
            Query(expr=quantile(0.5, "placement_turn_seconds"), legend="p50"),
            Query(expr=quantile(0.99, "placement_turn_seconds"), legend="p99"),
        ),
    ),
)
BOARD = Board(
    name="autoscaler",
    title="Autoscaler",
    shows="Replicas needed, wanted, set in Kubernetes and ready, by role and shard group, and the reasons for them.",
    rows=(_COUNTS, _WHY),
)
