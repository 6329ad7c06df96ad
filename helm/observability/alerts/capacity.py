"""Alerts about capacity: latencies that have nowhere to go, the queue, hot shard groups, KV cache, replicas."""

from __future__ import annotations

from observability.rules import NOT_ASLEEP, OWNER, Alert, most, rate, series

_WORKER = "pod, role, exported_instance"
_CEILING = most("wanted_replicas_reason", "role, shard", 'reason="ceiling"')
_STALLED = (
    f"{rate('shard_stall_seconds_total', '2m', 'shard')}"
    f" / on ({OWNER}) group_left () {rate('engine_busy_seconds_total', '2m')}"
)
_HOT = f"({most('shard_busy_ratio', 'shard')} > 0.9 or {_STALLED} > 0.5)"
_UNEVEN = f"max by ({OWNER}) (min_over_time({series('shard_imbalance_ratio')}[9m]))"
_AT_MOST = most("wanted_replicas_reason", "shard", 'role="experts",reason="ceiling"')

ALERTS = (
    Alert(
        name="ExpertmeshSaturated",
        expr=f"{most('latency_over_target_ratio', 'latency')} > 1\nand on ({OWNER})\n{_CEILING} == 1",
        wait="10m",
        severity="warning",
        summary="{{ $labels.job }} is at its capacity: {{ $labels.latency }} is over its target, and replicas are at "
        "their most.",
        description="The p90 is {{ $value | humanize }} times its target, and the autoscaler may not add what it "
        "would need.",
        page="capacity",
    ),
    Alert(
        name="ExpertmeshQueueOld",
        expr=f"{most('queue_oldest_seconds')} > <queueSeconds>\n{NOT_ASLEEP}",
        wait="2m",
        severity="warning",
        summary="A request has waited {{ $value | humanizeDuration }} in the queue of {{ $labels.job }}.",
        description="Requests arrive faster than workers take them, or nobody assigns them.",
        page="capacity",
    ),
    Alert(
        name="ExpertmeshAtMostReplicas",
        expr=f"{_CEILING} == 1",
        wait="30m",
        severity="info",
        summary="The replicas of {{ $labels.role }} {{ $labels.shard }} of {{ $labels.job }} have been at their most "
        "for long.",
        description="The load asks for more than autoscaling in the chart's values (or --max-replicas) allows.",
        page="capacity",
    ),
    Alert(
        name="ExpertmeshHotShard",
        expr=f"{_HOT} and on ({OWNER}, shard) {_AT_MOST} == 1\nor\n{_HOT} and on ({OWNER}) {_UNEVEN} > 1.5",
        wait="1m",
        severity="warning",
        summary="Shard group {{ $labels.shard }} of {{ $labels.job }} is hot and gets no replica.",
        description="Its workers compute nearly all the time, or half of the steps' time is spent waiting for it, "
        "while it has its most replicas already, or for 10 minutes more rows by replica than other groups.",
        page="hot-shard",
    ),
    Alert(
        name="ExpertmeshKvCacheFull",
        expr=f"max by ({OWNER}, {_WORKER}) (max_over_time({series('kv_cache_usage_ratio')}[50s])) > 0.97\n"
        f"and\nmax by ({OWNER}, {_WORKER}) (max_over_time({series('requests_waiting')}[50s])) > 0",
        wait="1m",
        severity="warning",
        summary="The KV cache of a worker of {{ $labels.job }} is full, and sequences wait for it.",
        description="{{ $value | humanizePercentage }} of the blocks of {{ $labels.pod }} {{ "
        "$labels.exported_instance }} are in use by live sequences.",
        page="kv-cache",
    ),
    Alert(
        name="ExpertmeshPreemptions",
        expr=f"{rate('preemptions_total', '10m')} / {rate('engine_steps_total', '10m')} > 0.01",
        wait="10m",
        severity="warning",
        summary="Workers of {{ $labels.job }} put sequences out of the batch for lack of KV blocks, and compute them "
        "again.",
        description="{{ $value | humanizePercentage }} of steps had a preemption.",
        page="kv-cache",
    ),
    Alert(
        name="ExpertmeshReplicasNotFollowed",
        expr=f"abs({most('wanted_replicas', 'role, shard')} - {most('told_replicas', 'role, shard')})"
        f" > 0.1 * {most('told_replicas', 'role, shard')}",
        wait="5m",
        severity="warning",
        summary="{{ $labels.job }} has wanted other replicas of {{ $labels.role }} {{ $labels.shard }} than "
        "Kubernetes is set to.",
        description="The difference is {{ $value | humanize }}. Does KEDA run, and reach Prometheus?",
        page="replicas",
    ),
    Alert(
        name="ExpertmeshReplicasNotReady",
        expr=f"{most('told_replicas', 'role, shard')} > {most('ready_replicas', 'role, shard')}\n{NOT_ASLEEP}",
        wait="15m",
        severity="warning",
        summary="Replicas of {{ $labels.role }} {{ $labels.shard }} of {{ $labels.job }} do not become ready.",
        description="Kubernetes is set to {{ $value | humanize }} of them, and fewer are ready.",
        page="replicas",
    ),
    Alert(
        name="ExpertmeshAsleepWithRequests",
        expr=f"{most('queue_requests')} > 0 and {most('workers')} == 0\n{NOT_ASLEEP}",
        wait="3m",
        severity="critical",
        summary="Requests of {{ $labels.job }} wait, and no attention worker has been there to take them.",
        description="{{ $value | humanize }} requests are in the queue. The model does not wake, or its workers do "
        "not start.",
        page="replicas",
    ),
)
