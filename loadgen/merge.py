"""Results of one load that several pods sent, as one: counts are added, and so are histograms."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import msgspec

from loadgen.errors import NotMergeable
from loadgen.fairness import fairness
from loadgen.histograms import added
from loadgen.objectives import with_histogram
from loadgen.results import (
    Correctness,
    Counts,
    CutShort,
    ErrorGroup,
    Group,
    Interval,
    Latency,
    Metric,
    Objective,
    Rates,
    Run,
    Schedule,
    Workload,
)
from loadgen.validity import judged

_SAME_BEGIN_S = 0.001
_SLOWEST, _EXAMPLES = 10, 10


def merge(runs: Sequence[Run]) -> Run:
    """Returns ``runs``, which are shards of one schedule, as one run.

    Raises:
        NotMergeable: they are not, or one is missing or there twice.
    """
    _check(runs)
    return add_up(runs)


def add_up(runs: Sequence[Run]) -> Run:
    """Returns the sum of ``runs``, which have no request in common."""
    first = runs[0]
    latency = _latency([run.latency for run in runs])
    counts = _counts([run.counts for run in runs])
    tenants = _groups([run.tenants for run in runs])
    shards = sorted((shard for run in runs for shard in run.shards), key=lambda shard: shard.index)
    limit_ms = first.validity.lag_limit_ms
    limit_s = None if limit_ms is None else limit_ms / 1e3
    return msgspec.structs.replace(
        first,
        schedule=_schedule(runs),
        workload=_workload(runs),
        duration_s=max(run.duration_s for run in runs),
        validity=judged(latency.get("lag"), limit_s, counts.scheduled, counts.ok + counts.wrong),
        counts=counts,
        rates=_rates(runs),
        latency=latency,
        objectives=[_objective(each, latency, counts) for each in first.objectives],
        errors=_errors([error for run in runs for error in run.errors]),
        tenants=tenants,
        priorities=_groups([run.priorities for run in runs]),
        classes=_groups([run.classes for run in runs]),
        fairness=fairness(tenants),
        correctness=_correctness([run.correctness for run in runs if run.correctness]),
        timeline=_timeline([run.timeline for run in runs]),
        slowest=sorted((each for run in runs for each in run.slowest), key=lambda each: -_ttft(each))[:_SLOWEST],
        shards=shards,
        events=sorted((event for run in runs for event in run.events), key=lambda event: event.at_s),
        series=next((run.series for run in runs if run.series), []),
        cut_short=_cut_short([run.cut_short for run in runs if run.cut_short]),
        requests_file=None,
    )


def _cut_short(parts: Sequence[CutShort]) -> CutShort | None:
    if not parts:
        return None
    left = [part.unsent for part in parts]
    unsent = None if None in left else sum(part or 0 for part in left)
    return msgspec.structs.replace(parts[0], at_s=max(part.at_s for part in parts), unsent=unsent)


def _ttft(record: object) -> float:
    first, due = getattr(record, "first_token_s", None), getattr(record, "scheduled_s", 0.0)
    return 0.0 if first is None else first - due


def _check(runs: Sequence[Run]) -> None:
    if not runs:
        raise NotMergeable("There are no runs to merge.")
    first = runs[0]
    for run in runs[1:]:
        if abs(run.began_at - first.began_at) > _SAME_BEGIN_S:
            raise NotMergeable(
                "The runs began at different times.", hint="Give each `--shard I/N` the same --start-at."
            )
        if run.schedule != first.schedule and first.schedule.kind != "closed":
            raise NotMergeable("The runs have different schedules.", hint="Give each shard the same options.")
    found = [(shard.index, shard.of) for run in runs for shard in run.shards]
    wanted = [(number, len(found)) for number in range(len(found))]
    if sorted(found) != wanted:
        named = ", ".join(f"{index}/{of}" for index, of in sorted(found))
        raise NotMergeable(f"The shards are {named}: not all of one run, or one twice.")


def _latency(parts: Sequence[dict[Metric, Latency]]) -> dict[Metric, Latency]:
    names = dict.fromkeys(name for part in parts for name in part)
    found = {name: added(part.get(name) for part in parts) for name in names}
    return {name: each for name, each in found.items() if each is not None}


def _counts(parts: Sequence[Counts]) -> Counts:
    return Counts(**{name: sum(getattr(part, name) for part in parts) for name in Counts.__struct_fields__})


def _rates(runs: Sequence[Run]) -> Rates:
    """Of all shards: what each did in its own time, over the time of all."""
    span_s = max(run.duration_s for run in runs)

    def total(of: Callable[[Rates], float | None]) -> float | None:
        found = [(of(run.rates), run.duration_s) for run in runs]
        return None if any(rate is None for rate, _ in found) else sum((rate or 0.0) * s for rate, s in found) / span_s

    return Rates(
        requests=total(lambda rates: rates.requests) or 0.0,
        output_tokens=total(lambda rates: rates.output_tokens) or 0.0,
        prompt_tokens=total(lambda rates: rates.prompt_tokens),
        goodput=total(lambda rates: rates.goodput),
    )


def _schedule(runs: Sequence[Run]) -> Schedule:
    """That of all, which all have; but of a closed loop each shard knows what its own clients sent."""
    first = runs[0].schedule
    if first.kind != "closed":
        return first
    requests, seconds = (run.schedule.requests for run in runs), (run.schedule.duration_s for run in runs)
    return msgspec.structs.replace(first, requests=sum(requests), duration_s=max(seconds))


def _workload(runs: Sequence[Run]) -> Workload:
    def mean(of: Callable[[Workload], float | None]) -> float | None:
        found = [(value, run.counts.ok + run.counts.wrong) for run in runs if (value := of(run.workload)) is not None]
        count = sum(weight for _, weight in found)
        return sum(value * weight for value, weight in found) / count if count else None

    return msgspec.structs.replace(
        runs[0].workload,
        prompt_tokens_mean=mean(lambda workload: workload.prompt_tokens_mean),
        output_tokens_mean=mean(lambda workload: workload.output_tokens_mean),
    )


def _objective(objective: Objective, latency: dict[Metric, Latency], counts: Counts) -> Objective:
    found = latency.get(objective.metric)
    unanswered = counts.refused + counts.failed + counts.timeout
    return objective if found is None else with_histogram(objective, found, unanswered)


def _errors(every: Iterable[ErrorGroup]) -> list[ErrorGroup]:
    kinds: dict[str, list[ErrorGroup]] = defaultdict(list)
    for error in every:
        kinds[error.kind].append(error)
    found = [_same_error(errors) for errors in kinds.values()]
    return sorted(found, key=lambda error: -error.count)


def _same_error(errors: Sequence[ErrorGroup]) -> ErrorGroup:
    first = min(errors, key=lambda error: error.first_at_s)
    last_at_s = max(error.last_at_s for error in errors)
    return msgspec.structs.replace(first, count=sum(error.count for error in errors), last_at_s=last_at_s)


def _groups(parts: Sequence[Sequence[Group]]) -> list[Group]:
    named: dict[str, list[Group]] = defaultdict(list)
    for part in parts:
        for group in part:
            named[group.name].append(group)
    total = sum(group.rates.output_tokens for groups in named.values() for group in groups)
    return [_same_group(groups, total) for _, groups in sorted(named.items())]


def _same_group(groups: Sequence[Group], total: float) -> Group:
    tokens = sum(group.rates.output_tokens for group in groups)
    return Group(
        name=groups[0].name,
        counts=_counts([group.counts for group in groups]),
        rates=Rates(requests=sum(group.rates.requests for group in groups), output_tokens=tokens),
        share=tokens / total if total else 0.0,
        latency=_latency([group.latency for group in groups]),
        weight=groups[0].weight,
    )


def _correctness(parts: Sequence[Correctness]) -> Correctness | None:
    if not parts:
        return None
    return Correctness(
        reference=parts[0].reference,
        checked=sum(part.checked for part in parts),
        wrong=sum(part.wrong for part in parts),
        unknown=sum(part.unknown for part in parts),
        examples=[example for part in parts for example in part.examples][:_EXAMPLES],
    )


def _timeline(parts: Sequence[Sequence[Interval]]) -> list[Interval]:
    longest = max(parts, key=len, default=[])
    return [_same_interval([part[number] for part in parts if number < len(part)]) for number in range(len(longest))]


def _same_interval(every: Sequence[Interval]) -> Interval:
    added_up = ("scheduled", "sent", "ok", "failed", "refused", "disconnected", "output_tokens", "in_flight", "backlog")
    return Interval(
        at_s=every[0].at_s,
        seconds=every[0].seconds,
        lag_max_ms=max(each.lag_max_ms for each in every),
        ttft=added(each.ttft for each in every),
        e2e=added(each.e2e for each in every),
        itl=added(each.itl for each in every),
        **{name: sum(getattr(each, name) for each in every) for name in added_up},
    )
