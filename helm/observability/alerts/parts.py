"""Alerts about parts that are away: leaders, seats, Redis, processes, keys."""

from __future__ import annotations

from observability.rules import NOT_ASLEEP, OWNER, Alert, most, newly, series

_WORKER = "pod, role, exported_instance"
_EXPERTS, _DEATH = 'role="experts"', 'change="death"'
_KNOWN = " or ".join(
    f"max by (job, instance) (last_over_time({series(name)}[6h]))" for name in ("build_info", "experts_status")
)
"""Targets that are processes of this program: expert workers have the second series, all others the first."""

ALERTS = (
    Alert(
        name="ExpertmeshMetricsAway",
        expr=f"absent({series('scheduler_leader')})",
        wait="1m",
        severity="warning",
        summary="No scheduler is scraped. Replicas stay as they are, and a model that sleeps does not wake.",
        description="Schedulers are away, or Prometheus cannot reach them.",
        page="leader",
    ),
    Alert(
        name="ExpertmeshNobodyLeads",
        expr=f"{most('scheduler_leader')} == 0",
        wait="1m",
        severity="critical",
        summary="No scheduler of {{ $labels.job }} leads, so no request is assigned and replicas stay as they are.",
        description="Schedulers are there, and none holds the lease in Redis. Is Redis away?",
        page="leader",
    ),
    Alert(
        name="ExpertmeshShardWithoutSeat",
        expr=f"{most('expert_seats', 'shard')} == 0\n"
        f"unless on ({OWNER}, shard) {most('wanted_replicas', 'shard', _EXPERTS)} == 0\n{NOT_ASLEEP}",
        wait="1m",
        severity="critical",
        summary="Shard group {{ $labels.shard }} of {{ $labels.job }} has no expert worker, so no request can be "
        "computed.",
        description="The routing table has no seat for the group. Requests wait for --experts-timeout, then fail "
        "with 503.",
        page="shard-without-seat",
    ),
    Alert(
        name="ExpertmeshTargetDown",
        expr=f"up{{<series>}} == 0 and on (job, instance) ({_KNOWN})",
        wait="5m",
        severity="warning",
        summary="Prometheus has not read the metrics of {{ $labels.instance }} of {{ $labels.job }} for 5 minutes.",
        description="It did within the last 6 hours, and the target is still listed: the process hangs or a network "
        "policy is in the way.",
        page="targets",
    ),
    Alert(
        name="ExpertmeshWorkerAway",
        expr=f"min by ({OWNER}, {_WORKER}) ({series('metrics_upstream_up')}) == 0",
        wait="5m",
        severity="warning",
        summary="Process {{ $labels.role }} {{ $labels.exported_instance }} of {{ $labels.job }} {{ $labels.pod }} "
        "is away.",
        description="Its page could not be read for 5 minutes by whoever shows it with its own; no container has "
        "ended.",
        page="targets",
    ),
    Alert(
        name="ExpertmeshRedisAway",
        expr=f"min by ({OWNER}, pod) ({series('gateway_queue_up')}) == 0",
        wait="1m",
        severity="critical",
        summary="A gateway of {{ $labels.job }} does not reach Redis, and refuses requests with 503.",
        description="The gateway is {{ $labels.pod }}. Streams that have begun pause meanwhile.",
        page="redis-away",
    ),
    Alert(
        name="ExpertmeshKeysUnusable",
        expr=f"min by ({OWNER}, pod) ({series('gateway_keys_usable')}) == 0",
        wait="5m",
        severity="warning",
        summary="The file of API keys of {{ $labels.job }} is missing or invalid.",
        description="A gateway ({{ $labels.pod }}) refuses all requests if it is missing, and keeps the old keys if "
        "it is invalid.",
        page="api-keys",
    ),
    Alert(
        name="ExpertmeshWorkerStartsAgain",
        expr=f"increase({series('worker_starts_total')}[15m]) > 2",
        severity="warning",
        summary="Worker {{ $labels.worker }} of {{ $labels.job }} {{ $labels.pod }} ends again and again, in a "
        "container that runs on.",
        description="It was started over twice within 15 minutes.",
        page="restarts",
    ),
    Alert(
        name="ExpertmeshProcessStartsAgain",
        expr=f"increase({series('process_starts_total')}[15m]) > 2",
        severity="warning",
        summary="Process {{ $labels.process }} of the server {{ $labels.instance }} ends again and again.",
        description="`serve` started it over twice within 15 minutes.",
        page="restarts",
    ),
    Alert(
        name="ExpertmeshExpertWorkersDie",
        expr=f"{newly('seat_changes_total', 15, 'shard', _DEATH)} > 2",
        severity="warning",
        summary="Expert workers of shard group {{ $labels.shard }} of {{ $labels.job }} die again and again.",
        description="The leader counted {{ $value | humanize }} seats whose holder stopped renewing its lease within "
        "15 minutes.",
        page="restarts",
    ),
)
