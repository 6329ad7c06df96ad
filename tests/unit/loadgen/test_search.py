"""The search for the highest rate, on a simulated server whose knee is known; and how sure percentiles are."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import partial

import pytest
from testkit.load.simulated import facts, seen_by, simulated

from loadgen.confidence import batches_of, independent, percentile_between, wilson
from loadgen.drive import Driven
from loadgen.errors import BadSetting
from loadgen.null.behaviour import Behaviour
from loadgen.objectives import measured, parse_objective
from loadgen.pareto import pareto
from loadgen.results import Objective, Probe
from loadgen.saturation import Saturation
from loadgen.schedule.curve import flat
from loadgen.schedule.gaps import Gaps
from loadgen.schedule.schedule import arrivals
from loadgen.search import RateSearch, SearchOptions
from loadgen.summary import run_of

SERVER = Behaviour(first_s=0.05, gap_s=0.01, places=6)
KNEE = 6 / 0.06
TTFT = parse_objective("ttft:p90<70ms")
OPTIONS = SearchOptions(start=16.0, seconds=60.0, most_seconds=120.0, precision=0.05)


def within(rate: float, objective: Objective) -> float:
    """The share of a long run's requests that are within the target."""
    every = seen_by(SERVER, arrivals(flat(rate), Gaps(1.0), seed=99, requests=30_000).times)
    return sum((seen.ttft_s or 0.0) <= objective.target_ms / 1e3 for seen in every) / len(every)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_rate_found_is_met_and_a_little_more_is_not(seed: int) -> None:
    probes: list[Probe] = []
    measure = partial(_measure, seed)
    found = RateSearch(measure, [TTFT], OPTIONS, probes.append).run()
    assert found.rate is not None
    assert found.high is not None
    assert found.rate < KNEE
    assert found.rate < found.high <= 1.25 * found.rate
    assert within(found.rate * 0.97, TTFT) >= 0.9
    assert within(found.high * 1.05, TTFT) < 0.9
    assert found.goodput is not None
    assert found.goodput == pytest.approx(found.rate * within(found.rate, TTFT), rel=0.1)
    assert list(found.probes) == probes


def test_rates_on_the_way_up_get_a_short_look_and_the_last_one_is_measured_in_full() -> None:
    spent: list[tuple[float, float]] = []

    def measure(rate: float, seconds: float) -> Driven:
        spent.append((rate, seconds))
        return _measure(0, rate, seconds)

    found = RateSearch(measure, [TTFT], replace(OPTIONS, start=1.0)).run()
    assert spent[:5] == [(1.0, 20.0), (2.0, 15.0), (4.0, 15.0), (8.0, 15.0), (16.0, 15.0)]
    assert found.rate is not None
    assert max(seconds for rate, seconds in spent if rate == found.rate) >= OPTIONS.seconds
    assert within(found.rate * 0.97, TTFT) >= 0.9


def test_a_look_that_was_too_kind_is_not_what_is_found() -> None:
    """At 8 a second the server is fast for its first 20 s, and slow from then on."""

    def measure(rate: float, seconds: float) -> Driven:
        return _measure(0, 90.0 if rate >= 8.0 and seconds > 20.0 else min(rate, 20.0), seconds)

    found = RateSearch(measure, [TTFT], replace(OPTIONS, start=4.0, most=16.0)).run()
    assert found.rate is not None
    assert found.rate < 8.0


def _measure(seed: int, rate: float, seconds: float) -> Driven:
    return simulated(SERVER, rate, seconds, [TTFT], seed)


def test_above_the_knee_a_run_is_saturated_and_below_it_is_not() -> None:
    for rate in (1.3 * KNEE, 2 * KNEE):
        assert simulated(SERVER, rate, 60.0, [TTFT]).saturated
    for seed in range(4):
        assert not simulated(SERVER, 0.9 * KNEE, 60.0, [TTFT], seed).saturated


def test_a_burst_that_is_worked_off_is_no_saturation() -> None:
    saturation = Saturation(100.0)
    rises = [min(100, 100 - abs(number - 50) * 2) for number in range(100)]
    assert not any(saturation.add(5 + number / 4, count) for number, count in enumerate(rises) if number > 55)


def test_a_rate_that_is_too_late_to_tell_is_invalid_and_ends_upwards() -> None:
    def late(rate: float, seconds: float) -> Driven:
        driven = simulated(SERVER, rate, seconds, [TTFT])
        if rate <= 20:
            return driven
        for seen in driven.seen:
            seen.lag_s = 0.1
        return Driven(run_of(facts([TTFT], lag_limit_s=0.001), driven.seen), driven.seen, False)

    found = RateSearch(late, [TTFT], OPTIONS).run()
    assert found.rate == pytest.approx(20, rel=0.1)
    assert found.high is None
    assert {probe.verdict for probe in found.probes if probe.rate > 20} == {"invalid"}


def test_wrong_answers_are_no_speed() -> None:
    def wrong(rate: float, seconds: float) -> Driven:
        driven = simulated(SERVER, rate, seconds, [TTFT])
        for seen in driven.seen[::20]:
            seen.outcome = "wrong"
        return Driven(run_of(facts([TTFT]), driven.seen), driven.seen, False)

    found = RateSearch(wrong, [TTFT], OPTIONS).run()
    assert found.rate is None
    assert "% of the answers are wrong" in found.probes[0].why
    assert "wrong" in found.probes[0].why


def test_wilsons_interval_holds_the_share_as_often_as_it_says() -> None:
    rng, held = random.Random(1), 0
    for _ in range(600):
        share = sum(rng.random() < 0.9 for _ in range(200)) / 200
        around = wilson(share, 200, 0.95)
        held += around.low <= 0.9 <= around.high
    assert held / 600 == pytest.approx(0.95, abs=0.03)


def test_neighbours_that_are_alike_are_worth_few_values() -> None:
    """Of 12 runs of equal values each is worth one, or a little less; independent values are worth what they are."""
    rng = random.Random(2)
    alike = [(float(number), int(number // 200 % 2), 1) for number in range(2400)]
    assert 8 < independent(batches_of(alike), 0.95) < 12
    alone = [(float(number), int(rng.random() < 0.9), 1) for number in range(2400)]
    assert 700 < independent(batches_of(alone), 0.95) <= 2400


def test_percentiles_of_a_queue_lie_between_their_bounds() -> None:
    """At 70 % load waits last: bounds that took values for independent would hold the truth in four of ten runs."""
    rate = 0.7 * KNEE
    truth = sorted(_ttft(rate, 30_000, 77))[27_000]
    held = narrow = 0
    for seed in range(40):
        every = seen_by(SERVER, arrivals(flat(rate), Gaps(1.0), seed=seed, requests=3000).times)
        found = measured(parse_objective("ttft:p90<70ms"), every, 0.95).objective
        assert found.low_ms is not None
        assert found.high_ms is not None
        held += found.low_ms <= truth * 1e3 <= found.high_ms
        ordered = sorted(seen.first_token - seen.scheduled for seen in every if seen.first_token)
        naive = percentile_between(ordered, 90, 3000, 0.95)
        narrow += naive.low <= truth <= naive.high
    assert held >= 33
    assert narrow <= 24


def _ttft(rate: float, requests: int, seed: int) -> list[float]:
    every = seen_by(SERVER, arrivals(flat(rate), Gaps(1.0), seed=seed, requests=requests).times)
    return [seen.first_token - seen.scheduled for seen in every if seen.first_token]


def test_what_was_not_answered_was_never_within_the_target() -> None:
    every = seen_by(SERVER, [number / 10 for number in range(100)])
    for seen in every[:20]:
        seen.outcome = "failed"
    found = measured(parse_objective("ttft:p90<70ms"), every, 0.95)
    assert found.objective.share_within == pytest.approx(0.8)
    assert (found.objective.met, found.objective.value_ms) == (False, None)
    for seen in every[:20]:
        seen.outcome = "disconnected"
    assert measured(parse_objective("ttft:p90<70ms"), every, 0.95).objective.met


def test_objectives_are_parsed() -> None:
    found = parse_objective("itl:p99.9 < 0.2s")
    assert (found.metric, found.percentile, found.target_ms) == ("itl", 99.9, 200.0)
    for text in ("ttft", "ttft:p99", "ttft:p100<1s", "speed:p50<1s", "ttft:p50<1h"):
        with pytest.raises(BadSetting, match="ttft:p99<500ms"):
            parse_objective(text)


def test_a_load_is_worth_choosing_if_no_other_is_better_in_both() -> None:
    loads = [simulated(SERVER, rate, 30.0, []).run for rate in (20.0, 60.0, 90.0)]
    assert pareto(loads) == [False, True, True]  # at 20 nothing is faster than at 60
    slower = simulated(Behaviour(first_s=0.2, gap_s=0.1, places=6), 15.0, 30.0, []).run
    assert pareto([*loads, slower]) == [False, True, True, False]


def test_no_rate_is_found_where_none_is_met() -> None:
    found = RateSearch(
        lambda rate, seconds: simulated(Behaviour(first_s=0.5), rate, seconds, [TTFT]), [TTFT], OPTIONS
    ).run()
    assert (found.rate, found.goodput) == (None, None)
    assert found.high is not None
    assert 1 < found.high * OPTIONS.most_seconds / OPTIONS.least_requests < 2
    assert math.isfinite(found.high)
