"""For each alert what makes it fire and what does not."""

from __future__ import annotations

from testkit.alerts.case import Case, Line, line

SLO = "slo_requests_total"


def _shares(missed: str, met: str, objective: str = "ttft") -> tuple[Line, ...]:
    return (
        line(SLO, missed, objective=objective, met="false"),
        line(SLO, met, objective=objective, met="true"),
    )


def _why(reason: str, values: str = "1x60", role: str = "experts", shard: str = "1") -> Line:
    return line("wanted_replicas_reason", values, role=role, shard=shard, reason=reason)


def _wanted(values: str) -> Line:
    return line("wanted_replicas", values, role="experts", shard="1")


def _told(values: str) -> Line:
    return line("told_replicas", values, role="experts", shard="1")


_STALL = (line("shard_stall_seconds_total", "0+36x30", shard="1"), line("engine_busy_seconds_total", "0+60x30"))
_OVER = line("latency_over_target_ratio", "1.5x20", latency="ttft")
_OTHER_POD = {"pod": "mesh-1", "instance": "10.0.0.2:9000"}
_SHARD = {"role": "experts", "shard": "1"}
_RESTARTS, _ONE_RESTART = "1 1 2 3 4 5 5 5 5 5", "1 1 1 2 2 2 2 2 2 2"

OBJECTIVES = (
    Case(
        alert="ExpertmeshSloBurnsFast",
        at=80,
        labels={"objective": "ttft"},
        fires=(_shares("0+2x90", "0+8x90"),),
        quiet=(
            _shares("0+1x90", "0+9x90"),  # burns at 10
            _shares("0x74 0+9x15", "0+10x90"),  # a spike that has just begun
            _shares("0+9x70 630x20", "0+10x90"),  # a fault that has ended
            _shares("0+0.1x90", "0+0.1x90"),  # 18 requests in an hour, half of them missed
            _shares("0+2x90", "0+8x90", objective="all"),  # would say the same twice
        ),
    ),
    Case(
        alert="ExpertmeshSloBurnsSlowly",
        at=420,
        labels={"objective": "availability"},
        fires=(_shares("0+8x430", "0+92x430", objective="availability"),),
        quiet=(
            _shares("0+4x430", "0+96x430", objective="availability"),
            _shares("0x380 0+50x50", "0+92x430", objective="availability"),  # not for 6 hours
        ),
    ),
    Case(
        alert="ExpertmeshGoodputLow",
        at=45,
        fires=(_shares("0+2x60", "0+8x60", objective="all"), (line(SLO, "0+2x60", objective="all", met="false"),)),
        quiet=(_shares("0+1x60", "0+19x60", objective="all"), _shares("0+2x60", "0+8x60", objective="tpot")),
    ),
)
CAPACITY = (
    Case(
        alert="ExpertmeshSaturated",
        at=15,
        labels={"latency": "ttft"},
        fires=((_OVER, _why("ceiling", role="attention", shard="")),),
        quiet=(
            (_OVER, _why("latency", role="attention", shard="")),
            (line("latency_over_target_ratio", "0.9x20", latency="ttft"), _why("ceiling", role="attention", shard="")),
            (
                line(
                    "latency_over_target_ratio",
                    "NaN " * 16,
                    latency="ttft",
                ),
                _why("ceiling", role="attention", shard=""),
            ),
        ),
    ),
    Case(
        alert="ExpertmeshQueueOld",
        at=8,
        fires=((line("queue_oldest_seconds", "90x10"),),),
        quiet=((line("queue_oldest_seconds", "30x10"),), (line("queue_oldest_seconds", "0x6 90x10"),)),
    ),
    Case(
        alert="ExpertmeshAtMostReplicas",
        at=35,
        labels=_SHARD,
        fires=((_why("ceiling"),),),
        quiet=((_why("load"),), (_why("ceiling", "_x20 1x20"),)),
    ),
    Case(
        alert="ExpertmeshHotShard",
        at=25,
        labels={"shard": "1"},
        fires=(
            (line("shard_busy_ratio", "0.95x30", shard="1"), _why("ceiling")),
            (*_STALL, line("shard_imbalance_ratio", "2x30")),
        ),
        quiet=(
            (line("shard_busy_ratio", "0.95x30", shard="1"), _why("load")),  # replicas are on their way
            (line("shard_busy_ratio", "0.95x30", shard="1"), _why("ceiling", shard="0")),
            (*_STALL, line("shard_imbalance_ratio", "1.1x30")),
            (*_STALL, line("shard_imbalance_ratio", "1.1x20 2x10")),  # replicas are on their way
            (line("shard_busy_ratio", "0.5x30", shard="1"), line("shard_imbalance_ratio", "2x30")),
        ),
    ),
    Case(
        alert="ExpertmeshKvCacheFull",
        at=15,
        keeps="pod",
        fires=((line("kv_cache_usage_ratio", "0.99x20"), line("requests_waiting", "3x20")),),
        quiet=(
            (line("kv_cache_usage_ratio", "0.99x20"), line("requests_waiting", "0x20")),
            (line("kv_cache_usage_ratio", "0.9x20"), line("requests_waiting", "3x20")),
        ),
    ),
    Case(
        alert="ExpertmeshPreemptions",
        at=25,
        fires=((line("preemptions_total", "0+2x30"), line("engine_steps_total", "0+100x30")),),
        quiet=((line("preemptions_total", "0+2x30"), line("engine_steps_total", "0+1000x30")),),
    ),
    Case(
        alert="ExpertmeshReplicasNotFollowed",
        at=8,
        labels=_SHARD,
        fires=((_wanted("4x10"), _told("2x10")),),
        quiet=((_wanted("4x10"), _told("4x10")), (_wanted("104x10"), _told("100x10")), (_wanted("4x10"),)),
    ),
    Case(
        alert="ExpertmeshReplicasNotReady",
        at=18,
        labels=_SHARD,
        fires=((_told("4x20"), line("ready_replicas", "3x20", **_SHARD)),),
        quiet=(
            (_told("4x20"), line("ready_replicas", "4x20", **_SHARD)),
            (_told("4x20"),),
            (_told("4x20"), line("ready_replicas", "3x20", **_SHARD), line("sleep_level", "1x20")),
        ),
    ),
    Case(
        alert="ExpertmeshAsleepWithRequests",
        at=8,
        fires=((line("queue_requests", "3x10"), line("workers", "0x10")),),
        quiet=(
            (
                line("queue_requests", "3x10"),
                line("workers", "0x10"),
                line("workers", "1x10", **_OTHER_POD),
            ),
            (line("queue_requests", "0x10"), line("workers", "0x10")),
        ),
    ),
)
PARTS = (
    Case(
        alert="ExpertmeshMetricsAway",
        at=5,
        keeps="selector",
        fires=((),),
        quiet=((line("scheduler_leader", "0x10"),),),
    ),
    Case(
        alert="ExpertmeshNobodyLeads",
        at=5,
        fires=((line("scheduler_leader", "0x10"), line("scheduler_leader", "0x10", **_OTHER_POD)),),
        quiet=((line("scheduler_leader", "0x10"), line("scheduler_leader", "1x10", **_OTHER_POD)), ()),
    ),
    Case(
        alert="ExpertmeshShardWithoutSeat",
        at=5,
        labels={"shard": "1"},
        fires=((line("expert_seats", "0x10", shard="1"), _wanted("1x10")), (line("expert_seats", "0x10", shard="1"),)),
        quiet=(
            (line("expert_seats", "0x10", shard="1"), _wanted("0x10")),  # asleep
            (line("expert_seats", "1x10", shard="1"), _wanted("1x10")),
        ),
    ),
    Case(
        alert="ExpertmeshTargetDown",
        at=20,
        keeps="all",
        fires=(
            (line("build_info", "1x5 _x20"), line("up", "1x5 0x20")),
            (line("experts_status", "1x5 _x20", status="ready"), line("up", "1x5 0x20")),
        ),
        quiet=((line("up", "1x5 0x20"),), (line("build_info", "1x20"), line("up", "1x20"))),
    ),
    Case(
        alert="ExpertmeshWorkerAway",
        at=8,
        keeps="pod",
        labels={"role": "attention-1"},
        fires=((line("metrics_upstream_up", "0x10", role="attention-1"),),),
        quiet=((line("metrics_upstream_up", "1x10", role="attention-1"),),),
    ),
    Case(
        alert="ExpertmeshRedisAway",
        at=5,
        keeps="pod",
        fires=((line("gateway_queue_up", "0x10"),),),
        quiet=((line("gateway_queue_up", "1x10"),), (line("gateway_queue_up", "1x4 0x1 1x10"),)),
    ),
    Case(
        alert="ExpertmeshKeysUnusable",
        at=8,
        keeps="pod",
        fires=((line("gateway_keys_usable", "0x10"),),),
        quiet=((line("gateway_keys_usable", "1x10"),),),
    ),
    Case(
        alert="ExpertmeshWorkerStartsAgain",
        at=9,
        keeps="all",
        labels={"worker": "attention-1"},
        fires=((line("worker_starts_total", _RESTARTS, worker="attention-1"),),),
        quiet=((line("worker_starts_total", _ONE_RESTART, worker="attention-1"),),),
    ),
    Case(
        alert="ExpertmeshProcessStartsAgain",
        at=9,
        keeps="all",
        labels={"process": "experts-1"},
        fires=((line("process_starts_total", _RESTARTS, process="experts-1"),),),
        quiet=((line("process_starts_total", _ONE_RESTART, process="experts-1"),),),
    ),
    Case(
        alert="ExpertmeshExpertWorkersDie",
        at=9,
        labels={"shard": "1"},
        fires=(
            (line("seat_changes_total", _RESTARTS, shard="1", change="death"),),
            (
                line("seat_changes_total", "_x4 3x10", shard="1", change="death"),
            ),  # three at once, before the first scrape
        ),
        quiet=(
            (line("seat_changes_total", _RESTARTS, shard="1", change="leave"),),
            (line("seat_changes_total", _ONE_RESTART, shard="1", change="death"),),
        ),
    ),
)
FAULTS = (
    Case(
        alert="ExpertmeshStepsRepeated",
        at=25,
        fires=((line("repeated_steps_total", "0+2x30"), line("engine_steps_total", "0+100x30")),),
        quiet=((line("repeated_steps_total", "0+2x30"), line("engine_steps_total", "0+1000x30")),),
    ),
    Case(
        alert="ExpertmeshStepsFail",
        at=30,
        labels={"reason": "error"},
        fires=(
            (line("step_failures_total", "_x20 1x20", reason="error"),),
            (line("step_failures_total", "1x25 2x20", reason="error"),),
        ),
        quiet=(
            (line("step_failures_total", "1x40", reason="error"),),
            (line("step_failures_total", "0+1x40", reason="experts"),),
        ),
    ),
    Case(
        alert="ExpertmeshRequestsGivenUp",
        at=15,
        fires=((line("given_up_attempts_total", "0x10 1x10"),),),
        quiet=((line("given_up_attempts_total", "5x20"),),),
    ),
    Case(
        alert="ExpertmeshDeadLetters",
        at=5,
        fires=((line("dead_letters", "1x10"),),),
        quiet=((line("dead_letters", "0x10"),),),
    ),
    Case(
        alert="ExpertmeshPeersRefused",
        at=30,
        labels={"reason": "weights_mismatch"},
        fires=(
            (line("refused_peers_total", "_x20 1x20", reason="weights_mismatch"),),
            (line("experts_refused_peers_total", "_x20 1x20", reason="weights_mismatch"),),
        ),
        quiet=(
            (line("refused_peers_total", "1x40", reason="weights_mismatch"),),
            (line("refused_peers_total", "0+1x40", reason="seat_full"),),
        ),
    ),
)
CASES = (*OBJECTIVES, *CAPACITY, *PARTS, *FAULTS)
