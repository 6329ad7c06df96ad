"""The chaos tool's own arithmetic: plans, verdicts on answers, gaps and their causes, the picture."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest
from chaos.faults import Done
from chaos.load import Job, Outcome, faults_of, jobs, judge
from chaos.picture import _KINDS, timeline
from chaos.plan import KINDS, LEADER, NEED_CABLES, Event, planned
from chaos.report import longest_of_each_overlap, longest_per_event, report, summary
from testkit.pictures import texts

from loadgen.client import StreamResult

MEMBERS = {
    "experts": ["experts-0", "experts-1"],
    "attention": ["attention-0"],
    "scheduler": ["scheduler-0"],
    "gateway": ["gateway", "gateway-1"],
    "redis": ["redis"],
}
LATENCIES = ("median", "95th percentile", "longest")
JOB = Job(prompt="p", max_tokens=3, token_ids=(5, 6, 7))


def plan(seed: int, **options: Any) -> list[Event]:
    return planned(seed, **({"seconds": 600, "every_s": 10, "kinds": KINDS, "members": MEMBERS} | options))


def test_a_seed_is_a_plan() -> None:
    assert plan(1) == plan(1) != plan(2)
    assert [event.at for event in plan(1)] == [10 * number + 5 for number in range(60)]


@pytest.mark.parametrize("seed", range(20))
def test_every_round_has_every_kind_and_targets_that_fit(seed: int) -> None:
    events = plan(seed)
    for start in range(0, len(events) - len(KINDS) + 1, len(KINDS)):
        assert {event.kind for event in events[start : start + len(KINDS)]} == set(KINDS)
    names = [name for names in MEMBERS.values() for name in names]
    fitting = {"leader": [LEADER]} | MEMBERS
    for event in events:
        assert event.target in (names if event.kind in NEED_CABLES else fitting[event.kind.rpartition(" ")[2]])


def test_every_kind_has_its_place_in_the_picture() -> None:
    assert set(KINDS) <= set(_KINDS)


def answer(*token_ids: int, text: str = "abc", **wrong: Any) -> StreamResult:
    facts = {"status": 200, "finish_reason": "length", "text": text, "done": True} | wrong
    return StreamResult(started=1.0, token_ids=list(token_ids), chunk_times=[2.0, 2.5, 4.5], **facts)


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        (answer(5, 6, 7), None),
        (answer(5, 6, 7, 0, finish_reason="stop"), None),
        (answer(5, 6), "lost"),
        (answer(5, 6, 7, finish_reason=None), "lost"),
        (answer(5, 6, 7, done=False), "lost"),
        (answer(5, 6, 7, error="gone"), "lost"),
        (answer(status=500), "lost"),
        (answer(5, 6, 6, 7), "doubled"),
        (answer(5, 9, 7), "changed"),
        (answer(5, 6, 7, text="abd"), "changed"),
    ],
)
def test_only_the_whole_answer_will_do(result: StreamResult, verdict: str | None) -> None:
    fault = judge(JOB, result, "abc")
    assert (fault and fault.partition(":")[0]) == verdict


def test_jobs_are_beginnings_of_recorded_answers_without_their_end() -> None:
    records = [{"prompt": "long", "output_ids": list(range(1, 49))}, {"prompt": "short", "output_ids": [9, 9, 0]}]
    (job,) = jobs(records, seed=1)
    assert job.token_ids == tuple(range(1, 1 + job.max_tokens))
    (ended,) = jobs([{"prompt": "p", "output_ids": [*range(1, 8), 0]}], seed=1)
    assert ended.token_ids == tuple(range(1, 8))


def happened(kind: Any, at: float, for_s: float = 0.0) -> Done:
    return Done(event=Event(at=at, kind=kind, target="x"), target="x", began=at, ended=at + for_s)


def test_a_gap_is_due_to_the_event_that_came_into_it_or_to_the_last_one_before() -> None:
    done = [happened("cut", 10, 5), happened("kill experts", 20)]
    gaps = [
        (1.0, 9.0),  # before anything: nobody's
        (9.9, 12.0),  # had begun when the cable was pulled
        (13.0, 16.0),
        (17.0, 20.5),  # long under way when the worker died
        (19.9, 20.3),
    ]
    assert [row["longest_gap_ms"] for row in longest_per_event(done, gaps, 0.0)] == [3500, 400]
    assert [row["longest_gap_ms"] for row in longest_per_event(done, gaps, 0.0, effect_s=2.0)] == [2100, 400]
    assert [row["before_ms"] for row in longest_per_event(done, gaps, 0.0)] == [8000, 0]


def test_of_long_waits_at_one_time_the_longest_is_reported() -> None:
    gaps = [(5.0, 5.2), (1.0, 1.5), (1.1, 1.8), (1.2, 1.3), (5.2, 5.5), (3.0, 3.05)]
    assert longest_of_each_overlap(gaps, 0.1) == [(1.1, 1.8), (5.0, 5.2), (5.2, 5.5)]
    assert longest_of_each_overlap(gaps, 1.0) == []


def test_the_report_counts_and_the_picture_shows() -> None:
    outcomes = [Outcome(job=JOB, result=answer(5, 6, 7), refused=0) for _ in range(3)]
    outcomes[0].fault = "lost: gone"
    assert faults_of(outcomes) == {"lost": 1}
    figures = report(outcomes, outcomes[1:], [happened("cut", 2.0, 1.5), happened("kill experts", 4.0)], [], 0.0)
    assert (figures["requests"], figures["tokens"], figures["lost"], figures["doubled"]) == (3, 9, 1, 0)
    assert figures["inter_token_ms"]["max"] == 2000
    assert [event["longest_gap_ms"] for event in figures["events"]] == [2000, 0]
    assert [row[:2] for row in figures["seconds"]] == [[2, 3], [4, 3]]
    assert any("1 lost" in line for line in summary(figures))
    said = texts(timeline(figures))
    assert {"link cut, 5 s", "2.0 s", "kill -9, expert worker", "1 s", "seconds since the load began"} <= set(said)
    assert "3 requests, 9 tokens, 2 events: 1 lost, 0 doubled, 0 changed" in said
    latencies, lanes = inspect.unwrap(timeline)(figures).axes
    drawn = {line.get_label(): line.get_data().values for line in latencies.patches if line.get_label() in LATENCIES}
    for column, name in enumerate(LATENCIES, 2):
        first, second = (row[column] for row in figures["seconds"])
        np.testing.assert_array_equal(drawn[name], [math.nan, math.nan, first, math.nan, second])
    bars = [path.get_extents().x0 for kind in lanes.collections for path in kind.get_paths()]
    assert sorted(bars) == [2.0, 4.0]
