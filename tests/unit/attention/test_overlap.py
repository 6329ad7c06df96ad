"""When a step is split, and where: the policy alone, against made-up times."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.attention.step.overlap import FIRST_RETRY, LAST_RETRY, SAMPLES, OverlapPolicy, StepTime, balanced_cut

SEQUENCES = [(1, 10)] * 8
Times = Callable[[bool], StepTime]


def play(policy: OverlapPolicy, times: Times, steps: int, sequences: list[tuple[int, int]] = SEQUENCES) -> list[bool]:
    """Which of ``steps`` were split."""
    split = []
    for _ in range(steps):
        split.append(policy.cut(sequences) is not None)
        policy.note(sequences, times(split[-1]), split=split[-1])
    return split


def taking(plain_s: float, split_s: float, waited_s: float) -> Times:
    return lambda split: StepTime(seconds=split_s if split else plain_s, waited_s=0.0 if split else waited_s)


GAIN, LOSS = taking(1.0, 0.7, 0.5), taking(1.0, 1.3, 0.5)


def test_the_faster_way_is_found_and_kept_but_for_trials_of_the_other() -> None:
    split = play(OverlapPolicy("auto"), GAIN, 10 * FIRST_RETRY)
    assert split[: 4 * SAMPLES] == [False] * SAMPLES + [True, False] * SAMPLES + [True] * SAMPLES
    assert 0 < split[SAMPLES:].count(False) <= 10 * SAMPLES
    assert sum(split[-FIRST_RETRY:]) >= FIRST_RETRY - 2 * SAMPLES


def test_the_slower_way_is_tried_ever_less_often() -> None:
    split = play(OverlapPolicy("auto"), LOSS, 20 * LAST_RETRY)
    assert 0 < sum(split[: 2 * FIRST_RETRY]) <= 2 * SAMPLES
    late = split[10 * LAST_RETRY :]
    assert 0 < sum(late) <= 12 * SAMPLES


def test_nothing_is_tried_where_the_wait_is_too_short_to_pay() -> None:
    times = taking(1.0, 0.7, 0.04)
    assert not any(play(OverlapPolicy("auto"), times, 5 * FIRST_RETRY))
    assert any(play(OverlapPolicy("auto", waits_seen=False), times, 5 * FIRST_RETRY))


def test_a_change_of_the_network_is_noticed() -> None:
    policy = OverlapPolicy("auto")
    play(policy, LOSS, 5 * FIRST_RETRY)
    assert sum(play(policy, GAIN, 4 * LAST_RETRY)[-LAST_RETRY:]) > LAST_RETRY - 20 * SAMPLES
    assert sum(play(policy, LOSS, 4 * LAST_RETRY)[-LAST_RETRY:]) < 20 * SAMPLES


def test_a_difference_within_the_noise_changes_nothing() -> None:
    draw = random.Random(0)

    def times(split: bool) -> StepTime:
        stalled = 40.0 if draw.random() < 0.1 else 0.0  # as this machine does
        return StepTime(seconds=(0.97 if split else 1.0) + stalled, waited_s=0.5)

    split = play(OverlapPolicy("auto"), times, 40 * FIRST_RETRY)
    assert 0 < sum(split) <= 10 * SAMPLES


def test_numbers_of_rows_are_judged_separately() -> None:
    policy = OverlapPolicy("auto")
    many = [(64, 64)] * 4
    for _ in range(4 * SAMPLES):
        play(policy, LOSS, 1)
        play(policy, GAIN, 1, many)
    assert policy.cut(SEQUENCES) is None
    assert policy.cut(many) == 2


@pytest.mark.parametrize(("mode", "expected"), [("on", True), ("off", False)])
def test_on_and_off_measure_nothing(mode: str, expected: bool) -> None:
    policy = OverlapPolicy(mode)  # type: ignore[arg-type]
    for times in (GAIN, LOSS):
        assert set(play(policy, times, 3 * FIRST_RETRY)) == {expected}
    assert policy.cut([(5, 5)]) is None, "one sequence stays whole"


def test_rows_and_what_they_attend_to_are_balanced() -> None:
    decodes, prompt = [(1, 1000)] * 30, (32, 32)
    assert OverlapPolicy("on", tokens_per_row=1e9).cut([*decodes, prompt]) == 30
    assert OverlapPolicy("on", tokens_per_row=1.0).cut([*decodes, prompt]) == 16


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=40))
def test_no_other_cut_is_more_even(costs: list[float]) -> None:
    at = balanced_cut(costs)
    assert 0 < at < len(costs)

    def gap(cut: int) -> float:
        return abs(sum(costs[:cut]) - sum(costs[cut:]))

    assert gap(at) <= min(gap(cut) for cut in range(1, len(costs))) + 1e-6 * sum(costs)


def test_a_machine_that_slows_down_for_a_while_misleads_nobody() -> None:
    """Were one way timed after the other, the slow spell would fall on one of them."""
    policy, step = OverlapPolicy("auto"), 0

    def times(split: bool) -> StepTime:
        nonlocal step
        step += 1
        slow = 2.0 if step <= 2 * SAMPLES else 1.0
        return StepTime(seconds=(1.2 if split else 1.0) * slow, waited_s=0.5 * slow)

    assert not any(play(policy, times, 3 * FIRST_RETRY)[3 * SAMPLES : FIRST_RETRY])
