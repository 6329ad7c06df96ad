"""Series of an attention worker."""

from __future__ import annotations

from typing import Literal, get_args

from prometheus_client import CollectorRegistry

from services.metrics.common import (
    CHECKPOINT,
    GPU_MEMORY,
    GPU_STATE,
    LAYER,
    ON_GPU,
    PEER_REASON,
    REFUSED_PEERS,
    SHARD,
    SHORT_BUCKETS_S,
    STEP_BUCKETS_S,
    TOKEN_COUNT_BUCKETS,
    TOP_EXPERTS,
    WAIT_BUCKETS_S,
    unreadable,
)
from services.metrics.series import Label, Series

_SCOPE = Label("scope", values=("node", "across"))
_RANK = Label("rank", "1 is the busiest", values=tuple(str(1 + rank) for rank in range(TOP_EXPERTS)))
_TRANSPORT = Label("transport", values=("local", "tcp", "nccl", "shared_memory", "lockstep"))
_WIRED = Label("transport", values=("tcp", "nccl"))
_REMOTE = "layouts disaggregated, colocated"
_LOCKSTEP = "layout lockstep"
ResendReason = Literal["late", "lost", "leaving", "failed", "bad_answer", "not_finite"]
"""Why rows are sent to another replica."""
STEP_FAILURES = ("experts", "error", "not_finite")
DRAFTING_FAILURES = ("not_finite", "error")


class WorkerMetrics:
    """The engine. Written by an attention worker."""

    def __init__(self, registry: CollectorRegistry) -> None:
        series = Series(registry, "attention")
        self.definitions = series.definitions
        self.unreadable = unreadable(series)
        self._levels(series)
        self._tokens(series)
        self._steps(series)
        self._requests(series)
        self._exchange(series)
        self._experts(series)

    def _levels(self, series: Series) -> None:
        gauge = series.gauge
        self.running = gauge("requests_running", "Sequences in the running batch.")
        self.waiting = gauge("requests_waiting", "Sequences accepted by the worker and waiting for the batch.")
        self.kv_usage = gauge("kv_cache_usage_ratio", "Share of KV blocks used by live sequences.")
        self.kv_blocks = gauge(
            "kv_blocks",
            "KV blocks, by state: used (by a sequence), cached (prefix cache only), free.",
            Label("state", values=("used", "cached", "free")),
        )
        self.gpu_memory = gauge("gpu_memory_bytes", GPU_MEMORY, GPU_STATE, only=ON_GPU)
        self.publish_backlog = gauge("publish_backlog_tokens", "Tokens computed and not yet published to Redis.")
        self.weight_load = gauge(
            "weight_load_seconds",
            "How long loading the weights took: those of experts, too, where they are in this process.",
            Label("source", values=(CHECKPOINT,)),
            only="once loaded",
        )

    def _tokens(self, series: Series) -> None:
        counter = series.counter
        self.prefix_queries = counter("prefix_cache_query_tokens_total", "Prompt tokens looked up in the prefix cache.")
        self.prefix_hits = counter("prefix_cache_hit_tokens_total", "Prompt tokens found in the prefix cache.")
        self.preemptions = counter("preemptions_total", "Sequences preempted because KV blocks ran out.")
        self.prefill_chunks = counter("prefill_chunks_total", "Prefill chunks that did not complete their prompt.")
        self.prefill_tokens = counter("prefill_tokens_total", "Prompt tokens computed in prefill.")
        self.decode_tokens = counter("decode_tokens_total", "Tokens sampled.")
        self.draft_chains = counter(
            "draft_chains_total", "Times that a step verified drafts of a sequence (speculative decoding)."
        )
        self.draft_tokens = counter("draft_tokens_total", "Tokens drafted and verified: rows added to steps.")
        self.accepted_tokens = counter("accepted_draft_tokens_total", "Drafted tokens that were accepted.")
        self.draft_steps = series.histogram(
            "draft_step_seconds",
            "Time of a step with drafts: drafting (making them, before it), verification (the rest of it).",
            Label("part", values=("drafting", "verification")),
            buckets=STEP_BUCKETS_S,
        )
        self.drafting_failures = counter(
            "drafting_failures_total",
            "Failures that ended drafting by a model until the worker's end: not_finite (it gave NaN or infinity), "
            "error (an exception). No request fails.",
            Label("reason", values=DRAFTING_FAILURES),
        )
        self.draft_step_experts = counter(
            "draft_step_experts_total",
            "Experts that steps with drafts had computed, over all layers: of one such step in 16, where experts are "
            "in this process and the step is no CUDA graph.",
        )
        self.woken_experts = counter(
            "draft_woken_experts_total", "Those of draft_step_experts that no row but those of drafts had chosen."
        )

    def _steps(self, series: Series) -> None:
        counter = series.counter
        self.steps = counter("engine_steps_total", "Engine steps (iterations).")
        self.step_time = series.histogram("engine_step_seconds", "Duration of an engine step.", buckets=STEP_BUCKETS_S)
        self.batch_tokens = series.histogram(
            "engine_step_tokens", "Tokens in an engine step.", buckets=TOKEN_COUNT_BUCKETS
        )
        self.engine_busy = counter("engine_busy_seconds_total", "Time in engine steps.")
        self.engine_idle = counter("engine_idle_seconds_total", "Time in which the engine had no sequence to run.")
        self.held_back = counter(
            "held_back_seconds_total", "Time the engine was paused because a gateway lagged (backpressure)."
        )
        self.step_failures = counter(
            "step_failures_total",
            "Steps that failed: experts (none could be reached), error (an exception; each sequence then runs alone), "
            "not_finite (a sequence's values were NaN or infinite).",
            Label("reason", values=STEP_FAILURES),
        )
        self.overlapped_steps = counter(
            "overlapped_steps_total", "Steps run as two overlapped micro-batches (two-batch overlap)."
        )
        self.steps_ahead = counter(
            "steps_ahead_total", "Steps launched before the previous step's tokens were read (asynchronous scheduling)."
        )
        self.repeated_steps = counter(
            "repeated_steps_total", "Steps run again because an expert worker was lost or late."
        )
        self.graph_steps = counter("graph_steps_total", "Steps replayed from a CUDA graph, repeated ones included.")
        self.graphs = series.gauge("step_graphs", "CUDA graphs captured for engine steps.")
        self.graph_failures = counter(
            "step_graph_failures_total",
            "CUDA graphs that could not be captured. Steps run eagerly since, but where a graph was captured before.",
        )

    def _requests(self, series: Series) -> None:
        counter = series.counter
        self.batch_wait = series.histogram(
            "request_batch_wait_seconds",
            "Time from a sequence's arrival at this worker to its first step; preempted ones count once.",
            buckets=WAIT_BUCKETS_S,
        )
        self.prefill_time = series.histogram(
            "request_prefill_seconds",
            "Time from a sequence's first step at this worker to its first token.",
            buckets=WAIT_BUCKETS_S,
        )
        self.stale_results = counter(
            "stale_results_total", "Results rejected because a later attempt owns the request."
        )
        self.given_up = counter(
            "given_up_attempts_total", "Attempts abandoned because no replica of some experts could be reached."
        )

    def _exchange(self, series: Series) -> None:
        counter = series.counter
        self.exchange_wait = counter("exchange_wait_seconds_total", "Time spent waiting for results from the experts.")
        self.exchange_time = series.histogram(
            "exchange_seconds",
            "Time of the host in all exchanges of an engine step, by what carried its rows: dispatch (with the "
            "experts' work where they are in this process) and combine. Without steps replayed from a CUDA graph.",
            _TRANSPORT,
            Label("part", values=("dispatch", "combine")),
            buckets=SHORT_BUCKETS_S,
        )
        self.exchange_bytes = counter(
            "exchange_bytes_total",
            "Bytes to and from expert workers: frames (tcp), rows from GPU to GPU (nccl).",
            _WIRED,
            Label("direction", values=("sent", "received")),
            only=_REMOTE,
        )
        self.resent_rows = counter(
            "resent_rows_total",
            "Rows sent again to another replica, because the first was late, lost or leaving, failed, or answered what "
            "cannot be right (bad_answer, not_finite).",
            Label("reason", values=get_args(ResendReason)),
            only=_REMOTE,
        )
        self.shard_stall = counter(
            "shard_stall_seconds_total", "Time spent waiting for results from a shard group.", SHARD, only=_REMOTE
        )
        self.shared_seats = series.gauge(
            "shared_seats", "Expert workers that this worker reaches through shared memory."
        )
        self.shared_steps = counter(
            "shared_steps_total", "Steps that exchanged rows with experts through shared memory."
        )
        self.refused_peers = counter("refused_peers_total", REFUSED_PEERS, PEER_REASON)
        self.lockstep_messages = counter(
            "lockstep_messages_total",
            "Messages sent to other ranks, by scope: node (within a node), across (between nodes).",
            _SCOPE,
            only=_LOCKSTEP,
        )
        self.lockstep_bytes = counter(
            "lockstep_bytes_total",
            "Bytes sent to other ranks, by scope: node (within a node), across (between nodes).",
            _SCOPE,
            only=_LOCKSTEP,
        )
        self.lockstep_turns = counter(
            "lockstep_turns_total",
            "Steps taken in lock-step with the other ranks, including those without rows of this rank.",
        )

    def _experts(self, series: Series) -> None:
        self.expert_tokens = series.counter(
            "expert_tokens_total", "Rows (token hidden states) routed to a shard group's experts.", LAYER, SHARD
        )
        self.expert_top_share = series.gauge(
            "expert_top_share_ratio",
            "Share of a layer's rows routed to each of its busiest experts; rank 1 is the busiest.",
            LAYER,
            _RANK,
        )
        self.expert_top_id = series.gauge(
            "expert_top_id",
            "Id of each of a layer's busiest experts; rank 1 is the busiest.",
            LAYER,
            _RANK,
            only="with --layer-series",
        )
