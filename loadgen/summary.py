"""From what clients saw to the results of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from loadgen.fairness import fairness
from loadgen.histograms import latency_of
from loadgen.objectives import good, measured, values
from loadgen.results import (
    Correctness,
    Counts,
    ErrorGroup,
    Group,
    Latency,
    Metric,
    Objective,
    Rates,
    Run,
    Schedule,
    Shard,
    Target,
    Workload,
)
from loadgen.seen import Seen
from loadgen.timeline import timeline
from loadgen.validity import judged

METRICS: Sequence[Metric] = ("ttft", "itl", "tpot", "e2e", "service_ttft", "service", "lag")
OF_GROUPS: Sequence[Metric] = ("ttft", "tpot", "e2e")
_SLOWEST = 10
_EXAMPLES = 10
_MAX_GROUPS = 50


@dataclass(frozen=True, slots=True)
class Whole:
    """When the first request of a run was sent, and when the last one ended."""

    begin_s: float
    end_s: float

    @property
    def span_s(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What is known of a run apart from its requests. ``began_at``: second 0 of the schedule, in Unix seconds;
    ``reference``: where known answers come from; ``lag_limit_s``: None without one."""

    version: str
    label: str
    target: Target
    schedule: Schedule
    workload: Workload
    began_at: float
    interval_s: float
    lag_limit_s: float | None
    objectives: Sequence[Objective] = ()
    confidence: float = 0.95
    reference: str | None = None
    connections: int = 0
    shards: Sequence[Shard] = ()
    settings: dict[str, object]
    whole: Whole | None = None
    """Of the run where what is summed up is a piece of it."""


def run_of(facts: Facts, every: Sequence[Seen]) -> Run:
    """Returns the results of a run."""
    whole = facts.whole or _whole(every)
    counts = counts_of(every, facts.connections)
    latency = latencies(METRICS, every)
    lag = latency.get("lag")
    tenants = groups(every, lambda seen: seen.tenant.name if seen.tenant else None, whole.span_s)
    return Run(
        version=facts.version,
        label=facts.label,
        target=facts.target,
        schedule=facts.schedule,
        workload=facts.workload,
        began_at=facts.began_at,
        duration_s=whole.end_s,
        validity=judged(lag, facts.lag_limit_s, counts.scheduled, counts.ok + counts.wrong),
        counts=counts,
        rates=rates_over(whole.span_s, every, facts.objectives),
        latency=latency,
        objectives=[measured(each, every, facts.confidence).objective for each in facts.objectives],
        errors=errors(every),
        tenants=tenants,
        priorities=groups(every, _priority, whole.span_s),
        classes=groups(every, lambda seen: seen.name, whole.span_s),
        fairness=fairness(tenants),
        correctness=correctness(facts.reference, every),
        timeline=timeline(every, facts.interval_s),
        slowest=[seen.record() for seen in _slowest(every)],
        shards=list(facts.shards),
        settings=facts.settings,
    )


def _whole(every: Sequence[Seen]) -> Whole:
    return Whole(min((seen.sent for seen in every), default=0.0), max((seen.ended for seen in every), default=0.0))


def _priority(seen: Seen) -> str | None:
    return None if seen.tenant is None or seen.tenant.priority is None else str(seen.tenant.priority)


def _slowest(every: Sequence[Seen]) -> list[Seen]:
    answered = [seen for seen in every if seen.ttft_s is not None]
    return sorted(answered, key=lambda seen: -(seen.ttft_s or 0.0))[:_SLOWEST]


def counts_of(every: Iterable[Seen], connections: int = 0) -> Counts:
    found: dict[str, int] = defaultdict(int)
    for seen in every:
        found["scheduled"] += 1
        found[seen.outcome] += 1
        found["tries"] += seen.tries
        found["retried"] += seen.tries - 1
        for _, status, asked in seen.refusals:
            found[f"refused_{status}"] += 1
            found["retry_after"] += asked
    return Counts(**{"scheduled": 0, **found}, connections=connections)


def latencies(metrics: Sequence[Metric], every: Sequence[Seen]) -> dict[Metric, Latency]:
    """Returns the distributions over requests that were answered; the lag is that of all."""
    answered = [seen for seen in every if seen.outcome in ("ok", "wrong")]
    found = {}
    for metric in metrics:
        of = every if metric == "lag" else answered
        each = latency_of(value for seen in of for value in values(metric, seen))
        if each is not None:
            found[metric] = each
    return found


def rates_over(span_s: float, every: Sequence[Seen], objectives: Sequence[Objective] = ()) -> Rates:
    """Returns what was done a second in ``span_s`` seconds."""
    if span_s <= 0:
        return Rates(requests=0.0, output_tokens=0.0)
    answered = [seen for seen in every if seen.outcome in ("ok", "wrong")]
    asked = [seen.prompt_tokens for seen in answered if seen.prompt_tokens is not None]
    return Rates(
        requests=len(answered) / span_s,
        output_tokens=sum(seen.output_tokens for seen in answered) / span_s,
        prompt_tokens=sum(asked) / span_s if asked else None,
        goodput=sum(good(objectives, seen) for seen in every) / span_s if objectives else None,
    )


def errors(every: Iterable[Seen]) -> list[ErrorGroup]:
    """Returns the kinds of ends that were no answers, most frequent first."""
    found: dict[str, list[Seen]] = defaultdict(list)
    for seen in every:
        if seen.error is not None and seen.outcome not in ("ok", "wrong", "disconnected", "unfinished"):
            found[seen.error[0]].append(seen)
    kinds = sorted(found.items(), key=lambda each: -len(each[1]))
    return [_error(kind, seen) for kind, seen in kinds]


def _error(kind: str, every: Sequence[Seen]) -> ErrorGroup:
    first = min(every, key=lambda seen: seen.ended)
    return ErrorGroup(
        kind=kind,
        count=len(every),
        first_at_s=first.ended,
        last_at_s=max(seen.ended for seen in every),
        example=first.error[1] if first.error else "",
        status=first.status,
    )


def groups(every: Sequence[Seen], name_of: Callable[[Seen], str | None], span_s: float) -> list[Group]:
    """Returns figures of each name, by name; none if there are too many names to be classes."""
    found: dict[str, list[Seen]] = defaultdict(list)
    for seen in every:
        if (name := name_of(seen)) is not None:
            found[name].append(seen)
    if len(found) > _MAX_GROUPS:
        return []
    total = sum(seen.output_tokens for part in found.values() for seen in part)
    return [_group(name, part, span_s, total) for name, part in sorted(found.items())]


def _group(name: str, every: Sequence[Seen], span_s: float, total: int) -> Group:
    tenant = every[0].tenant
    return Group(
        name=name,
        counts=counts_of(every),
        rates=rates_over(span_s, every),
        share=sum(seen.output_tokens for seen in every) / total if total else 0.0,
        latency=latencies(OF_GROUPS, every),
        weight=tenant.weight if tenant and tenant.name == name else 1.0,
    )


def correctness(reference: str | None, every: Sequence[Seen]) -> Correctness | None:
    if reference is None:
        return None
    answered = [seen for seen in every if seen.outcome in ("ok", "wrong")]
    wrong = [seen.wrong for seen in answered if seen.wrong is not None]
    checked = sum(seen.checked for seen in answered)
    return Correctness(
        reference=reference,
        checked=checked,
        wrong=len(wrong),
        unknown=len(answered) - checked,
        examples=wrong[:_EXAMPLES],
    )
