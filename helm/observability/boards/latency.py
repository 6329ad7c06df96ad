"""Latency: what clients feel, and in which hop of a request the time goes."""

from __future__ import annotations

from grafana_foundation_sdk.builders import timeseries
from observability.boards.board import Board, Row
from observability.panels import Limits, Query, Says, lines, quantiles, spread
from observability.queries import most, quantile, rate, share

HOPS = {
    "admission": "request_admission_seconds",
    "queue": "request_queue_seconds",
    "batch wait": "request_batch_wait_seconds",
    "prefill": "request_prefill_seconds",
    "decode step": "engine_step_seconds",
    "delivery": "token_delivery_seconds",
}
"""Hop of a request, in order, and its histogram."""


def _hops(name: str, part: float) -> timeseries.Panel:
    says = Says(
        title=f"By hop, {name}",
        unit="s",
        shows=f"The {name} of each hop of a request, in order: accepted into the queue (admission), assigned to a "
        f"worker (queue), in the batch (batch wait), first token computed (prefill), each further step (decode "
        f"step), and from Redis to the client (delivery). Quantiles of hops do not add up to that of the whole.",
        act="the longest hop is where to look: queue and batch wait need workers, prefill has long prompts, a decode "
        "step waits for experts, delivery has slow clients or busy gateways.",
    )
    return lines(says, *(Query(expr=quantile(part, hop), legend=legend) for legend, hop in HOPS.items()))


_CLIENTS = Row(
    title="As clients feel it",
    panels=(
        quantiles(
            Says(
                title="Time to first token (TTFT)",
                unit="s",
                shows="From a request's arrival to its first token. Limits are half the default target and the target.",
                act="see the hops below: admission, queue, batch wait and prefill make it up.",
                limits=Limits(amber=1, red=2),
            ),
            "time_to_first_token_seconds",
        ),
        spread(
            Says(
                title="Time to first token, spread",
                unit="s",
                shows="Requests by second in each bucket of time; dots are traced requests.",
                act="two bands are two kinds of requests, such as cached and long prompts: one quantile cannot show "
                "both.",
            ),
            "time_to_first_token_seconds",
        ),
        quantiles(
            Says(
                title="Time per output token (TPOT)",
                unit="s",
                shows="Mean time per token of each request after its first. Limits are half the default target and "
                "the target.",
                act="see decode steps, and the experts for which they wait.",
                limits=Limits(amber=0.05, red=0.1),
            ),
            "time_per_output_token_seconds",
        ),
        spread(
            Says(
                title="Time per output token, spread",
                unit="s",
                shows="Requests by second in each bucket of time per token.",
                act="a second band above the first are requests on slower workers, or through preemptions.",
            ),
            "time_per_output_token_seconds",
        ),
        quantiles(
            Says(
                title="Time between tokens (ITL)",
                unit="s",
                shows="Time between two tokens of a stream, each by itself: shows stutter that a request's mean hides.",
                act="a p99 far above the p50 are steps with large prefill chunks or preemptions: lower "
                "--max-num-batched-tokens.",
                limits=Limits(amber=0.1, red=0.5),
            ),
            "inter_token_latency_seconds",
        ),
        spread(
            Says(
                title="Time between tokens, spread",
                unit="s",
                shows="Tokens by second in each bucket of time since the one before.",
                act="a thin band far above the main one is stutter.",
            ),
            "inter_token_latency_seconds",
        ),
        quantiles(
            Says(
                title="Whole request",
                unit="s",
                shows="From a request's arrival to its end. It grows with the length of answers, so there is no "
                "limit to it.",
                act="compare with the length of answers, under queue and tenants.",
            ),
            "request_duration_seconds",
        ),
        lines(
            Says(
                title="Latency over target",
                unit="none",
                shows="The p90 of recent requests divided by its target, as the autoscaler sees it. Above 1 it asks "
                "for more replicas than the load needs.",
                act="is the boost at work, and has it somewhere to go? See the autoscaler.",
                limits=Limits(amber=0.8, red=1),
            ),
            Query(expr=most("latency_over_target_ratio", "latency"), legend="{{latency}}"),
        ),
    ),
)
_BY_HOP = Row(title="By hop", panels=(_hops("p50", 0.5), _hops("p90", 0.9), _hops("p99", 0.99)))
_EACH = Row(
    title="Each hop",
    panels=(
        quantiles(
            Says(
                title="Admission",
                unit="s",
                shows="From a request's arrival to its place in the queue: reading, parsing, tokenizing, writing to "
                "Redis.",
                act="CPU of gateways (see waits for threads, under queue and tenants) or a slow Redis: add gateways.",
                limits=Limits(amber=0.25, red=1),
                span=8,
            ),
            "request_admission_seconds",
        ),
        quantiles(
            Says(
                title="Queue",
                unit="s",
                shows="From a request's admission to its assignment to a worker.",
                act="workers are full: see the autoscaler, and runbook capacity.",
                limits=Limits(amber=1, red=2),
                span=8,
            ),
            "request_queue_seconds",
        ),
        quantiles(
            Says(
                title="Batch wait",
                unit="s",
                shows="From a worker's taking a request to the first step that has it.",
                act="the batch or the KV cache of workers is full: see workers.",
                limits=Limits(amber=0.5, red=1),
                span=8,
            ),
            "request_batch_wait_seconds",
        ),
        quantiles(
            Says(
                title="Prefill",
                unit="s",
                shows="From the first step that has a request to its first token.",
                act="long prompts, few cached prefixes, or steps that wait for experts.",
                limits=Limits(amber=1, red=2),
                span=8,
            ),
            "request_prefill_seconds",
        ),
        quantiles(
            Says(
                title="Engine step",
                unit="s",
                shows="Duration of an engine step: each gives every sequence of the batch its next token.",
                act="see what it waits for: exchange beside it, stall by shard group under experts.",
                limits=Limits(amber=0.05, red=0.1),
                span=8,
            ),
            "engine_step_seconds",
        ),
        quantiles(
            Says(
                title="Delivery",
                unit="s",
                shows="From a token's entry in Redis to its being written to the client.",
                act="gateways are busy or clients read slowly: see backpressure under workers, and add gateways.",
                limits=Limits(amber=0.05, red=0.25),
                span=8,
            ),
            "token_delivery_seconds",
        ),
    ),
)
_EXCHANGE = Row(
    title="Exchange with the experts",
    panels=(
        lines(
            Says(
                title="Exchange, p50 and p99",
                unit="s",
                shows="Time that a step spends sending rows to the experts (dispatch) and getting their results "
                "(combine), over all layers, by transport. Steps replayed from a CUDA graph are not in it; with "
                "local, dispatch is the computation.",
                act="a transport that is not the one asked for (tcp in place of nccl) or a p99 far off: see who is "
                "slow, under experts.",
            ),
            *(
                Query(
                    expr=quantile(part, "exchange_seconds", "transport, part"),
                    legend=f"{{{{transport}}}} {{{{part}}}} {name}",
                )
                for name, part in {"p50": 0.5, "p99": 0.99}.items()
            ),
        ),
        lines(
            Says(
                title="Share of step time spent waiting for experts",
                unit="percentunit",
                shows="Time in which steps waited for results, of all time in which steps ran.",
                act="runbook hot-shard: which shard group, and does it get replicas?",
                limits=Limits(amber=0.4, red=0.7),
            ),
            Query(expr=share(rate("exchange_wait_seconds_total"), rate("engine_busy_seconds_total")), legend="waiting"),
        ),
        lines(
            Says(
                title="Traffic by transport",
                unit="Bps",
                shows="Bytes by second between attention and experts, by transport and direction.",
                act="compare with what the network can carry; shared memory and local cost none of it.",
            ),
            Query(expr=rate("exchange_bytes_total", "transport, direction"), legend="{{transport}} {{direction}}"),
        ),
        lines(
            Says(
                title="Rows sent again",
                unit="short",
                shows="Rows by second that were sent to another replica, by why.",
                act="runbook steps: which expert worker is late or gone?",
                limits=Limits(amber=1, red=100),
            ),
            Query(expr=rate("resent_rows_total", "reason"), legend="{{reason}}"),
        ),
    ),
)
BOARD = Board(
    name="latency",
    title="Latency",
    shows="Quantiles of what clients feel, their spread, and the hops of a request from its arrival to its tokens.",
    rows=(_CLIENTS, _BY_HOP, _EACH, _EXCHANGE),
)
