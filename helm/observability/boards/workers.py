"""Workers: GPU and its memory, KV cache, batch, graphs, steps ahead and steps run again, by worker."""

from __future__ import annotations

from observability.boards.board import Board, Row
from observability.panels import Limits, Query, Says, lines, quantiles, rows
from observability.queries import WORKER, WORKER_LEGEND, most, quantile, rate, series, share, total

_STEPS = rate("engine_steps_total")

_DEVICES = Row(
    title="Devices",
    panels=(
        lines(
            Says(
                title="GPU memory in use",
                unit="percentunit",
                shows="Share of the memory of each worker's GPU that is used, by all processes on it. Empty without "
                "GPUs.",
                act="close to 1 there is no room for graphs or longer batches: lower --kv-memory-gib.",
                limits=Limits(amber=0.95, red=0.98),
            ),
            *(
                Query(
                    expr=share(total(name, WORKER, 'state="used"'), total(name, WORKER)),
                    legend=f"{role} {WORKER_LEGEND}",
                )
                for role, name in {"attention": "gpu_memory_bytes", "experts": "experts_gpu_memory_bytes"}.items()
            ),
            most=1,
        ),
        lines(
            Says(
                title="Time of attention workers",
                unit="percentunit",
                shows="Share of time with steps running, and share without any sequence, of each attention worker.",
                act="idle workers while the queue has requests: does a scheduler lead? Idle ones at night: let the "
                "model sleep.",
            ),
            Query(expr=rate("engine_busy_seconds_total", WORKER), legend="busy " + WORKER_LEGEND),
            Query(expr=rate("engine_idle_seconds_total", WORKER), legend="idle " + WORKER_LEGEND),
            most=1,
        ),
        lines(
            Says(
                title="Starts of processes",
                unit="none",
                shows="Starts within 15 minutes of each process of `serve` and of each worker of a machine.",
                act="runbook restarts: its log says why it ends.",
                limits=Limits(amber=2, red=3),
            ),
            Query(
                expr=f"sum by (process, job) (increase({series('process_starts_total')}[15m]))", legend="{{process}}"
            ),
            Query(
                expr=f"sum by (worker, pod) (increase({series('worker_starts_total')}[15m]))",
                legend="{{worker}} {{pod}}",
            ),
        ),
        lines(
            Says(
                title="Versions",
                unit="none",
                shows="Processes by version and wire format: more than one of either during a rollout alone. Expert "
                "workers by version.",
                act="two wire formats that stay: a rollout has stopped half-way.",
            ),
            Query(expr=total("build_info", "role, version, wire"), legend="{{role}} {{version}} wire {{wire}}"),
            Query(expr=total("experts_status", "version"), legend="experts {{version}}"),
        ),
    ),
)
_BATCH = Row(
    title="Batch and KV cache",
    panels=(
        lines(
            Says(
                title="Running and waiting sequences",
                unit="none",
                shows="Sequences in the batch of each worker, and those accepted that wait for it.",
                act="waiting ones with a small batch: KV blocks are short, see beside it.",
            ),
            Query(expr=total("requests_running", WORKER), legend="running " + WORKER_LEGEND),
            Query(expr=total("requests_waiting", WORKER), legend="waiting " + WORKER_LEGEND),
        ),
        lines(
            Says(
                title="KV cache in use",
                unit="percentunit",
                shows="Share of KV blocks used by live sequences; blocks that the prefix cache alone has count as "
                "free.",
                act="runbook kv-cache: near 1 sequences are put out of the batch and computed again.",
                limits=Limits(amber=0.9, red=0.97),
            ),
            Query(expr=most("kv_cache_usage_ratio", WORKER), legend=WORKER_LEGEND),
            most=1,
        ),
        lines(
            Says(
                title="KV blocks, by state",
                unit="none",
                shows="KV blocks of all workers: used by sequences, cached for prefixes, free.",
                act="no free ones is fine as long as cached ones are left.",
            ),
            Query(expr=total("kv_blocks", "state"), legend="{{state}}"),
            stacked=True,
        ),
        lines(
            Says(
                title="Preemptions",
                unit="ops",
                shows="Sequences put out of the batch since KV blocks ran out; their work is done again.",
                act="runbook kv-cache: more KV memory, fewer sequences (--max-num-seqs), or more workers.",
                limits=Limits(amber=0.05, red=0.5),
            ),
            Query(expr=rate("preemptions_total", WORKER), legend=WORKER_LEGEND),
        ),
        lines(
            Says(
                title="Prefix cache",
                unit="percentunit",
                shows="Share of prompt tokens found in the prefix cache, of those looked up.",
                act="falls where workers are added or prompts change; a high share is prefill for nothing.",
            ),
            Query(
                expr=share(rate("prefix_cache_hit_tokens_total"), rate("prefix_cache_query_tokens_total")),
                legend="hits",
            ),
            most=1,
        ),
        lines(
            Says(
                title="Tokens computed",
                unit="short",
                shows="Tokens by second of each worker: of prompts, and sampled.",
                act="workers with the same GPU are to be alike under load.",
            ),
            Query(expr=rate("prefill_tokens_total", WORKER), legend="prefill " + WORKER_LEGEND),
            Query(expr=rate("decode_tokens_total", WORKER), legend="decode " + WORKER_LEGEND),
        ),
    ),
)
_STEP = Row(
    title="Steps",
    panels=(
        quantiles(
            Says(
                title="Duration of a step",
                unit="s",
                shows="Duration of engine steps of all workers.",
                act="see latency, by hop; large steps have large prefill chunks (--max-num-batched-tokens).",
                limits=Limits(amber=0.05, red=0.1),
            ),
            "engine_step_seconds",
        ),
        lines(
            Says(
                title="Duration of a step, p90 by worker",
                unit="s",
                shows="The p90 of each worker's steps.",
                act="one far from the others is slow: its GPU, or its way to the experts.",
                limits=Limits(amber=0.05, red=0.1),
            ),
            Query(expr=quantile(0.9, "engine_step_seconds", WORKER), legend=WORKER_LEGEND),
        ),
        quantiles(
            Says(
                title="Tokens of a step",
                unit="short",
                shows="Tokens in a step: sequences that decode, and chunks of prompts.",
                act="few tokens for each step under load: requests do not arrive at the workers, see the queue.",
            ),
            "engine_step_tokens",
        ),
        lines(
            Says(
                title="Steps by kind",
                unit="percentunit",
                shows="Share of steps that were replayed from a CUDA graph, launched ahead of the last one's tokens, "
                "run as two overlapping micro-batches, or exchanged rows through shared memory.",
                act="graph steps that fall: batches of sizes without a graph. Steps ahead that fall: preemptions, "
                "constraints.",
            ),
            Query(expr=share(rate("graph_steps_total"), _STEPS), legend="from a graph"),
            Query(expr=share(rate("steps_ahead_total"), _STEPS), legend="ahead"),
            Query(expr=share(rate("overlapped_steps_total"), _STEPS), legend="overlapped"),
            Query(expr=share(rate("shared_steps_total"), _STEPS), legend="shared memory"),
        ),
        lines(
            Says(
                title="Drafted tokens",
                unit="short",
                shows="Tokens by second that were drafted, and that were accepted; those between the two are rows that "
                "steps computed for nothing. Nothing is drafted without --speculative-config, nor where it is slower.",
                act="few accepted ones: texts do not repeat themselves; drafting then ends by itself.",
            ),
            Query(expr=rate("draft_tokens_total"), legend="drafted"),
            Query(expr=rate("accepted_draft_tokens_total"), legend="accepted"),
            Query(expr=rate("draft_chains_total"), legend="chains"),
            Query(expr=rate("drafting_failures_total", "reason"), legend="ended: {{reason}}"),
        ),
        lines(
            Says(
                title="Time of steps with drafts",
                unit="s",
                shows="Median of the time in which the drafts of a step were made, and of that in which they were "
                "verified.",
                act="drafting that takes as long as verifying: the draft model is large for this one. Where it does "
                "not gain, drafting ends by itself.",
            ),
            Query(expr=quantile(0.5, "draft_step_seconds", by="part"), legend="{{part}}"),
        ),
        lines(
            Says(
                title="Experts that drafts wake",
                unit="percentunit",
                shows="Of the experts that steps with drafts had computed, those that drafts alone had chosen; a "
                "sample, in layout local, of steps without a CUDA graph.",
                act="a large part: drafts cost reads of weights, which pay only where they are accepted.",
            ),
            Query(expr=share(rate("draft_woken_experts_total"), rate("draft_step_experts_total")), legend="woken"),
        ),
        lines(
            Says(
                title="Steps run again, and failed",
                unit="percentunit",
                shows="Share of steps that ran again since an expert worker was lost or late, and of those that "
                "failed, by reason.",
                act="runbook steps.",
                limits=Limits(amber=0.001, red=0.01),
            ),
            Query(expr=share(rate("repeated_steps_total"), _STEPS), legend="again"),
            Query(
                expr=f"{rate('step_failures_total', 'reason')} / on () group_left () {_STEPS}",
                legend="failed: {{reason}}",
            ),
        ),
        lines(
            Says(
                title="Backpressure",
                unit="percentunit",
                shows="Share of time that engines paused since a gateway lagged.",
                act="add gateways: they cannot deliver what workers compute.",
                limits=Limits(amber=0.01, red=0.1),
            ),
            Query(expr=rate("held_back_seconds_total", WORKER), legend=WORKER_LEGEND),
        ),
        lines(
            Says(
                title="Tokens not yet published",
                unit="none",
                shows="Tokens computed and not yet in Redis, by worker.",
                act="Redis is slow or away.",
                limits=Limits(amber=1000, red=10000),
            ),
            Query(expr=total("publish_backlog_tokens", WORKER), legend=WORKER_LEGEND),
        ),
        lines(
            Says(
                title="Graphs, and seats through shared memory",
                unit="none",
                shows="CUDA graphs that each worker has captured, or could not capture, and expert workers that it "
                "reaches through shared memory.",
                act="0 seats where experts are on the same host: is --fabric-shared set, and /dev/shm large enough? "
                "Failed captures: the worker's log has the cause; steps without a graph are slower.",
            ),
            Query(expr=total("step_graphs", WORKER), legend="graphs " + WORKER_LEGEND),
            Query(expr=total("step_graph_failures_total", WORKER), legend="failed captures " + WORKER_LEGEND),
            Query(expr=total("shared_seats", WORKER), legend="seats " + WORKER_LEGEND),
        ),
        lines(
            Says(
                title="Chunks of prompts",
                unit="ops",
                shows="Prefill chunks by second that did not complete their prompt.",
                act="prompts longer than --max-num-batched-tokens, or many at a time: each chunk is a step more for "
                "its prompt.",
            ),
            Query(expr=rate("prefill_chunks_total", WORKER), legend=WORKER_LEGEND),
        ),
        lines(
            Says(
                title="Messages and turns in lock-step",
                unit="ops",
                shows="Messages to other ranks (layout lockstep), within nodes and between them, and steps in "
                "lock-step.",
                act="messages by turn follow from the number of ranks and nodes; turns are those of the slowest rank.",
            ),
            Query(expr=rate("lockstep_messages_total", "scope"), legend="{{scope}}"),
            Query(expr=rate("lockstep_turns_total"), legend="turns of all ranks"),
        ),
        lines(
            Says(
                title="Ranks in lock-step",
                unit="Bps",
                shows="Bytes by second sent to other ranks (layout lockstep), within nodes and between them.",
                act="traffic between nodes is the dear one: place ranks of a model close together.",
            ),
            Query(expr=rate("lockstep_bytes_total", "scope"), legend="{{scope}}"),
        ),
        rows(
            Says(
                title="Busy, attention workers over time",
                unit="percentunit",
                shows="Share of time with steps running, one row for each attention worker.",
                act="a row that stays cold gets no requests; one that stays hot gets too many.",
            ),
            Query(expr=rate("engine_busy_seconds_total", WORKER), legend=WORKER_LEGEND),
        ),
    ),
)
BOARD = Board(
    name="workers",
    title="Workers",
    shows="Each worker's GPU memory and idle time, KV cache, batch and steps.",
    rows=(_DEVICES, _BATCH, _STEP),
)
