"""Schedules: their rates, their gaps, and that shards are parts of one."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.errors import BadSetting
from loadgen.schedule.curve import Piece, RateCurve, diurnal, flat, parse_curve
from loadgen.schedule.gaps import Gaps, parse_gaps
from loadgen.schedule.schedule import arrivals, at_once

RATES = st.floats(0.0, 500.0)
PIECES = st.lists(st.builds(Piece, st.floats(0.1, 50.0), RATES, RATES), min_size=1, max_size=6)


def expected_until(pieces: list[Piece], moment: float) -> float:
    """The integral of the rate, by its definition."""
    total = 0.0
    for piece in pieces:
        seconds = min(moment, piece.seconds)
        total += seconds * piece.begin + (piece.end - piece.begin) / piece.seconds * seconds**2 / 2
        moment -= seconds
    return total


@given(PIECES, st.floats(0.001, 0.999))
def test_a_curve_says_when_a_number_of_arrivals_is_expected(pieces: list[Piece], part: float) -> None:
    curve = RateCurve(pieces, "")
    if curve.arrivals > 1e-3:
        moment = curve.at(part * curve.arrivals)
        assert 0 <= moment <= curve.seconds * (1 + 1e-9)
        assert expected_until(pieces, moment) == pytest.approx(part * curve.arrivals, rel=1e-6, abs=1e-6)
        assert curve.at(curve.arrivals * 1.001) == math.inf


@given(st.floats(1.0, 1000.0), st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.integers(0, 5))
def test_arrivals_are_in_order_and_of_their_number(rate: float, cv: float, seed: int) -> None:
    found = arrivals(flat(rate), Gaps(cv), seed=seed, requests=200)
    assert len(found.times) == 200
    assert list(found.times) == sorted(found.times)
    assert found.times == arrivals(flat(rate), Gaps(cv), seed=seed, requests=200).times
    assert found.seconds == found.times[-1]


@pytest.mark.parametrize("text", ["constant", "poisson", "gamma:3", "gamma:0.3", "erlang:4"])
def test_gaps_have_their_mean_and_their_spread(text: str) -> None:
    gaps = parse_gaps(text)
    found = list(itertools.islice(gaps.draw(random.Random(7)), 40_000))
    assert statistics.mean(found) == pytest.approx(1.0, abs=0.02 * max(1.0, gaps.cv))
    assert statistics.pstdev(found) == pytest.approx(gaps.cv, rel=0.04)


@pytest.mark.parametrize("rate", [50.0, 100.0, 250.0, 500.0])
def test_expert_flows_arrivals_have_a_mean_gap_of_one_over_lambda(rate: float) -> None:
    found = arrivals(flat(rate), Gaps(1.0), seed=3, requests=20_000)
    gaps = [b - a for a, b in itertools.pairwise(found.times)]
    assert statistics.mean(gaps) == pytest.approx(1 / rate, rel=0.03)
    assert found.mean_gap_s == pytest.approx(1 / rate, rel=0.03)


def test_steps_ramps_and_days_have_their_arrivals_at_their_times() -> None:
    times = arrivals(parse_curve("100:10,400:10,0:5,50..150:10"), Gaps(1.0), seed=1).times
    counts = [sum(begin <= moment < begin + 5 for moment in times) for begin in range(0, 35, 5)]
    for found, wanted in zip(counts, [500, 500, 2000, 2000, 0, 375, 625], strict=True):
        assert found == pytest.approx(wanted, abs=5 * math.sqrt(wanted))
    day = arrivals(diurnal(100, 100, 1.8), Gaps(0.0), seed=1).times
    assert len(day) == pytest.approx(10_000, rel=0.01)
    middle, edge = (sum(begin <= moment < begin + 10 for moment in day) for begin in (45, 0))
    assert (middle / 10, edge / 10) == (pytest.approx(179, rel=0.02), pytest.approx(25.2, rel=0.05))


@given(st.integers(1, 7), st.integers(1, 300))
def test_shards_are_one_schedule(of: int, requests: int) -> None:
    whole = arrivals(flat(100.0), Gaps(2.0), seed=9, requests=requests).times
    parts = [list(enumerate(whole))[index::of] for index in range(of)]
    again = [arrivals(flat(100.0), Gaps(2.0), seed=9, requests=requests).times for _ in range(of)]
    assert sorted(itertools.chain(*parts)) == list(enumerate(whole))
    assert all(times == whole for times in again)


def test_all_at_once_has_no_gap() -> None:
    found = at_once(3)
    assert (list(found.times), found.rate, found.mean_gap_s) == ([0.0, 0.0, 0.0], None, None)


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "0", "10:0", "10:-5", "10:nan", "inf:3", "1..2", "day:1:2", "day:10:60:3"]
)
def test_what_is_no_rate_says_what_one_is(text: str) -> None:
    with pytest.raises(BadSetting):
        parse_curve(text)


@pytest.mark.parametrize("text", ["", "gamma", "gamma:0", "gamma:x", "erlang:1.5", "erlang:0", "poisson:2", "even"])
def test_what_are_no_gaps_says_what_they_are(text: str) -> None:
    with pytest.raises(BadSetting, match="constant, poisson"):
        parse_gaps(text)


def test_a_schedule_has_an_end_and_arrivals() -> None:
    with pytest.raises(BadSetting, match="no end"):
        arrivals(flat(1.0), Gaps(1.0), seed=0)
    with pytest.raises(BadSetting, match="No request"):
        arrivals(flat(0.001), Gaps(0.0), seed=0, seconds=1.0)
