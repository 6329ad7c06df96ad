"""Experts: where the load is by layer, expert and shard group, how even it is, who has replicas, and who is slow."""

from __future__ import annotations

from observability.boards.board import Board, Row
from observability.panels import Limits, Query, Says, lines, matrix, rows, states
from observability.queries import WORKER, WORKER_LEGEND, most, newly, rate, series, share, total

_SHARD = "shard group {{shard}}"


def _rows(by: str) -> str:
    """Rows by second as expert workers count them, who know the groups; where experts are in the attention workers'
    processes, as these do."""
    return f"{rate('experts_rows_total', by)} or {rate('expert_tokens_total', by)}"


_HEAT = Row(
    title="Where the load is",
    panels=(
        rows(
            Says(
                title="Rows by shard group",
                unit="short",
                shows="Rows (hidden states of tokens) by second that were routed to each shard group's experts, over "
                "time.",
                act="a row that stays hotter than the others is a hot shard group: does it have more replicas (below)?",
            ),
            Query(expr=_rows("shard"), legend=_SHARD),
        ),
        lines(
            Says(
                title="Imbalance of shard groups",
                unit="none",
                shows="Rows by second and replica of the busiest shard group, divided by the mean of all groups; 1 "
                "is even.",
                act="runbook hot-shard. Replicas follow the load by themselves; where they are at their most, raise "
                "it or cut the experts.",
                limits=Limits(amber=1.5, red=2.5),
            ),
            Query(expr=most("shard_imbalance_ratio"), legend="busiest / mean"),
        ),
        matrix(
            Says(
                title="Layers and shard groups, now",
                unit="short",
                shows="Rows by second of each layer in each shard group. One row named all unless --layer-series is "
                "set.",
                act="a layer whose shard groups differ much has hot experts: see the busiest experts beside it.",
            ),
            Query(expr=_rows("layer, shard")),
            row="layer",
            column="shard",
        ),
        matrix(
            Says(
                title="Busiest experts' share, now",
                unit="percentunit",
                shows="Share of each layer's rows that its busiest experts get, rank 1 the busiest; highest over "
                "attention workers. With --layer-series for each layer.",
                act="compare with 1 divided by the number of experts, times the experts of a token: far above it, "
                "give the group of that expert replicas.",
            ),
            Query(expr=most("expert_top_share_ratio", "layer, rank")),
            row="layer",
            column="rank",
        ),
        rows(
            Says(
                title="Busiest experts' share, over time",
                unit="percentunit",
                shows="Share of rows of the busiest experts of each layer, over time.",
                act="a share that comes and goes follows the prompts; one that stays follows the model.",
            ),
            Query(expr=most("expert_top_share_ratio", "layer, rank"), legend="layer {{layer}} rank {{rank}}"),
        ),
        matrix(
            Says(
                title="Busiest experts' ids, now",
                unit="none",
                shows="Ids of each layer's busiest experts, rank 1 the busiest, with --layer-series.",
                act="names the experts whose share is shown beside it, to see which shard group has them "
                "(`expertmesh plan`).",
            ),
            Query(expr=most("expert_top_id", "layer, rank")),
            row="layer",
            column="rank",
            coloured=False,
        ),
    ),
)
_REPLICAS = Row(
    title="Replicas and moves",
    panels=(
        lines(
            Says(
                title="Replicas in the routing table",
                unit="none",
                shows="Seats of each shard group: expert workers to which rows can go.",
                act="runbook shard-without-seat: no request can be computed while a group has none.",
                limits=Limits(amber=1, red=0.5, below=True),
            ),
            Query(expr=most("expert_seats", "shard"), legend=_SHARD),
        ),
        lines(
            Says(
                title="Replicas that came, left and died",
                unit="none",
                shows="Changes of seats within ten minutes, by shard group and kind.",
                act="deaths: runbook restarts. Joins and leaves are the autoscaler or a rollout.",
                limits=Limits(amber=3, red=10),
            ),
            Query(expr=newly("seat_changes_total", "shard, change"), legend="{{change}} {{shard}}"),
        ),
        lines(
            Says(
                title="Routing table",
                unit="none",
                shows="Epoch of the routing table, and completed changes of the shard groups' cut: each step is a "
                "change.",
                act="an epoch that grows all the time is a worker that comes and goes.",
            ),
            Query(expr=most("routing_table_epoch"), legend="epoch"),
            Query(expr=most("repartitions_total"), legend="cuts"),
        ),
        lines(
            Says(
                title="Loading weights",
                unit="s",
                shows="How long each worker's last load of weights took, by source; of expert workers for ten minutes "
                "after it.",
                act="it is the time that a new replica needs: from a peer it is to be shorter than from the "
                "checkpoint.",
                limits=Limits(amber=120, red=600),
            ),
            Query(
                expr=most("experts_weight_load_seconds", f"source, {WORKER}"),
                legend="experts, {{source}} " + WORKER_LEGEND,
            ),
            Query(
                expr=most("weight_load_seconds", f"source, {WORKER}"), legend="attention, {{source}} " + WORKER_LEGEND
            ),
        ),
    ),
)
_SLOW = Row(
    title="Who is slow",
    panels=(
        lines(
            Says(
                title="Waiting for a shard group",
                unit="percentunit",
                shows="Share of the attention workers' step time spent waiting for each shard group: what its "
                "slowness costs every token.",
                act="runbook hot-shard: the highest line is the group to give replicas, or whose worker to look at.",
                limits=Limits(amber=0.3, red=0.6),
            ),
            Query(
                expr=f"{rate('shard_stall_seconds_total', 'shard')} / on () group_left () "
                f"{rate('engine_busy_seconds_total')}",
                legend=_SHARD,
            ),
        ),
        lines(
            Says(
                title="Busy, by shard group",
                unit="percentunit",
                shows="Share of time that the replicas of a shard group spend computing. Only with --autoscale.",
                act="near 1 a group is at its capacity: it needs replicas. Low with much waiting for it: the network "
                "or one slow worker, see beside it.",
                limits=Limits(amber=0.8, red=0.95),
            ),
            Query(expr=most("shard_busy_ratio", "shard"), legend=_SHARD),
            most=1,
        ),
        lines(
            Says(
                title="Busy, by expert worker",
                unit="percentunit",
                shows="Share of time that each expert worker spends computing.",
                act="one that is busier than others of its group with the same rows has a slower GPU.",
                limits=Limits(amber=0.8, red=0.95),
            ),
            Query(expr=rate("experts_busy_seconds_total", WORKER), legend=WORKER_LEGEND),
        ),
        lines(
            Says(
                title="Computing time of a row, by expert worker",
                unit="s",
                shows="Time spent computing, divided by rows computed: a rate of work, so it falls as calls get "
                "larger.",
                act="a worker far above the others of its group is slow: its GPU, its clock, or a neighbour on it.",
            ),
            Query(
                expr=share(rate("experts_busy_seconds_total", WORKER), rate("experts_rows_total", WORKER)),
                legend=WORKER_LEGEND,
            ),
        ),
        lines(
            Says(
                title="Rows in flight and calls that queue, by replica",
                unit="short",
                shows="Rows accepted and not answered, and calls behind another call, per replica of each shard "
                "group (only with --autoscale); and rows by expert worker.",
                act="calls that queue all the time are a group that needs replicas.",
            ),
            Query(expr=most("shard_rows_in_flight", "shard"), legend="rows, group {{shard}}"),
            Query(expr=most("shard_waiting_calls", "shard"), legend="calls, group {{shard}}"),
            Query(expr=total("experts_rows_in_flight", WORKER), legend="rows, " + WORKER_LEGEND),
        ),
        lines(
            Says(
                title="Calls by computation",
                unit="none",
                shows="Calls of attention workers for each grouped kernel call: above 1 calls are batched together.",
                act="more is cheaper; 1 at a high load means that calls come one at a time.",
            ),
            Query(
                expr=share(rate("experts_calls_total", WORKER), rate("experts_computations_total", WORKER)),
                legend=WORKER_LEGEND,
            ),
        ),
        lines(
            Says(
                title="Calls, computations and joined steps",
                unit="ops",
                shows="Calls of attention workers, grouped kernel calls, and steps over shared memory that were "
                "batched with another attention worker's.",
                act="computations close to calls under load: see --joint-steps.",
            ),
            Query(expr=rate("experts_calls_total"), legend="calls"),
            Query(expr=rate("experts_computations_total"), legend="computations"),
            Query(expr=rate("experts_joined_steps_total"), legend="joined steps"),
        ),
        lines(
            Says(
                title="Calls that failed",
                unit="none",
                shows="Calls from attention workers that failed, by expert worker, and peers refused, by reason; both "
                "within ten minutes.",
                act="its log says why. A fabric's secret or weights that do not match are never to happen: look at "
                "once.",
                limits=Limits(amber=1, red=100),
            ),
            Query(expr=newly("experts_failed_calls_total", WORKER), legend=WORKER_LEGEND),
            Query(expr=newly("experts_refused_peers_total", "reason"), legend="refused: {{reason}}"),
        ),
        states(
            Says(
                title="Status of expert workers",
                unit="none",
                shows="The status that each expert worker reports.",
                act="one that stays at loading: its log, and the checkpoint's volume.",
                span=12,
            ),
            Query(
                expr=f"max by (status, {WORKER}) ({series('experts_status')}) == 1",
                legend="{{status}} " + WORKER_LEGEND,
            ),
            names={"1": "is"},
        ),
    ),
)
BOARD = Board(
    name="experts",
    title="Experts",
    shows="Load by layer, expert and shard group, its imbalance, replicas and their moves, and which shard group is "
    "waited for.",
    rows=(_HEAT, _REPLICAS, _SLOW),
)
