"""Series of a gateway."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from services.metrics.common import (
    LATENCY_BUCKETS_S,
    SHORT_BUCKETS_S,
    TOKEN_COUNT_BUCKETS,
    TOKEN_TIME_BUCKETS_S,
    unreadable,
)
from services.metrics.series import Label, Series

_ROUTE = Label("route", "a route of the API; other where there is none", most=32)
_STATUS = Label("status", "HTTP status", most=32)
_FINISH = Label("finish", values=("stop", "length", "cancelled", "error"))
_CODE = Label("code", "code of an error, as in the API's answers", most=64)
_LISTENER = Label("listener", values=("api", "metrics"))
_STATE = Label("state", values=("head", "body", "rest", "idle", "stalled", "closing", "served"))
_LANE = Label("lane", "thread pool", most=8)
_OBJECTIVE = Label("objective", values=("ttft", "tpot", "availability", "all"))
_MET = Label("met", values=("true", "false"))


class GatewayMetrics:
    """Requests as clients see them. Written by the gateway."""

    def __init__(self, registry: CollectorRegistry) -> None:
        series = Series(registry, "gateway")
        self.definitions = series.definitions
        gauge, counter = series.gauge, series.counter
        self.http_requests = counter("http_requests_total", "HTTP responses, by route and status.", _ROUTE, _STATUS)
        self.requests = counter("requests_total", "Generation requests finished, by finish reason.", _FINISH)
        self.errors = counter("request_errors_total", "Generation requests that failed, by error code.", _CODE)
        self.prompt_tokens = counter("prompt_tokens_total", "Prompt tokens of admitted requests.")
        self.generation_tokens = counter("generation_tokens_total", "Generated tokens delivered to clients.")
        self.lost_attempts = counter(
            "lost_attempts_total",
            "Attempts lost and resubmitted, by reason.",
            Label("reason", "gap, cancelled, or the first word of what the queue says", most=32),
        )
        self.slo_requests = counter(
            "slo_requests_total",
            "Generation requests by objective and whether they met it. availability: not ended or refused by a fault "
            "of the server (cancelled requests and faults of the client do not count); ttft, tpot: where measured, "
            "within --target-ttft and --target-tpot; all: available, and each measured latency within its target.",
            _OBJECTIVE,
            _MET,
        )
        self.unreadable = unreadable(series)
        self._times(series)
        self._levels(series)
        self.refused = counter(
            "gateway_refused_total",
            "Connections and requests refused before any work was done, by reason.",
            Label("reason", "what the bound is of", most=32),
        )
        self.keys_usable = gauge(
            "gateway_keys_usable",
            "0 while the API keys file is missing (all requests are refused) or invalid (old keys stay), else 1.",
        )

    def _times(self, series: Series) -> None:
        histogram = series.histogram
        self.admission = histogram(
            "request_admission_seconds",
            "Time from a request's arrival to its place in the queue: parsing, tokenizing, Redis.",
            buckets=LATENCY_BUCKETS_S,
        )
        self.ttft = histogram(
            "time_to_first_token_seconds",
            "Time from a request's arrival to its first token (TTFT).",
            buckets=LATENCY_BUCKETS_S,
        )
        self.tpot = histogram(
            "time_per_output_token_seconds",
            "Mean time per token of a request after its first (TPOT).",
            buckets=TOKEN_TIME_BUCKETS_S,
        )
        self.inter_token = histogram(
            "inter_token_latency_seconds",
            "Time between consecutive tokens of a request (ITL).",
            buckets=TOKEN_TIME_BUCKETS_S,
        )
        self.delivery = histogram(
            "token_delivery_seconds",
            "Time from the publication of tokens in Redis until they are written to a client that streams.",
            buckets=SHORT_BUCKETS_S,
        )
        self.e2e = histogram(
            "request_duration_seconds",
            "Time from a request's arrival to its end (end-to-end latency).",
            buckets=LATENCY_BUCKETS_S,
        )
        self.prompt_len = histogram(
            "request_prompt_tokens", "Prompt length of a request in tokens.", buckets=TOKEN_COUNT_BUCKETS
        )
        self.output_len = histogram(
            "request_generation_tokens", "Output length of a request in tokens.", buckets=TOKEN_COUNT_BUCKETS
        )
        self.offload_wait = histogram(
            "gateway_offload_wait_seconds",
            "Time that CPU-heavy tasks waited for a thread, by thread pool.",
            _LANE,
            buckets=LATENCY_BUCKETS_S,
        )

    def _levels(self, series: Series) -> None:
        gauge = series.gauge
        self.open_streams = gauge(
            "gateway_requests_in_flight", "Sequences in flight: submitted by this gateway and not yet finished."
        )
        self.queue_up = gauge("gateway_queue_up", "1 while this gateway can reach Redis, else 0.")
        self.answer_bytes = gauge(
            "gateway_answer_bytes",
            "Bytes of responses held in memory: in progress, unread by the client, or kept for a retry.",
        )
        self.connections = gauge(
            "gateway_connections",
            "Open connections, by what they wait for; 'served' is a request being processed.",
            _LISTENER,
            _STATE,
        )
        self.http_in_flight = gauge(
            "gateway_posts_in_flight", "POST requests in flight: authenticated and not yet fully answered."
        )
        self.body_bytes = gauge("gateway_body_bytes", "Bytes of large request bodies being read or tokenized.")
        self.turns_waiting = gauge(
            "gateway_turns_waiting", "Requests received and waiting to be started, in rotation among tenants."
        )
        self.offload_waiting = gauge(
            "gateway_offload_waiting",
            "CPU-heavy tasks (parsing, tokenizing) waiting for a thread, by thread pool.",
            _LANE,
        )
