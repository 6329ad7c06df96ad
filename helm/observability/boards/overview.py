"""Overview: do requests meet their targets, how fast is the error budget spent, what fails, is every part up."""

from __future__ import annotations

from observability.boards.board import SLO, Board, Row
from observability.panels import Limits, Query, Says, lines, number, quantiles, states
from observability.queries import missed, most, rate, series, share, total

_ALL = 'objective="all"'
_GOOD = 'objective="all",met="true"'
_BURN = {"5m": "5 minutes", "30m": "30 minutes", "1h": "1 hour", "6h": "6 hours"}

_OBJECTIVES = Row(
    title="Objectives",
    panels=(
        number(
            Says(
                title="Goodput",
                unit="reqps",
                shows="Requests by second that ended well and met both latency targets.",
                act="compare with the arrivals beside it. Where they part, the next panels say which target is missed.",
                span=6,
                height=5,
            ),
            Query(expr=rate("slo_requests_total", labels=_GOOD)),
        ),
        number(
            Says(
                title="Requests",
                unit="reqps",
                shows="Requests by second that count towards the objectives: faults of clients (4xx) and "
                "cancellations do not.",
                act="0 with clients that send means that they do not get through: see errors, and the queue.",
                span=6,
                height=5,
            ),
            Query(expr=rate("slo_requests_total", labels=_ALL)),
        ),
        number(
            Says(
                title="Objectives met",
                unit="percentunit",
                shows="Share of requests that ended well and met both latency targets.",
                act="the burn rate says for how long already; latency by hop says where the time goes.",
                limits=Limits(amber=0.995, red=0.99, below=True),
                span=6,
                height=5,
            ),
            Query(expr=f"1 - ({missed(labels=_ALL)})"),
            decimals=2,
        ),
        number(
            Says(
                title="Burn rate, 1 hour",
                unit="none",
                shows="How many times faster than the objective allows requests miss their targets. At 1 the error "
                "budget of a month lasts a month, at 14.4 two days.",
                act="runbook slo. See which objective burns below.",
                limits=Limits(amber=1, red=14.4),
                span=6,
                height=5,
            ),
            Query(expr=f"({missed(labels=_ALL, window='1h')}) / (1 - $slo)"),
            decimals=1,
        ),
        lines(
            Says(
                title="Met, by objective",
                unit="percentunit",
                shows="Share of requests that met each objective: first token in time (ttft), tokens in time (tpot), "
                "not ended by a fault of the server (availability), and all of them.",
                act="ttft points at the queue or prefill, tpot at decode or the experts, availability at errors.",
                limits=Limits(amber=0.995, red=0.99, below=True),
            ),
            Query(expr=f"1 - ({missed('objective')})", legend="{{objective}}"),
            most=1,
        ),
        lines(
            Says(
                title="Burn rate, by window",
                unit="none",
                shows="Misses of any objective, as a multiple of what the objective allows, over several windows. "
                "Alerts fire where a short and a long window agree: 14.4 for 5 minutes and 1 hour, 6 for 30 minutes "
                "and 6 hours.",
                act="a short window alone is a spike that has begun or a fault that has ended; both together need "
                "someone now.",
                limits=Limits(amber=6, red=14.4),
            ),
            *(
                Query(expr=f"({missed(labels=_ALL, window=window)}) / (1 - $slo)", legend=legend)
                for window, legend in _BURN.items()
            ),
        ),
        quantiles(
            Says(
                title="Time to first token (TTFT)",
                unit="s",
                shows="From a request's arrival to its first token, as its client waits. Limits are half the default "
                "target and the target (--target-ttft).",
                act="see latency by hop: a long queue needs workers, a long prefill has long prompts or a busy batch.",
                limits=Limits(amber=1, red=2),
            ),
            "time_to_first_token_seconds",
        ),
        quantiles(
            Says(
                title="Time per output token (TPOT)",
                unit="s",
                shows="Mean time per token of a request after its first. Limits are half the default target and the "
                "target (--target-tpot).",
                act="see the experts: a shard group for which every step waits; then batch sizes and preemptions of "
                "workers.",
                limits=Limits(amber=0.05, red=0.1),
            ),
            "time_per_output_token_seconds",
        ),
    ),
)
_ANSWERED = rate("http_requests_total", "route")
_FAILED = rate("http_requests_total", "route", 'status=~"5.."')
_FAULTS = Row(
    title="Errors and traffic",
    panels=(
        lines(
            Says(
                title="Requests that failed, by code",
                unit="reqps",
                shows="Generation requests that ended with an error. Codes are those of the API.",
                act="`expertmesh queue list` shows dead letters; a gateway's log names each request with its code.",
                limits=Limits(amber=0.01, red=0.1),
            ),
            Query(expr=rate("request_errors_total", "code"), legend="{{code}}"),
            stacked=True,
        ),
        lines(
            Says(
                title="Answers of the server's faults (5xx)",
                unit="percentunit",
                shows="Share of HTTP answers with a status of 500 or above, by route.",
                act="503 says that the queue is full or Redis is away; 500 is a defect: look into the gateway's log.",
                limits=Limits(amber=0.001, red=0.01),
            ),
            Query(
                expr=share(f"({_FAILED} or 0 * {_ANSWERED})", _ANSWERED),
                legend="{{route}}",
            ),
        ),
        lines(
            Says(
                title="Tokens",
                unit="short",
                shows="Tokens by second: prompts that were admitted, and tokens delivered to clients.",
                act="throughput at a glance; a fall with a queue that grows means lost capacity.",
            ),
            Query(expr=rate("generation_tokens_total"), legend="generated"),
            Query(expr=rate("prompt_tokens_total"), legend="prompts"),
        ),
        lines(
            Says(
                title="Requests by finish reason",
                unit="reqps",
                shows="Requests that finished, by why: stop and length are normal, cancelled is a client that went "
                "away.",
                act="many cancellations with a long time to first token are clients that gave up.",
            ),
            Query(expr=rate("requests_total", "finish"), legend="{{finish}}"),
            stacked=True,
        ),
        lines(
            Says(
                title="Lost and repeated work",
                unit="ops",
                shows="Attempts lost with a worker and submitted again, attempts given up since no replica of some "
                "experts answered, steps run again, and requests put out of the batch since KV blocks ran out.",
                act="attempts: which worker ended, and why (workers). Steps: runbook steps. Preemptions: "
                "runbook kv-cache.",
                limits=Limits(amber=0.1, red=1),
            ),
            Query(expr=rate("lost_attempts_total", "reason"), legend="lost: {{reason}}"),
            Query(expr=rate("given_up_attempts_total"), legend="given up"),
            Query(expr=rate("stale_results_total"), legend="results of a former attempt"),
            Query(expr=rate("repeated_steps_total"), legend="steps again"),
            Query(expr=rate("preemptions_total"), legend="preempted"),
        ),
        lines(
            Says(
                title="In the queue and in flight",
                unit="short",
                shows="Requests that wait for a worker, and sequences that gateways have submitted and not finished.",
                act="a queue that grows while the number in flight stands still is at its capacity: see the "
                "autoscaler.",
            ),
            Query(expr=most("queue_requests"), legend="queued"),
            Query(expr=total("gateway_requests_in_flight"), legend="in flight"),
        ),
    ),
)
_PARTS = Row(
    title="Parts",
    panels=(
        number(
            Says(
                title="Leaders",
                unit="none",
                shows="Schedulers that lead. There is to be one for each release; without it no request is assigned.",
                act="runbook leader: is Redis there, do schedulers run?",
                limits=Limits(amber=1, red=0.5, below=True),
                span=6,
                height=5,
            ),
            Query(expr=total("scheduler_leader")),
        ),
        number(
            Says(
                title="Attention workers",
                unit="none",
                shows="Attention workers with a valid lease.",
                act="none with requests in the queue: runbook replicas.",
                limits=Limits(amber=1, red=0.5, below=True),
                span=6,
                height=5,
            ),
            Query(expr=most("workers")),
        ),
        number(
            Says(
                title="Dead letters",
                unit="none",
                shows="Requests that are not tried again, since they lost too many workers.",
                act="runbook lost-requests: `expertmesh queue list` explains each.",
                limits=Limits(amber=1, red=1),
                span=6,
                height=5,
            ),
            Query(expr=most("dead_letters")),
        ),
        number(
            Says(
                title="Gateways that reach Redis",
                unit="percentunit",
                shows="Lowest over gateways: 1 while each reaches Redis.",
                act="runbook redis-away. Clients get 503 meanwhile.",
                limits=Limits(amber=1, red=1, below=True),
                span=6,
                height=5,
            ),
            Query(expr=f"min ({series('gateway_queue_up')})"),
        ),
        states(
            Says(
                title="Processes",
                unit="none",
                shows="Whether the metrics of each process could be read: by Prometheus, and, for processes that "
                "share a page, by whoever has that page.",
                act="runbook targets.",
                limits=Limits(amber=1, red=1, below=True),
                span=16,
            ),
            Query(
                expr=f"up and on (job, instance) (last_over_time({series('build_info')}[$__range]) or "
                f"last_over_time({series('experts_status')}[$__range]))",
                legend="{{pod}} {{instance}}",
            ),
            Query(expr=series("metrics_upstream_up"), legend="{{pod}} {{role}} {{exported_instance}}"),
            names={"0": "away", "1": "up"},
        ),
        states(
            Says(
                title="Sleep of the model",
                unit="none",
                shows="The level at which an operator sent the model to sleep; requests wait in the queue meanwhile.",
                act="POST /wake_up ends it.",
                span=8,
            ),
            Query(expr=most("sleep_level"), legend="level"),
            names={"0": "serves", "1": "asleep, level 1", "2": "asleep, level 2"},
        ),
    ),
)
BOARD = Board(
    name="overview",
    title="Overview",
    shows="Whether requests meet their targets, how fast the error budget is spent, what fails, and whether all "
    "parts are up.",
    rows=(_OBJECTIVES, _FAULTS, _PARTS),
    settings=(SLO,),
)
