"""A long run is summed up in pieces from a file, and says the same as a short one."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from testkit.load.null import null, plan
from testkit.load.simulated import seen_by

from loadgen import drive as driving
from loadgen import parts as summing
from loadgen.drive import Driven, part_of
from loadgen.null.behaviour import Behaviour
from loadgen.objectives import parse_objective
from loadgen.parts import Part, requests_of, summed_up
from loadgen.plan import Closed, Plan
from loadgen.results import Run
from loadgen.schedule.curve import flat
from loadgen.schedule.gaps import Gaps
from loadgen.schedule.schedule import arrivals
from loadgen.seen import Seen
from loadgen.spool import Spool, Spooled
from loadgen.workload.conversation import Tenant

REQUESTS = 1000
TENANTS = [Tenant(name=name, share=1.0, weight=weight) for name, weight in (("a", 1.0), ("b", 2.0))]
LOAD = arrivals(flat(100.0), Gaps(1.0), seed=3, requests=REQUESTS)


def requests() -> list[Seen]:
    """Of two tenants; every tenth is refused."""
    every = seen_by(Behaviour(first_s=0.05, gap_s=0.004, places=4), LOAD.times, tokens=9)
    for seen in every:
        seen.tenant, seen.name = TENANTS[seen.number % 2], f"turn {seen.number % 3}"
        if seen.number % 10 == 0:
            seen.outcome, seen.error, seen.status = "refused", ("http 429", "full"), 429
            seen.first_token, seen.output_tokens, seen.gaps = None, 0, array("d")
            seen.refusals.append((seen.ended, 429, True))
    return every


def spooled(path: Path, every: Sequence[Seen]) -> Spooled:
    spool = Spool(path)
    for seen in sorted(every, key=lambda seen: seen.ended):
        spool.add(seen)
    return spool.close()


def part(seen: Sequence[Seen], found: Spooled | None = None) -> Part:
    return Part(seen=seen, spooled=found, began_at=10.0, started_at=9.0, connections=7, ending="whole", unsent=0)


def a_plan(**changes: object) -> Plan:
    objectives = [parse_objective("ttft:p90<200ms"), parse_objective("itl:p99<5ms")]
    return replace(plan("http://h"), load=LOAD, objectives=objectives, **changes)  # type: ignore[arg-type]


def test_a_file_gives_back_what_went_in(tmp_path: Path) -> None:
    every = requests()
    found = spooled(tmp_path / "spool", every)
    back = sorted(found.every(), key=lambda seen: seen.scheduled)
    assert [replace(seen, gaps=()) for seen in back] == [replace(seen, gaps=()) for seen in every]
    assert [list(seen.gaps) for seen in back] == [pytest.approx(list(seen.gaps), rel=1e-6) for seen in every]
    assert (found.count, found.end_s) == (REQUESTS, max(seen.ended for seen in every))


@pytest.mark.parametrize("processes", [1, 3])
def test_pieces_say_the_same_as_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int) -> None:
    every = requests()
    shares = [every[number::processes] for number in range(processes)]
    whole, seen = summed_up(a_plan(), [part(share) for share in shares])
    monkeypatch.setattr(summing, "PIECE", 90)
    files = [spooled(tmp_path / f"{number}", share) for number, share in enumerate(shares)]
    pieces, none = summed_up(a_plan(), [part([], file) for file in files])
    assert (len(seen), len(none)) == (REQUESTS, 0)
    assert_alike(whole, pieces)


def assert_alike(whole: Run, pieces: Run) -> None:
    for name in ("schedule", "counts", "began_at", "duration_s", "errors", "slowest"):
        assert getattr(pieces, name) == getattr(whole, name), name
    assert pieces.rates.requests == pytest.approx(whole.rates.requests)
    assert pieces.rates.output_tokens == pytest.approx(whole.rates.output_tokens)
    assert pieces.rates.goodput == pytest.approx(whole.rates.goodput)
    assert pieces.latency.keys() == whole.latency.keys()
    for metric, latency in whole.latency.items():
        assert pieces.latency[metric].p99_ms == pytest.approx(latency.p99_ms, rel=2e-3, abs=2e-3)
        assert pieces.latency[metric].mean_ms == pytest.approx(latency.mean_ms, abs=1e-3)
    for mine, theirs in zip(pieces.objectives, whole.objectives, strict=True):
        assert (mine.met, mine.share_within) == (theirs.met, pytest.approx(theirs.share_within, abs=2e-3))
    for mine_group, theirs_group in zip(pieces.tenants + pieces.classes, whole.tenants + whole.classes, strict=True):
        assert (mine_group.name, mine_group.counts) == (theirs_group.name, theirs_group.counts)
        assert mine_group.share == pytest.approx(theirs_group.share)
        assert mine_group.rates.requests == pytest.approx(theirs_group.rates.requests)
    for mine_second, theirs_second in zip(pieces.timeline, whole.timeline, strict=True):
        for name in ("at_s", "scheduled", "sent", "ok", "refused", "output_tokens", "in_flight", "backlog"):
            assert getattr(mine_second, name) == getattr(theirs_second, name), name
    assert [shard.requests for shard in pieces.shards] == [shard.requests for shard in whole.shards]


async def test_many_requests_go_into_the_file_and_few_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driving, "PIECE", 30)
    async with null(Behaviour()) as url:
        many = await part_of(replace(plan(url), spool=tmp_path))
        unknown = await part_of(replace(plan(url), spool=tmp_path, load=Closed(4, None, 0.3)))
        few = await part_of(replace(plan(url), spool=tmp_path, load=Closed(4, 30, None)))
    assert (len(many.seen), many.spooled and many.spooled.count) == (0, 40)
    assert unknown.spooled is not None
    assert (len(few.seen), few.spooled) == (30, None)
    assert sorted(seen.number for seen in requests_of(many)) == list(range(40))
    run, seen = summed_up(plan("http://h"), [many])
    assert sorted(each.number for each in Driven(run, (), saturated=False, parts=[many]).every()) == list(range(40))
    assert (run.counts.ok, len(seen)) == (40, 40)
