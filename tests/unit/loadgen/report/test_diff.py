"""Two runs whose difference is known: drawn from distributions that differ by so much, or not at all."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.load_results import BEGAN, TARGET, Wait, a_run, log_normal

from loadgen.errors import ResultsUnreadable
from loadgen.report.blocks import MAX_BLOCKS, blocks_of, draws, percentiles, token_rate
from loadgen.report.compare import Change, Comparison, Limits, compare, ended, judged, newcombe
from loadgen.report.diff import diff, text
from loadgen.results import Correctness, Counts, Event, Objective, Point, Run, Schedule, Search, Sweep, Validity


def slower(factor: float) -> Wait:
    return log_normal(120.0 * factor)


def run(seed: int = 0, **settings: Any) -> Run:
    return a_run(seconds=16, rate=25.0, tokens=4, seed=seed, **settings)


def changed(before: Run, **changes: Any) -> Run:
    return msgspec.structs.replace(before, **changes)


def verdicts(found: Comparison) -> dict[str, Change]:
    return {each.name: each.verdict for each in found.differences}


def ends(before: Run, after: Run) -> dict[str, Change]:
    return {each.name: each.verdict for each in ended(before, after, Limits())}


@pytest.fixture(scope="module")
def base() -> Run:
    return run()


def test_a_run_does_not_differ_from_itself(base: Run) -> None:
    found = compare(base, base)
    assert set(verdicts(found).values()) == {"none"}
    assert {each.change for each in found.differences} == {0.0}
    assert diff(base, base, Limits()).line == "NO DIFFERENCE: All intervals are within the threshold."


def test_the_same_load_with_slower_first_tokens_is_worse_and_the_other_way_round_better(base: Run) -> None:
    """The same draws times 1.25, so that the truth is known to the bin."""
    later = run(ttft=slower(1.25))
    for first, second, verdict, truth in ((base, later, "worse", 0.25), (later, base, "better", -0.2)):
        found = compare(first, second)
        changes = {each.name: each for each in found.differences}
        for name in ("TTFT p50", "TTFT p99"):
            each = changes[name]
            assert each.verdict == verdict
            assert each.change == pytest.approx(truth, abs=0.005)
            assert each.low is not None
            assert each.high is not None
            assert each.low - 0.005 <= truth <= each.high + 0.005
        assert (changes["ITL p50"].verdict, changes["output tokens"].verdict) == ("none", "none")
        assert found.verdict == verdict


def test_other_draws_of_the_same_distributions_are_no_difference() -> None:
    """Six pairs at 99 %: one false alarm among their 36 comparisons is what may be expected."""
    runs = [run(seed) for seed in range(7)]
    alarms = [
        (number, each.name)
        for number, (first, second) in enumerate(itertools.pairwise(runs))
        for each in compare(first, second).differences
        if each.verdict in ("better", "worse")
    ]
    assert len(alarms) <= 1, alarms


def test_more_tokens_count_where_the_load_was_the_same(base: Run) -> None:
    fewer = a_run(seconds=16, rate=15.0, tokens=4)
    assert "output tokens" not in verdicts(compare(fewer, base)), "fewer requests were due"
    closed = [
        changed(each, schedule=Schedule(kind="closed", text="8 clients", requests=9, duration_s=24))
        for each in (fewer, base)
    ]
    assert verdicts(compare(*closed))["output tokens"] == "better"


def test_other_draws_of_slower_distributions_are_worse() -> None:
    for seed in range(2):
        found = compare(run(seed), run(seed + 100, ttft=slower(1.4)))
        assert verdicts(found)["TTFT p50"] == "worse"


def test_a_change_below_the_threshold_does_not_count(base: Run) -> None:
    later = run(ttft=slower(1.03))
    assert verdicts(compare(base, later))["TTFT p50"] == "none"
    assert verdicts(compare(base, later, Limits(threshold=0.01)))["TTFT p50"] == "worse"


def test_one_bad_second_proves_nothing(base: Run) -> None:
    """A sixteenth of all requests were slow: beyond chance if each fell by itself, but they fell together."""

    def once(rng: random.Random, at_s: float) -> float:
        return log_normal(1200.0 if int(at_s) == 9 else 120.0)(rng, at_s)

    [each] = [each for each in compare(base, run(ttft=once)).differences if each.name == "TTFT p99"]
    assert each.change is not None
    assert each.change > 2
    assert each.verdict == "unclear"


def test_a_run_that_is_too_short_says_so() -> None:
    first, second = (a_run(seconds=4, rate=50.0, tokens=4, ttft=slower(factor)) for factor in (1.0, 3.0))
    found = diff(first, second, Limits())
    assert found.verdict == "none", "no request failed in either"
    assert {each.verdict for each in found.parts[0].comparison.differences if each.unit != "share"} == {"unclear"}
    assert "Too short or unsteady for: TTFT p50" in found.line


def test_a_wrong_answer_where_there_was_none_is_worse_whatever_its_share(base: Run) -> None:
    good, bad = (changed(base, correctness=Correctness(reference="a", checked=10_000, wrong=wrong)) for wrong in (0, 1))
    assert ends(good, bad)["wrong answers"] == "worse"
    assert ends(bad, bad)["wrong answers"] == "none"
    assert ends(good, good)["wrong answers"] == "none"
    many = changed(base, correctness=Correctness(reference="a", checked=10_000, wrong=500))
    assert ends(many, good)["wrong answers"] == "better"


def test_failed_requests_count_by_their_share(base: Run) -> None:
    few, many = (changed(base, counts=Counts(scheduled=1000, ok=1000 - bad, failed=bad)) for bad in (2, 40))
    assert ends(few, many)["failed requests"] == "worse"
    assert ends(many, few)["failed requests"] == "better"
    assert ends(few, few)["failed requests"] == "unclear", "four in a thousand could hide there"
    timeouts = changed(base, counts=Counts(scheduled=1000, ok=960, timeout=40))
    assert ends(few, timeouts)["failed requests"] == "worse"


def test_what_was_another_load_is_said(base: Run) -> None:
    other = changed(base, schedule=Schedule(kind="x", text="another", requests=1, duration_s=1))
    found = diff(base, other, Limits())
    assert found.notes == [f"another schedule: {base.schedule.text}, then another"]
    assert "Not the same load: another schedule" in text(found, Limits())
    killed = changed(base, events=[Event(at_s=1, action="kill", target="experts-1")])
    assert diff(base, killed, Limits()).notes == ["other events: none, then kill experts-1"]


def test_figures_of_an_invalid_run_are_not_used(base: Run) -> None:
    late = changed(base, validity=Validity(valid=False, lag_p99_ms=80))
    assert diff(base, late, Limits()).line == "INVALID: the later run is invalid."
    assert diff(late, base, Limits()).invalid == ["the earlier run is invalid"]


def a_search(rate: float | None, high: float | None) -> Search:
    slo = [Objective(metric="ttft", percentile=99, target_ms=500)]
    return Search(
        version="0.1.0",
        target=TARGET,
        began_at=BEGAN,
        confidence=0.95,
        objectives=slo,
        rate=rate,
        low=rate,
        high=high,
        goodput=rate,
        probes=[],
    )


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ((10.0, 11.0), (14.0, 15.0), "better"),
        ((14.0, 15.0), (10.0, 11.0), "worse"),
        ((10.0, 12.0), (11.0, 13.0), "none"),
        ((10.0, 10.2), (10.3, 10.5), "none"),
        ((None, 4.0), (10.0, 11.0), "better"),
        ((10.0, 11.0), (None, 4.0), "worse"),
        ((None, 4.0), (None, 4.0), "none"),
        ((10.0, None), (14.0, 15.0), "none"),
    ],
)
def test_searches_differ_where_their_brackets_do(before: Any, after: Any, verdict: Change) -> None:
    assert diff(a_search(*before), a_search(*after), Limits()).verdict == verdict


def test_sweeps_are_compared_load_by_load(base: Run) -> None:
    def swept(loads: list[tuple[float, Run]], by: Any = "rate") -> Sweep:
        points = [Point(load=load, pareto=True, saturated=False, run=each) for load, each in loads]
        return Sweep(version="0.1.0", target=TARGET, began_at=BEGAN, by=by, points=points)

    later = run(ttft=slower(1.5))
    found = diff(swept([(1.0, base), (2.0, base)]), swept([(2.0, later), (1.0, base), (4.0, later)]), Limits())
    assert found.verdict == "worse"
    assert "Worse in TTFT p50 at 2 requests/s" in found.line
    assert {part.title: part.comparison.verdict for part in found.parts} == {
        "2 requests/s": "worse",
        "1 requests/s": "none",
    }
    for other in (swept([(3.0, base)]), swept([(1.0, base)], by="concurrency")):
        with pytest.raises(ResultsUnreadable, match="no load in common"):
            diff(swept([(1.0, base)]), other, Limits())


def test_kinds_are_not_mixed(base: Run) -> None:
    with pytest.raises(ResultsUnreadable, match="not a run and a search"):
        diff(base, a_search(1.0, 2.0), Limits())


def test_blocks_have_everything_once(base: Run) -> None:
    long = a_run(seconds=70, rate=4.0, tokens=2)
    for each in (base, long):
        blocks = blocks_of(each)
        assert len(blocks) <= MAX_BLOCKS
        assert sum(block.scheduled for block in blocks) == each.counts.scheduled
        assert sum(sum(block.bins["ttft"].values()) for block in blocks) == each.latency["ttft"].count
        once = dict.fromkeys(range(len(blocks)), 1)
        median, tail = percentiles(blocks, once, "ttft", [50.0, 90.0])
        assert median == pytest.approx(each.latency["ttft"].p50_ms, rel=0.006)
        assert tail == pytest.approx(each.latency["ttft"].p90_ms, rel=0.03), "its rank may be the next one"
        assert token_rate(blocks, once) == pytest.approx(each.rates.output_tokens, rel=0.1)


def test_draws_are_the_same_each_time_and_paired_where_asked() -> None:
    assert draws(9, 9, together=True, count=5) == draws(9, 9, together=True, count=5)
    assert all(first is second for first, second in draws(9, 9, together=True, count=5))
    apart = draws(9, 7, together=False, count=50)
    assert {(sum(first.values()), sum(second.values())) for first, second in apart} == {(9, 7)}
    assert any(dict(first) != dict(second) for first, second in apart)


@given(
    before=st.tuples(st.integers(0, 50), st.integers(50, 500)),
    after=st.tuples(st.integers(0, 50), st.integers(50, 500)),
    confidence=st.sampled_from([0.9, 0.99]),
)
def test_an_interval_of_shares_has_the_difference_in_it(
    before: tuple[int, int], after: tuple[int, int], confidence: float
) -> None:
    low, high = newcombe(before, after, confidence)
    change = after[0] / after[1] - before[0] / before[1]
    assert -1 <= low <= change + 1e-12
    assert change - 1e-12 <= high <= 1
    back = newcombe(after, before, confidence)
    assert math.isclose(back[0], -high, abs_tol=1e-12)
    assert math.isclose(back[1], -low, abs_tol=1e-12)


@given(change=st.floats(-0.9, 3), below=st.floats(0, 1), above=st.floats(0, 1), threshold=st.floats(0, 0.5))
def test_a_verdict_follows_from_the_interval(change: float, below: float, above: float, threshold: float) -> None:
    low, high = change - below, change + above
    less, more = (judged(change, low, high, threshold, more_is_better=more) for more in (False, True))
    opposite = {"better": "worse", "worse": "better"}
    assert more == opposite.get(less, less)
    if less in opposite:
        assert abs(change) > threshold
        assert not low <= 0 <= high
    if less == "unclear":
        assert low <= 0 <= high
