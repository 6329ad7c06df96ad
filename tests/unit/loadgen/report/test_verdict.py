"""The first line of a report: what a reader must know first comes first."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from testkit.load_results import BEGAN, TARGET, a_run, wrong

from loadgen.report.verdict import Level, exit_code, verdict
from loadgen.results import (
    Correctness,
    Counts,
    Event,
    Objective,
    Point,
    Probe,
    Run,
    Search,
    Sweep,
    Validity,
)

MET = Objective(metric="ttft", percentile=99, target_ms=500, value_ms=312, met=True)
MISSED = Objective(metric="tpot", percentile=99.9, target_ms=40, value_ms=61, met=False)
UNKNOWN = Objective(metric="e2e", percentile=50, target_ms=40)
CHECKED = Correctness(reference="answers.json", checked=40, wrong=0)
LATE = Validity(valid=False, lag_p99_ms=80, lag_limit_ms=5, reasons=["the load generator was late by 80 ms."])


@pytest.fixture(scope="module")
def good() -> Run:
    return a_run(seconds=3)


def changed(run: Run, **changes: Any) -> Run:
    return msgspec.structs.replace(run, **changes)


def test_a_good_run_says_what_was_checked(good: Run) -> None:
    found = verdict(changed(good, objectives=[MET], correctness=CHECKED))
    assert found.line == (
        "VALID: No wrong answer among 40 that were checked. SLO met: TTFT p99 312 ms (at most 500 ms)."
    )
    assert verdict(good).line == "VALID: Answers were not checked. No SLO was given."
    assert (found.level, exit_code(good)) == (Level.GOOD, 0)


CASES: dict[str, tuple[dict[str, Any], str, int]] = {
    "late": ({"validity": LATE}, "INVALID: The figures say nothing of the server: the load generator was late by", 3),
    "no answer": ({"counts": Counts(scheduled=9, failed=9)}, "BROKEN: No request of 9 was answered.", 3),
    "refused": ({"counts": Counts(scheduled=9, refused=9)}, "BROKEN: No request of 9 was answered.", 3),
    "one wrong": (
        {"counts": Counts(scheduled=9, ok=8, wrong=1), "correctness": Correctness(reference="a", checked=9, wrong=1)},
        "WRONG ANSWERS: 1 answer of 9 that were checked is wrong.",
        1,
    ),
    "slo": ({"objectives": [MET, MISSED]}, "MISSED: SLO missed: TPOT p99.9 61 ms (at most 40 ms).", 1),
    "slo unknown": ({"objectives": [UNKNOWN]}, "MISSED: SLO missed: end to end p50 – (at most 40 ms).", 1),
    "failed": (
        {"counts": Counts(scheduled=1000, ok=988, failed=5, timeout=7)},
        "MISSED: 12 requests of 1,000 failed (1.2 %).",
        1,
    ),
    "event": (
        {"events": [Event(at_s=30, action="kill", target="experts-9", error="There is no process experts-9.")]},
        "MISSED: An event did not happen: kill experts-9 at 30 s (There is no process experts-9).",
        1,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_bad_comes_first(good: Run, case: str) -> None:
    changes, begins, code = CASES[case]
    run = changed(good, **changes)
    assert verdict(run).line.startswith(begins)
    assert exit_code(run) == code


def test_the_worst_comes_first_of_several(good: Run) -> None:
    found = verdict(
        changed(good, validity=LATE, objectives=[MISSED], counts=Counts(scheduled=9, ok=7, wrong=1, failed=1))
    )
    levels = [finding.level for finding in found.findings]
    assert levels == sorted(levels, reverse=True)
    assert (found.word, levels[0], levels[1]) == ("INVALID", Level.INVALID, Level.WRONG)


def test_requests_that_were_broken_off_on_purpose_are_no_fault(good: Run) -> None:
    assert verdict(changed(good, counts=Counts(scheduled=9, disconnected=9))).level == Level.GOOD
    refused = verdict(changed(good, counts=Counts(scheduled=100, ok=98, refused=2)))
    assert refused.level == Level.GOOD
    assert "2 requests (2 %) ended with a refusal." in refused.line


def a_search(good: Run, rate: float | None, **changes: Any) -> Search:
    probes = [
        Probe(rate=4.0, verdict="met", why="", run=good),
        Probe(rate=8.0, verdict="missed", why="TTFT p99 is above 500 ms.", run=good),
    ]
    search = Search(
        version="0.1.0",
        target=TARGET,
        began_at=BEGAN,
        confidence=0.95,
        objectives=[MET],
        rate=rate,
        low=rate,
        high=8.0,
        goodput=3.9,
        probes=probes,
    )
    return msgspec.structs.replace(search, **changes)


def test_a_search_says_up_to_where_the_slo_is_kept(good: Run) -> None:
    line = "VALID: The SLO is kept up to 4 requests a second, and not 8 (95% confidence)."
    assert verdict(a_search(good, 4.0)).line == line
    none = a_search(good, None)
    assert verdict(none).line == "MISSED: No rate kept the SLO; the lowest that was tried is 4 a second."
    assert [exit_code(each) for each in (a_search(good, 4.0), none)] == [0, 1]
    bad = changed(
        good,
        counts=Counts(scheduled=9, ok=7, wrong=2),
        correctness=Correctness(reference="a", checked=9, wrong=2, examples=[wrong()]),
    )
    probe = Probe(rate=4.0, verdict="met", why="", run=bad)
    assert verdict(a_search(good, 4.0, probes=[probe])).line.startswith(
        "WRONG ANSWERS: 2 answers came wrong on the way."
    )
    invalid = [Probe(rate=4.0, verdict="invalid", why="late", run=good)]
    assert verdict(a_search(good, None, probes=invalid)).line.startswith("INVALID: No probe was valid: late.")


def test_a_sweep_says_what_was_the_most(good: Run) -> None:
    points = [Point(load=load, pareto=True, saturated=False, run=good) for load in (1.0, 2.0)]
    more = changed(good, rates=msgspec.structs.replace(good.rates, output_tokens=1e4))
    points[1] = msgspec.structs.replace(points[1], run=more)
    sweep = Sweep(version="0.1.0", target=TARGET, began_at=BEGAN, by="concurrency", points=points)
    assert verdict(sweep).line == "VALID: At most 10,000 output tokens a second, with 2 clients."
    late = msgspec.structs.replace(points[1], run=changed(more, validity=LATE))
    found = verdict(msgspec.structs.replace(sweep, points=[points[0], late]))
    assert found.line.startswith("MISSED: 1 load of 2 gave no valid figures.")
    assert "with 1 client." in found.line
    assert exit_code(msgspec.structs.replace(sweep, points=[late])) == 3
