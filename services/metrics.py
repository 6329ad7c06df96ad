"""Every Prometheus series: its name, labels, buckets and unit.

One class per role, built on a registry that the caller owns, so that two roles fit in one process. Labels are
bounded: no request id, no API key, no expert id (experts appear as the ``rank`` of the busiest and per shard).
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_PREFIX = "expertmesh_"
_LATENCY_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1, 2.5, 5, 10, 20, 40, 80, 160, 640, 2560),
)
_TOKEN_TIME_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 10),
)
_STEP_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2.5, 10)
_TOKEN_COUNT_BUCKETS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_GPU_MEMORY = "Memory of this worker's GPU, by all processes on it: used, free. No series without a GPU."
_REFUSED_PEERS = "Connections between workers refused, or ended for what the other side is or sent, by reason."
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of a page in the text format."""
UPSTREAM_UP = _PREFIX + "metrics_upstream_up"
"""Series that is 1 where a sibling's page could be read, else 0. Written by whoever merges the siblings' pages."""
TOP_EXPERTS = 4
"""How many of a layer's busiest experts have a series of their own."""
ALL_LAYERS = "all"
"""Value of the label ``layer`` where all layers are counted together, that is without --layer-series."""


def unreadable(registry: CollectorRegistry, role: str = "") -> Counter:
    """Return the counter of unreadable messages, which every role has that reads from Redis."""
    text = "Messages and records in Redis that could not be read, by kind; see `expertmesh queue unreadable`."
    return _Series(registry, role).counter("unreadable_messages_total", text, "kind")


class _Series:
    """Makes series in ``registry`` whose names begin with the project's prefix and that of a role."""

    def __init__(self, registry: CollectorRegistry, role: str = "") -> None:
        self._registry, self._prefix = registry, _PREFIX + role

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(self._prefix + name, text, labels, registry=self._registry)

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(self._prefix + name, text, labels, registry=self._registry)

    def histogram(self, name: str, text: str, *labels: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(self._prefix + name, text, labels, buckets=buckets, registry=self._registry)


class MachineMetrics:
    """The workers of one machine. Written by `expertmesh workers`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.starts = _Series(registry).counter(
            "worker_starts_total",
            "Times that a worker of this machine was started: once, and again whenever it had ended.",
            "worker",
        )


class GatewayMetrics:
    """Requests as clients see them. Written by the gateway."""

    def __init__(self, registry: CollectorRegistry) -> None:
        series = _Series(registry)
        gauge, counter, histogram = series.gauge, series.counter, series.histogram
        self.http_requests = counter("http_requests_total", "HTTP responses by route and status.", "route", "status")
        self.requests = counter("requests_total", "Generation requests that ended, by finish reason.", "finish")
        self.errors = counter("request_errors_total", "Generation requests that failed, by error code.", "code")
        self.prompt_tokens = counter("prompt_tokens_total", "Prompt tokens of admitted requests.")
        self.generation_tokens = counter("generation_tokens_total", "Generated tokens delivered to clients.")
        self.lost_attempts = counter("lost_attempts_total", "Attempts resubmitted, by reason.", "reason")
        self.unreadable = unreadable(registry)
        self.ttft = histogram(
            "time_to_first_token_seconds", "From the request's arrival to its first token.", buckets=_LATENCY_BUCKETS_S
        )
        self.tpot = histogram(
            "time_per_output_token_seconds",
            "Mean gap between a request's tokens after the first.",
            buckets=_TOKEN_TIME_BUCKETS_S,
        )
        self.inter_token = histogram(
            "inter_token_latency_seconds", "Gap between two tokens of a request.", buckets=_TOKEN_TIME_BUCKETS_S
        )
        self.e2e = histogram(
            "request_duration_seconds", "From the request's arrival to its end.", buckets=_LATENCY_BUCKETS_S
        )
        self.prompt_len = histogram("request_prompt_tokens", "Prompt length, tokens.", buckets=_TOKEN_COUNT_BUCKETS)
        self.output_len = histogram(
            "request_generation_tokens", "Generated length, tokens.", buckets=_TOKEN_COUNT_BUCKETS
        )
        self.open_streams = gauge("gateway_requests_in_flight", "Sequences this gateway waits for.")
        self.queue_up = gauge("gateway_queue_up", "1 while Redis answers this gateway.")
        self.answer_bytes = gauge("gateway_answer_bytes", "Memory of answers under way, unread and kept for a retry.")
        self.connections = gauge(
            "gateway_connections", "Connections by what they wait for; served: for this server.", "listener", "state"
        )
        self.http_in_flight = gauge("gateway_posts_in_flight", "POST requests from their key to their answer's end.")
        self.body_bytes = gauge("gateway_body_bytes", "Bytes of larger bodies that are read or wait for their tokens.")
        self.keys_usable = gauge(
            "gateway_keys_usable", "0 while the file of API keys is gone (all are refused) or broken."
        )
        self.refused = counter(
            "gateway_refused_total", "Connections and requests refused before anything was done for them.", "reason"
        )
        self.turns_waiting = gauge("gateway_turns_waiting", "Requests that have come and wait for their turn to begin.")
        self.offload_waiting = gauge("gateway_offload_waiting", "Pieces of heavy work that wait for a thread.", "lane")
        self.offload_wait = histogram(
            "gateway_offload_wait_seconds", "For how long such pieces waited.", "lane", buckets=_LATENCY_BUCKETS_S
        )


class SchedulerMetrics:
    """The queue and the dispatch. Written by the scheduler; gauges are meaningful on the leader."""

    def __init__(self, registry: CollectorRegistry) -> None:
        series = _Series(registry)
        gauge, histogram = series.gauge, series.histogram
        self.unreadable = unreadable(registry)
        self.leader = gauge("scheduler_leader", "1 on the scheduler that leads.")
        self.queued_requests = gauge("queue_requests", "Requests waiting in the queue.")
        self.queued_tokens = gauge("queue_tokens", "Tokens (prompt + max_tokens) waiting in the queue.")
        self.dead_letters = gauge("dead_letters", "Requests in the dead-letter list.")
        self.workers = gauge("workers", "Attention workers under lease.")
        self.outstanding_tokens = gauge("worker_outstanding_tokens", "Tokens assigned and not ended.", "worker")
        self.queue_time = histogram(
            "request_queue_seconds", "From admission to assignment.", buckets=_LATENCY_BUCKETS_S
        )
        self.dispatched = series.counter("dispatched_requests_total", "Requests assigned, by affinity.", "affinity")
        self.seats = gauge("expert_seats", "Expert workers in the routing table, by shard group.", "shard")
        self.table_epoch = gauge("routing_table_epoch", "Epoch of the routing table; 0 without one.")
        self.placement_turn = histogram(
            "placement_turn_seconds",
            "One look at the expert workers' seats, and what followed from it.",
            buckets=_STEP_BUCKETS_S,
        )
        self.wanted_replicas = gauge(
            "wanted_replicas", "Replicas that the leader wants; 0: asleep. No series without a leader.", "role", "shard"
        )
        self.spec_replicas = gauge(
            "told_replicas", "Replicas that Kubernetes is to keep; no series where that is not known.", "role", "shard"
        )
        self.ready_replicas = gauge("ready_replicas", "Replicas that are ready, as Kubernetes has it.", "role", "shard")
        self.needed_replicas = gauge(
            "needed_replicas", "Need of the moment, before rounding, bounds and delays.", "role", "shard"
        )
        self.boost = gauge("scaling_boost", "How many times the need is what the load asks for.", "role", "shard")
        self.shard_rows = gauge("shard_rows_in_flight", "Rows accepted and not answered, per seat of a group.", "shard")
        self.shard_busy = gauge("shard_busy_ratio", "Share of time that the seats of a group compute.", "shard")
        self.shard_waiting = gauge("shard_waiting_calls", "Calls that wait for others, per seat of a group.", "shard")
        self.shard_stall = gauge(
            "shard_stall_ratio", "Share of the attention workers' steps spent waiting for a group.", "shard"
        )
        self.latency_over_target = gauge(
            "latency_over_target_ratio",
            "Nine of ten requests lately had a latency of so many times its target: ttft, tpot.",
            "latency",
        )
        self.reclaimed = series.counter("reclaimed_leases_total", "Leases that expired, by what followed.", "outcome")


class WorkerMetrics:
    """The engine. Written by an attention worker."""

    def __init__(self, registry: CollectorRegistry) -> None:
        series = _Series(registry)
        gauge, counter, histogram = series.gauge, series.counter, series.histogram
        self.unreadable = unreadable(registry)
        self.running = gauge("requests_running", "Sequences in the batch.")
        self.waiting = gauge("requests_waiting", "Sequences accepted by the worker and not in the batch.")
        self.kv_usage = gauge("kv_cache_usage_ratio", "KV blocks owned by live sequences over all blocks.")
        self.kv_blocks = gauge("kv_blocks", "KV blocks by state: used by sequences, cached only, free.", "state")
        self.gpu_memory = gauge("gpu_memory_bytes", _GPU_MEMORY, "state")
        self.prefix_queries = counter("prefix_cache_query_tokens_total", "Prompt tokens looked up in the prefix cache.")
        self.prefix_hits = counter("prefix_cache_hit_tokens_total", "Prompt tokens found in the prefix cache.")
        self.preemptions = counter("preemptions_total", "Sequences preempted because KV blocks ran out.")
        self.prefill_chunks = counter("prefill_chunks_total", "Prefill pieces that did not end their prompt.")
        self.prefill_tokens = counter("prefill_tokens_total", "Prompt tokens computed.")
        self.decode_tokens = counter("decode_tokens_total", "Tokens drawn.")
        self.steps = counter("engine_steps_total", "Iterations of the engine.")
        self.step_time = histogram("engine_step_seconds", "Duration of one iteration.", buckets=_STEP_BUCKETS_S)
        self.batch_tokens = histogram("engine_step_tokens", "Tokens in one iteration.", buckets=_TOKEN_COUNT_BUCKETS)
        self.overlapped = gauge("step_overlapped", "1 where the last iteration ran as two micro-batches in ping-pong.")
        self.overlapped_steps = counter("overlapped_steps_total", "Iterations that ran as two micro-batches.")
        self.steps_ahead = counter("steps_ahead_total", "Iterations launched before the one before them was read.")
        self.exchange_wait = counter("exchange_wait_seconds_total", "Time spent waiting for the experts' answers.")
        self.shard_stall = counter(
            "shard_stall_seconds_total", "Time spent waiting for answers of a shard group.", "shard"
        )
        self.shared_seats = gauge("shared_seats", "Seats whose memory this worker writes rows into.")
        self.shared_steps = counter("shared_steps_total", "Iterations with rows in memory that seats share.")
        self.repeated_steps = counter("repeated_steps_total", "Iterations run again: a seat was lost or late in them.")
        self.graph_steps = counter("graph_steps_total", "Iterations by CUDA graph, repeated ones too.")
        self.graphs = gauge("step_graphs", "CUDA graphs of steps that were captured.")
        self.publish_backlog = gauge("publish_backlog_tokens", "Tokens computed and not yet in Redis.")
        self.held_back = counter(
            "held_back_seconds_total", "Time for which the engine paused because a gateway lagged."
        )
        self.stale_results = counter("stale_results_total", "Results refused because a later attempt owns the request.")
        self.given_up = counter("given_up_attempts_total", "Attempts given up because experts could not be reached.")
        self.refused_peers = counter("refused_peers_total", _REFUSED_PEERS, "reason")
        self.lockstep_messages = counter(
            "lockstep_messages_total", "Messages to other ranks, by scope: node, across.", "scope"
        )
        self.lockstep_bytes = counter("lockstep_bytes_total", "Bytes to other ranks, by scope: node, across.", "scope")
        self.lockstep_turns = counter(
            "lockstep_turns_total", "Steps of all ranks together, those without own rows too."
        )
        self.expert_tokens = counter("expert_tokens_total", "Rows routed to a shard's experts.", "layer", "shard")
        self.expert_top_share = gauge(
            "expert_top_share_ratio", "Share of a layer's rows that its busiest experts took.", "layer", "rank"
        )
        self.expert_top_id = gauge("expert_top_id", "Id of a layer's busiest experts.", "layer", "rank")


class ExpertMetrics:
    """Experts in a process of their own. Written by an expert worker."""

    def __init__(self, registry: CollectorRegistry) -> None:
        series = _Series(registry, "experts_")
        gauge, counter = series.gauge, series.counter
        self.unreadable = unreadable(registry, "experts_")
        self.seat = gauge("seat", "Number of the seat; 0 before there is one.")
        self.status = gauge("status", "1 for what the worker is doing.", "status")
        self.rows_in_flight = gauge("rows_in_flight", "Rows accepted and not yet answered.")
        self.gpu_memory = gauge("gpu_memory_bytes", _GPU_MEMORY, "state")
        self.rows = counter("rows_total", "Rows computed, by layer and shard group.", "layer", "shard")
        self.calls = counter("calls_total", "Exchanges answered, failed ones too.")
        self.failed = counter("failed_calls_total", "Exchanges that could not be computed.")
        self.computations = counter("computations_total", "Grouped calls: fewer than exchanges where some were joined.")
        self.joined_steps = counter(
            "joined_steps_total", "Steps by shared memory that ran with another worker's as one."
        )
        self.busy = counter("busy_seconds_total", "Time spent computing.")
        self.refused_peers = counter("refused_peers_total", _REFUSED_PEERS, "reason")
