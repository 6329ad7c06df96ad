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
_REFUSED_PEERS = "Connections between workers refused or closed because of the peer, by reason."
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
    text = "Messages and records in Redis that could not be decoded, by kind; see `expertmesh queue unreadable`."
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
            "Starts of each worker on this machine, restarts included.",
            "worker",
        )


class GatewayMetrics:
    """Requests as clients see them. Written by the gateway."""

    def __init__(self, registry: CollectorRegistry) -> None:
        series = _Series(registry)
        gauge, counter, histogram = series.gauge, series.counter, series.histogram
        self.http_requests = counter("http_requests_total", "HTTP responses, by route and status.", "route", "status")
        self.requests = counter("requests_total", "Generation requests finished, by finish reason.", "finish")
        self.errors = counter("request_errors_total", "Generation requests that failed, by error code.", "code")
        self.prompt_tokens = counter("prompt_tokens_total", "Prompt tokens of admitted requests.")
        self.generation_tokens = counter("generation_tokens_total", "Generated tokens delivered to clients.")
        self.lost_attempts = counter("lost_attempts_total", "Attempts lost and resubmitted, by reason.", "reason")
        self.unreadable = unreadable(registry)
        self.ttft = histogram(
            "time_to_first_token_seconds",
            "Time from a request's arrival to its first token (TTFT).",
            buckets=_LATENCY_BUCKETS_S,
        )
        self.tpot = histogram(
            "time_per_output_token_seconds",
            "Mean time per token of a request after its first (TPOT).",
            buckets=_TOKEN_TIME_BUCKETS_S,
        )
        self.inter_token = histogram(
            "inter_token_latency_seconds",
            "Time between consecutive tokens of a request (ITL).",
            buckets=_TOKEN_TIME_BUCKETS_S,
        )
        self.e2e = histogram(
            "request_duration_seconds",
            "Time from a request's arrival to its end (end-to-end latency).",
            buckets=_LATENCY_BUCKETS_S,
        )
        self.prompt_len = histogram(
            "request_prompt_tokens", "Prompt length of a request in tokens.", buckets=_TOKEN_COUNT_BUCKETS
        )
        self.output_len = histogram(
            "request_generation_tokens", "Output length of a request in tokens.", buckets=_TOKEN_COUNT_BUCKETS
        )
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
            "listener",
            "state",
        )
        self.http_in_flight = gauge(
            "gateway_posts_in_flight", "POST requests in flight: authenticated and not yet fully answered."
        )
        self.body_bytes = gauge("gateway_body_bytes", "Bytes of large request bodies being read or tokenized.")
        self.keys_usable = gauge(
            "gateway_keys_usable",
            "0 while the API keys file is missing (all requests are refused) or invalid (old keys stay), else 1.",
        )
        self.refused = counter(
            "gateway_refused_total", "Connections and requests refused before any work was done, by reason.", "reason"
        )
        self.turns_waiting = gauge(
            "gateway_turns_waiting", "Requests received and waiting to be started, in rotation among tenants."
        )
        self.offload_waiting = gauge(
            "gateway_offload_waiting",
            "CPU-heavy tasks (parsing, tokenizing) waiting for a thread, by thread pool.",
            "lane",
        )
        self.offload_wait = histogram(
            "gateway_offload_wait_seconds",
            "Time that CPU-heavy tasks waited for a thread, by thread pool.",
            "lane",
            buckets=_LATENCY_BUCKETS_S,
        )


class SchedulerMetrics:
    """The queue and the dispatch. Written by the scheduler; gauges are meaningful on the leader."""

    def __init__(self, registry: CollectorRegistry) -> None:
        series = _Series(registry)
        gauge, histogram = series.gauge, series.histogram
        self.unreadable = unreadable(registry)
        self.leader = gauge("scheduler_leader", "1 on the leading scheduler, 0 on a standby.")
        self.queued_requests = gauge("queue_requests", "Requests in the queue.")
        self.queued_tokens = gauge("queue_tokens", "Tokens of the requests in the queue (prompt + max_tokens).")
        self.dead_letters = gauge("dead_letters", "Requests in the dead-letter list.")
        self.workers = gauge("workers", "Attention workers with a valid lease.")
        self.outstanding_tokens = gauge(
            "worker_outstanding_tokens",
            "Tokens (prompt + max_tokens) of the requests assigned to a worker and not yet finished.",
            "worker",
        )
        self.queue_time = histogram(
            "request_queue_seconds",
            "Time from a request's admission to its assignment to a worker.",
            buckets=_LATENCY_BUCKETS_S,
        )
        self.dispatched = series.counter(
            "dispatched_requests_total",
            "Requests assigned, by what chose the worker: a cached prefix or its load.",
            "affinity",
        )
        self.seats = gauge("expert_seats", "Replicas of each shard group in the routing table.", "shard")
        self.table_epoch = gauge("routing_table_epoch", "Epoch of the routing table; 0 if there is none.")
        self.placement_turn = histogram(
            "placement_turn_seconds",
            "Duration of one pass over the expert workers: read their seats, update the routing table.",
            buckets=_STEP_BUCKETS_S,
        )
        self.wanted_replicas = gauge(
            "wanted_replicas",
            "Desired replicas computed by the leading scheduler; 0 when scaled to zero. Absent without a leader.",
            "role",
            "shard",
        )
        self.spec_replicas = gauge(
            "told_replicas", "Desired replicas currently set in Kubernetes; absent where unknown.", "role", "shard"
        )
        self.ready_replicas = gauge(
            "ready_replicas", "Ready replicas reported by Kubernetes; absent where unknown.", "role", "shard"
        )
        self.needed_replicas = gauge(
            "needed_replicas",
            "Current demand in replicas, before rounding, min/max and the scale-down delay.",
            "role",
            "shard",
        )
        self.boost = gauge(
            "scaling_boost",
            "Factor by which latency targets raise demand above what the load alone needs; 1 means no boost.",
            "role",
            "shard",
        )
        self.shard_rows = gauge(
            "shard_rows_in_flight", "Rows (token hidden states) in flight per replica of a shard group.", "shard"
        )
        self.shard_busy = gauge(
            "shard_busy_ratio", "Mean share of time that the replicas of a shard group spend computing.", "shard"
        )
        self.shard_waiting = gauge(
            "shard_waiting_calls", "Calls queued behind another call, per replica of a shard group.", "shard"
        )
        self.shard_stall = gauge(
            "shard_stall_ratio", "Share of the attention workers' step time spent waiting for a shard group.", "shard"
        )
        self.latency_over_target = gauge(
            "latency_over_target_ratio",
            "Recent p90 latency divided by its target, by latency (ttft, tpot); NaN with too few requests.",
            "latency",
        )
        self.reclaimed = series.counter("reclaimed_leases_total", "Expired leases reclaimed, by outcome.", "outcome")


class WorkerMetrics:
    """The engine. Written by an attention worker."""

    def __init__(self, registry: CollectorRegistry) -> None:
        series = _Series(registry)
        gauge, counter, histogram = series.gauge, series.counter, series.histogram
        self.unreadable = unreadable(registry)
        self.running = gauge("requests_running", "Sequences in the running batch.")
        self.waiting = gauge("requests_waiting", "Sequences accepted by the worker and waiting for the batch.")
        self.kv_usage = gauge("kv_cache_usage_ratio", "Share of KV blocks used by live sequences.")
        self.kv_blocks = gauge(
            "kv_blocks", "KV blocks, by state: used (by a sequence), cached (prefix cache only), free.", "state"
        )
        self.gpu_memory = gauge("gpu_memory_bytes", _GPU_MEMORY, "state")
        self.prefix_queries = counter("prefix_cache_query_tokens_total", "Prompt tokens looked up in the prefix cache.")
        self.prefix_hits = counter("prefix_cache_hit_tokens_total", "Prompt tokens found in the prefix cache.")
        self.preemptions = counter("preemptions_total", "Sequences preempted because KV blocks ran out.")
        self.prefill_chunks = counter("prefill_chunks_total", "Prefill chunks that did not complete their prompt.")
        self.prefill_tokens = counter("prefill_tokens_total", "Prompt tokens computed in prefill.")
        self.decode_tokens = counter("decode_tokens_total", "Tokens sampled.")
        self.steps = counter("engine_steps_total", "Engine steps (iterations).")
        self.step_time = histogram("engine_step_seconds", "Duration of an engine step.", buckets=_STEP_BUCKETS_S)
        self.batch_tokens = histogram("engine_step_tokens", "Tokens in an engine step.", buckets=_TOKEN_COUNT_BUCKETS)
        self.overlapped = gauge(
            "step_overlapped", "1 if the last step ran as two overlapped micro-batches (two-batch overlap), else 0."
        )
        self.overlapped_steps = counter(
            "overlapped_steps_total", "Steps run as two overlapped micro-batches (two-batch overlap)."
        )
        self.steps_ahead = counter(
            "steps_ahead_total", "Steps launched before the previous step's tokens were read (asynchronous scheduling)."
        )
        self.exchange_wait = counter("exchange_wait_seconds_total", "Time spent waiting for results from the experts.")
        self.shard_stall = counter(
            "shard_stall_seconds_total", "Time spent waiting for results from a shard group.", "shard"
        )
        self.shared_seats = gauge("shared_seats", "Expert workers that this worker reaches through shared memory.")
        self.shared_steps = counter(
            "shared_steps_total", "Steps that exchanged rows with experts through shared memory."
        )
        self.repeated_steps = counter(
            "repeated_steps_total", "Steps run again because an expert worker was lost or late."
        )
        self.graph_steps = counter("graph_steps_total", "Steps replayed from a CUDA graph, repeated ones included.")
        self.graphs = gauge("step_graphs", "CUDA graphs captured for engine steps.")
        self.publish_backlog = gauge("publish_backlog_tokens", "Tokens computed and not yet published to Redis.")
        self.held_back = counter(
            "held_back_seconds_total", "Time the engine was paused because a gateway lagged (backpressure)."
        )
        self.stale_results = counter(
            "stale_results_total", "Results rejected because a later attempt owns the request."
        )
        self.given_up = counter(
            "given_up_attempts_total", "Attempts abandoned because no replica of some experts could be reached."
        )
        self.refused_peers = counter("refused_peers_total", _REFUSED_PEERS, "reason")
        self.lockstep_messages = counter(
            "lockstep_messages_total",
            "Messages sent to other ranks, by scope: node (within a node), across (between nodes).",
            "scope",
        )
        self.lockstep_bytes = counter(
            "lockstep_bytes_total",
            "Bytes sent to other ranks, by scope: node (within a node), across (between nodes).",
            "scope",
        )
        self.lockstep_turns = counter(
            "lockstep_turns_total",
            "Steps taken in lock-step with the other ranks, including those without rows of this rank.",
        )
        self.expert_tokens = counter(
            "expert_tokens_total", "Rows (token hidden states) routed to a shard group's experts.", "layer", "shard"
        )
        self.expert_top_share = gauge(
            "expert_top_share_ratio",
            "Share of a layer's rows routed to each of its busiest experts; rank 1 is the busiest.",
            "layer",
            "rank",
        )
        self.expert_top_id = gauge(
            "expert_top_id", "Id of each of a layer's busiest experts; rank 1 is the busiest.", "layer", "rank"
        )


class ExpertMetrics:
    """Experts in a process of their own. Written by an expert worker."""

    def __init__(self, registry: CollectorRegistry) -> None:
        series = _Series(registry, "experts_")
        gauge, counter = series.gauge, series.counter
        self.unreadable = unreadable(registry, "experts_")
        self.seat = gauge("seat", "Seat number in the routing table; 0 before one is assigned.")
        self.status = gauge("status", "1 for the worker's current status.", "status")
        self.rows_in_flight = gauge("rows_in_flight", "Rows (token hidden states) accepted and not yet answered.")
        self.gpu_memory = gauge("gpu_memory_bytes", _GPU_MEMORY, "state")
        self.rows = counter(
            "rows_total", "Rows (token hidden states) computed, by layer and shard group.", "layer", "shard"
        )
        self.calls = counter("calls_total", "Calls from attention workers answered, failures included.")
        self.failed = counter("failed_calls_total", "Calls from attention workers that failed.")
        self.computations = counter(
            "computations_total", "Grouped kernel calls; fewer than calls_total where calls are batched together."
        )
        self.joined_steps = counter(
            "joined_steps_total", "Steps over shared memory batched with another attention worker's step."
        )
        self.busy = counter("busy_seconds_total", "Time spent computing expert calls.")
        self.refused_peers = counter("refused_peers_total", _REFUSED_PEERS, "reason")
