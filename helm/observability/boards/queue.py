"""Queue and tenants: what waits, for whom and how long, and what gateways hold."""

from __future__ import annotations

from observability.boards.board import Board, Row
from observability.panels import Limits, Query, Says, lines, number, quantiles, spread
from observability.queries import most, quantile, rate, total

_QUEUE = Row(
    title="Queue",
    panels=(
        number(
            Says(
                title="Requests",
                unit="none",
                shows="Requests in the queue.",
                act="whether it grows matters more than how many there are.",
                span=6,
                height=5,
            ),
            Query(expr=most("queue_requests")),
        ),
        number(
            Says(
                title="Tokens",
                unit="short",
                shows="Tokens of the requests in the queue (prompt + max_tokens).",
                act="divided by the tokens by second of all workers it is the time that the queue takes to empty.",
                span=6,
                height=5,
            ),
            Query(expr=most("queue_tokens")),
        ),
        number(
            Says(
                title="Oldest",
                unit="s",
                shows="How long the request at the head of the queue has waited.",
                act="runbook capacity.",
                limits=Limits(amber=2, red=30),
                span=6,
                height=5,
            ),
            Query(expr=most("queue_oldest_seconds")),
        ),
        number(
            Says(
                title="Dead letters",
                unit="none",
                shows="Requests that are not tried again.",
                act="runbook lost-requests: `expertmesh queue list`.",
                limits=Limits(amber=1, red=1),
                span=6,
                height=5,
            ),
            Query(expr=most("dead_letters")),
        ),
        quantiles(
            Says(
                title="Time in the queue",
                unit="s",
                shows="From admission to assignment to a worker, of requests that were assigned.",
                act="see the autoscaler: are more replicas available?",
                limits=Limits(amber=1, red=2),
            ),
            "request_queue_seconds",
        ),
        spread(
            Says(
                title="Time in the queue, spread",
                unit="s",
                shows="Requests by second in each bucket of time in the queue.",
                act="bands far apart are priorities, or tenants that share unequally.",
            ),
            "request_queue_seconds",
        ),
        lines(
            Says(
                title="Assignments",
                unit="reqps",
                shows="Requests assigned to workers by second, by what chose the worker: a cached prefix or its load.",
                act="none while the queue has requests: does a scheduler lead, do workers take any?",
            ),
            Query(expr=rate("dispatched_requests_total", "affinity"), legend="{{affinity}}"),
            stacked=True,
        ),
        lines(
            Says(
                title="Leases that ran out",
                unit="ops",
                shows="Leases of workers and requests reclaimed since their holder did not renew them, by outcome.",
                act="a worker or a gateway died or hangs: see workers.",
                limits=Limits(amber=0.02, red=0.2),
            ),
            Query(expr=rate("reclaimed_leases_total", "outcome"), legend="{{outcome}}"),
        ),
    ),
)
_TENANTS = Row(
    title="Tenants",
    panels=(
        lines(
            Says(
                title="Waiting requests, by tenant and priority",
                unit="none",
                shows="Requests in the queue of the ten tenants with the most tokens there; the rest is other.",
                act="tenants of one priority take turns by tokens, so a long line of one does not delay the others.",
            ),
            Query(expr=most("queue_waiting_requests", "tenant, priority"), legend="{{tenant}} ({{priority}})"),
            stacked=True,
        ),
        lines(
            Says(
                title="Waiting tokens, by tenant and priority",
                unit="short",
                shows="Tokens (prompt + max_tokens) in the queue of the same tenants.",
                act="a tenant with nearly all of them sends more than its share: limit its key, or add workers.",
            ),
            Query(expr=most("queue_waiting_tokens", "tenant, priority"), legend="{{tenant}} ({{priority}})"),
            stacked=True,
        ),
        lines(
            Says(
                title="Length of prompts",
                unit="short",
                shows="Tokens of prompts, median and tail.",
                act="a jump explains a longer prefill.",
            ),
            *(
                Query(expr=quantile(part, "request_prompt_tokens"), legend=f"p{part * 100:.0f}")
                for part in (0.5, 0.9, 0.99)
            ),
        ),
        lines(
            Says(
                title="Length of answers",
                unit="short",
                shows="Tokens of answers, median and tail.",
                act="a jump explains requests that take longer as a whole.",
            ),
            *(
                Query(expr=quantile(part, "request_generation_tokens"), legend=f"p{part * 100:.0f}")
                for part in (0.5, 0.9, 0.99)
            ),
        ),
    ),
)
_GATEWAYS = Row(
    title="Gateways",
    panels=(
        lines(
            Says(
                title="Refused",
                unit="ops",
                shows="Connections and requests refused before any work was done, by reason.",
                act="limits of gateways at work: too many of a client, or too few gateways.",
                limits=Limits(amber=0.1, red=10),
            ),
            Query(expr=rate("gateway_refused_total", "reason"), legend="{{reason}}"),
        ),
        lines(
            Says(
                title="Connections, by state",
                unit="none",
                shows="Open connections of all gateways, by what they wait for; served is a request being processed.",
                act="many that wait for a head or a body are slow or hostile clients.",
            ),
            Query(expr=total("gateway_connections", "state"), legend="{{state}}"),
            stacked=True,
        ),
        lines(
            Says(
                title="Memory of answers and bodies",
                unit="bytes",
                shows="Bytes that gateways hold: of answers that clients have not read, and of large bodies being "
                "read.",
                act="answers that grow: clients do not read. A gateway stops reading Redis for them before it runs "
                "out.",
            ),
            Query(expr=total("gateway_answer_bytes"), legend="answers"),
            Query(expr=total("gateway_body_bytes"), legend="bodies"),
        ),
        lines(
            Says(
                title="Waiting for a thread, p99",
                unit="s",
                shows="How long parsing and tokenizing waited for a thread, by pool.",
                act="gateways' CPUs are full: add gateways.",
                limits=Limits(amber=0.1, red=0.5),
            ),
            Query(expr=quantile(0.99, "gateway_offload_wait_seconds", "lane"), legend="{{lane}}"),
        ),
        lines(
            Says(
                title="Requests that wait for a turn",
                unit="none",
                shows="Requests received and not started, in rotation among tenants; POST requests in flight; "
                "CPU-heavy tasks that wait.",
                act="a burst; if it stays, add gateways.",
            ),
            Query(expr=total("gateway_turns_waiting"), legend="turns"),
            Query(expr=total("gateway_posts_in_flight"), legend="in flight"),
            Query(expr=total("gateway_offload_waiting", "lane"), legend="tasks, {{lane}}"),
        ),
        lines(
            Says(
                title="Unreadable messages",
                unit="ops",
                shows="Messages and records in Redis that could not be decoded, by kind, over all roles.",
                act="versions that do not fit, or a foreign writer: `expertmesh queue unreadable` shows them.",
                limits=Limits(amber=0.001, red=0.1),
            ),
            Query(expr=rate("unreadable_messages_total", "kind"), legend="{{kind}}"),
            Query(expr=rate("experts_unreadable_messages_total", "kind"), legend="{{kind}} (experts)"),
        ),
    ),
)
BOARD = Board(
    name="queue",
    title="Queue and tenants",
    shows="What waits in the queue, for which tenants and how long, and what gateways hold and refuse.",
    rows=(_QUEUE, _TENANTS, _GATEWAYS),
)
