"""Results files: what is written is read, and shards add up to what one process would have seen."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.load.simulated import facts, seen_by

from loadgen.errors import NotMergeable, ResultsUnreadable
from loadgen.histograms import decode, latency_of, percentile_ms, share_within
from loadgen.merge import merge
from loadgen.null.behaviour import Behaviour, Stall
from loadgen.objectives import parse_objective
from loadgen.results import Run, Schedule, Search, Shard, Target, read, read_run, write
from loadgen.seen import Seen
from loadgen.summary import run_of
from loadgen.workload.conversation import Tenant

SERVER = Behaviour(first_s=0.03, gap_s=0.004, places=4, stalls=(Stall(2.0, 0.5),))
SLO = parse_objective("ttft:p90<100ms")


def load(count: int = 300) -> list[Seen]:
    rng = random.Random(8)
    every = seen_by(SERVER, sorted(rng.random() * 6 for _ in range(count)), tokens=5)
    for seen in every:
        seen.tenant = Tenant(name="ab"[seen.number % 2], priority=5)
        seen.prompt_tokens = 10 + seen.number % 7
        if seen.number % 50 == 7:
            seen.outcome, seen.error = "failed", ("http 500", "no")
    return every


def shards(every: list[Seen], of: int) -> list[Run]:
    parts = [[seen for seen in every if seen.number % of == index] for index in range(of)]
    return [
        run_of(
            replace(
                facts([SLO]),
                shards=[Shard(index=index, of=of, requests=len(part), lag_p99_ms=0.0, started_at=0.0)],
                connections=1,
            ),
            part,
        )
        for index, part in enumerate(parts)
    ]


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 5))
def test_merged_shards_are_the_run_of_one_process(of: int) -> None:
    every = load()
    whole, found = run_of(replace(facts([SLO]), connections=of), every), merge(shards(every, of))
    assert found.counts == whole.counts
    assert found.schedule == whole.schedule
    assert found.duration_s == whole.duration_s
    for metric, latency in whole.latency.items():
        assert found.latency[metric].count == latency.count
        assert decode(found.latency[metric]).counts[:] == decode(latency).counts[:]
        assert found.latency[metric].p99_ms == pytest.approx(latency.p99_ms, rel=0.002, abs=0.002)
        assert found.latency[metric].mean_ms == pytest.approx(latency.mean_ms, rel=0.001)
    assert found.rates.requests == pytest.approx(whole.rates.requests, rel=0.03)
    assert found.rates.goodput == pytest.approx(whole.rates.goodput, rel=0.03)
    assert [each.count for each in found.errors] == [each.count for each in whole.errors] == [6]
    assert [each.counts for each in found.tenants] == [each.counts for each in whole.tenants]
    assert [each.number for each in found.slowest] == [each.number for each in whole.slowest]
    assert found.objectives[0].value_ms == pytest.approx(whole.objectives[0].value_ms, rel=0.01)
    assert found.objectives[0].share_within == pytest.approx(whole.objectives[0].share_within, abs=0.005)
    assert [(each.sent, each.ok, each.output_tokens) for each in found.timeline] == [
        (each.sent, each.ok, each.output_tokens) for each in whole.timeline
    ]


def test_shards_of_a_closed_loop_add_their_requests_up() -> None:
    parts = []
    for part, requests, seconds in zip(shards(load(), 2), (140, 160), (5.0, 6.0), strict=True):
        closed = Schedule(kind="closed", text="4 clients", requests=requests, duration_s=seconds, concurrency=4)
        parts.append(msgspec.structs.replace(part, schedule=closed))
    found = merge(parts).schedule
    assert (found.requests, found.duration_s, found.concurrency) == (300, 6.0, 4)


def test_what_is_no_whole_run_is_not_merged() -> None:
    parts = shards(load(), 3)
    with pytest.raises(NotMergeable, match="0/3, 2/3"):
        merge([parts[0], parts[2]])
    with pytest.raises(NotMergeable, match="twice"):
        merge([parts[0], parts[1], parts[1]])
    with pytest.raises(NotMergeable, match="different times"):
        merge([parts[0], msgspec.structs.replace(parts[1], began_at=9.0), parts[2]])
    other = msgspec.structs.replace(parts[1].schedule, rate=7.0)
    with pytest.raises(NotMergeable, match="different schedules"):
        merge([parts[0], msgspec.structs.replace(parts[1], schedule=other), parts[2]])


def test_the_timeline_has_what_happened_when() -> None:
    every = load()
    run = run_of(facts(), every)
    for each in run.timeline:
        due = [seen for seen in every if each.at_s <= seen.scheduled < each.at_s + 1 and seen.outcome == "ok"]
        assert (each.ttft.count if each.ttft else 0) == len(due)
    assert sum(each.scheduled for each in run.timeline) == sum(each.sent for each in run.timeline) == 300
    assert sum(each.output_tokens for each in run.timeline) == 300 * 5
    assert sum(each.ok for each in run.timeline) == 294
    assert sum(each.failed for each in run.timeline) == 6
    assert sum(each.itl.count for each in run.timeline if each.itl) == 294 * 4 == run.latency["itl"].count
    stalled = run.timeline[2]
    assert stalled.ttft is not None
    assert stalled.ttft.max_ms > 490
    assert run.timeline[-1].in_flight == 0


def test_files_are_read_as_they_were_written(tmp_path: Path) -> None:
    run, path = run_of(facts([SLO]), load()), tmp_path / "new" / "run.json"
    write(path, run)
    assert read(path) == read_run(path) == run
    search = Search(
        version="1",
        target=Target(url="http://a", model="m"),
        began_at=1.0,
        confidence=0.9,
        objectives=[SLO],
        rate=None,
        low=None,
        high=None,
        goodput=None,
        probes=[],
    )
    write(path, search)
    assert read(path) == search
    with pytest.raises(ResultsUnreadable, match="is a search, not a run"):
        read_run(path)
    path.write_bytes(path.read_bytes().replace(b'"kind": "search",', b'"kind": "search", "form": 99,'))
    with pytest.raises(ResultsUnreadable, match="form 99"):
        read(path)
    path.write_text("{}")
    with pytest.raises(ResultsUnreadable, match="no results file"):
        read(path)


@given(st.lists(st.floats(1e-5, 1000.0), min_size=1, max_size=200), st.floats(1.0, 99.9))
def test_histograms_are_within_a_thousandth_of_the_values(values: list[float], percentile: float) -> None:
    found = latency_of(values)
    assert found is not None
    ordered = sorted(values)
    place = next(value for at, value in enumerate(ordered, 1) if at / len(ordered) * 100 >= percentile - 1e-9)
    assert percentile_ms(found, percentile) == pytest.approx(place * 1e3, rel=0.002, abs=0.002)
    ends_ms = (found.min_ms, found.max_ms)
    assert ends_ms == (pytest.approx(ordered[0] * 1e3, abs=1e-4), pytest.approx(ordered[-1] * 1e3, abs=1e-4))
    limit = ordered[len(ordered) // 2] * 1e3
    assert share_within(found, limit * 1.003) >= sum(value * 1e3 <= limit for value in values) / len(values)
