"""What processes saw of a run, and what all of it amounts to. Of a long run no more than a piece is in memory at once:
each is summed up by itself, and the sums are added like those of several pods."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import msgspec

from loadgen.histograms import latency_of
from loadgen.merge import add_up
from loadgen.plan import Closed, Plan
from loadgen.results import CutShort, Latency, Run, Schedule, Shard, Target, Workload
from loadgen.seen import Seen
from loadgen.spool import PIECE, Spooled
from loadgen.summary import Facts, Whole, run_of
from loadgen.timeline import interval_s

Ending = Literal["whole", "saturated", "cut short"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What one process saw. ``began_at``: second 0 of the schedule, ``started_at``: when it was ready;
    both in Unix seconds."""

    seen: Sequence[Seen]
    spooled: Spooled | None = None
    """Where they are instead, in a long run."""
    began_at: float
    started_at: float
    connections: int
    ending: Ending
    cut_at_s: float | None = None
    unsent: int | None = None
    """Conversations, where it is known how many there would have been."""

    @property
    def late_start_s(self) -> float:
        return max(0.0, self.started_at - self.began_at)


def summed_up(plan: Plan, parts: Sequence[Part]) -> tuple[Run, Sequence[Seen]]:
    """Returns a run of ``parts``, with its requests as they were due; without them if they are too many."""
    if sum(part.spooled.count for part in parts if part.spooled) > PIECE:
        return _by_pieces(plan, parts), ()
    parts = [replace(part, seen=list(requests_of(part))) for part in parts]
    seen = sorted((seen for part in parts for seen in part.seen), key=lambda seen: seen.scheduled)
    shards = [
        shard_of(plan, number, len(parts), latency_of(seen.lag_s for seen in part.seen), len(part.seen), part)
        for number, part in enumerate(parts)
    ]
    return run_of(facts_of(plan, parts, shards), seen), seen


def requests_of(part: Part) -> Iterator[Seen]:
    """Returns the requests of ``part``, wherever they are."""
    return iter(part.seen) if part.spooled is None else part.spooled.every()


def _by_pieces(plan: Plan, parts: Sequence[Part]) -> Run:
    spooled = [part.spooled for part in parts if part.spooled is not None and part.spooled.count]
    whole = Whole(begin_s=min(each.begin_s for each in spooled), end_s=max(each.end_s for each in spooled))
    total, shards = None, []
    for number, part in enumerate(parts):
        if (run := _sum(plan, part, whole)) is not None:
            lag, requests = run.latency.get("lag"), run.counts.scheduled
            shards.append(shard_of(plan, number, len(parts), lag, requests, part))
            total = run if total is None else add_up([total, run])
    assert total is not None, "a piece has requests"
    return msgspec.structs.replace(total, shards=shards)


def _sum(plan: Plan, part: Part, whole: Whole) -> Run | None:
    total, left, connections = None, requests_of(part), part.connections
    while seen := list(itertools.islice(left, PIECE)):
        piece = replace(part, seen=seen, connections=connections)
        run = run_of(facts_of(plan, [piece], [], whole), seen)
        total, connections = run if total is None else add_up([total, run]), 0
    return total


def cut_short(parts: Sequence[Part], signal: str | None) -> CutShort | None:
    ends = [part.cut_at_s for part in parts if part.cut_at_s is not None]
    if not ends or signal is None:
        return None
    left = [part.unsent for part in parts]
    unsent = None if None in left else sum(part or 0 for part in left)
    return CutShort(signal=signal, at_s=max(ends), unsent=unsent)


def facts_of(plan: Plan, parts: Sequence[Part], shards: Sequence[Shard], whole: Whole | None = None) -> Facts:
    load = plan.load
    closed = isinstance(load, Closed)
    mean_gap_s = None if isinstance(load, Closed) else load.mean_gap_s
    return Facts(
        version=_version(),
        label=plan.label,
        target=Target(
            url=plan.url,
            model=plan.bodies.model,
            endpoint=plan.bodies.endpoint,
            stream=plan.stream,
            server=plan.server,
        ),
        schedule=_schedule(plan, parts),
        workload=_workload(plan, parts),
        began_at=min(part.began_at for part in parts),
        interval_s=interval_s(load.seconds or 0.0),
        lag_limit_s=None if closed else plan.lag_limit.of(mean_gap_s),
        objectives=plan.objectives,
        confidence=plan.confidence,
        reference=plan.answers.source if plan.answers else None,
        connections=sum(part.connections for part in parts),
        shards=shards,
        whole=whole,
        settings=plan.settings,
    )


def _schedule(plan: Plan, parts: Sequence[Part]) -> Schedule:
    load = plan.load
    if isinstance(load, Closed):
        requests = sum(len(part.seen) for part in parts)
        seconds = load.seconds or max((seen.ended for part in parts for seen in part.seen), default=0.0)
        text = f"{load.clients} clients that wait for each answer"
        return Schedule(kind="closed", text=text, requests=requests, duration_s=seconds, concurrency=load.clients)
    gap = load.mean_gap_s
    return Schedule(
        kind=load.kind,
        text=load.text,
        requests=len(load.times),
        duration_s=load.seconds,
        rate=load.rate,
        mean_gap_ms=None if gap is None else gap * 1e3,
    )


def _workload(plan: Plan, parts: Sequence[Part]) -> Workload:
    asked = [seen.prompt_tokens for part in parts for seen in part.seen if seen.prompt_tokens is not None]
    given = [seen.output_tokens for part in parts for seen in part.seen if seen.outcome in ("ok", "wrong")]
    return Workload(
        kind=plan.source.kind,
        text=plan.source.text,
        prompt_tokens_mean=sum(asked) / len(asked) if asked else None,
        output_tokens_mean=sum(given) / len(given) if given else None,
    )


def shard_of(plan: Plan, number: int, parts: int, lag: Latency | None, requests: int, part: Part) -> Shard:
    index, of = plan.shard
    return Shard(
        index=index + of * number,
        of=of * parts,
        requests=requests,
        lag_p99_ms=lag.p99_ms if lag else 0.0,
        started_at=part.started_at,
        late_start_s=part.late_start_s,
    )


def _version() -> str:
    try:
        return version("expertmesh")
    except PackageNotFoundError:
        return "unknown"
