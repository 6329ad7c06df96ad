"""When a process is started again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.errors import PortInUse
from services.runtime import AGAIN
from services.supervisor.policy import FATAL_CODES, MAX_AGAIN, RestartPolicy


def test_short_lives_back_off_and_end() -> None:
    policy = RestartPolicy(first_delay_s=1, max_delay_s=3, max_failures=5)
    assert [policy.delay(70, 0.1) for _ in range(5)] == [1, 2, 3, 3, None]


def test_a_healthy_life_clears_the_record() -> None:
    policy = RestartPolicy(first_delay_s=1, healthy_s=10, max_failures=3)
    assert [policy.delay(-9, lived) for lived in (1, 1, 10, 1, 1)] == [1, 2, 1, 2, None]


@pytest.mark.parametrize("code", sorted(FATAL_CODES))
def test_start_up_errors_are_final(code: int) -> None:
    assert RestartPolicy().delay(code, 1e6) is None


def test_a_taken_port_is_tried_again() -> None:
    assert RestartPolicy().delay(PortInUse.exit_code, 0) is not None


def test_one_that_is_spared_is_tried_on_and_on() -> None:
    policy = RestartPolicy(first_delay_s=1, max_delay_s=3, max_failures=2)
    assert [policy.delay(70, 0.1, spared=True) for _ in range(2000)][:4] == [1, 2, 3, 3]
    assert policy.exhausted
    assert policy.delay(70, 0.1) is None


@given(st.lists(st.tuples(st.integers(-15, 255), st.floats(0, 100))))
def test_delays_are_bounded(ends: list[tuple[int, float]]) -> None:
    policy = RestartPolicy(first_delay_s=0.5, max_delay_s=4)
    for code, lived in ends:
        delay = policy.delay(code, lived)
        assert delay is None or 0.5 <= delay <= 4


def test_a_process_that_ended_because_of_another_has_not_failed() -> None:
    policy = RestartPolicy(first_delay_s=1, max_delay_s=8, max_failures=2)
    assert [policy.delay(AGAIN, 0) for _ in range(5)] == [1, 2, 4, 8, 8]
    assert [policy.delay(-9, 0), policy.delay(AGAIN, 60), policy.delay(-9, 0)] == [1, 1, None]


def test_what_makes_processes_end_together_again_and_again_is_not_tried_for_ever() -> None:
    policy = RestartPolicy(first_delay_s=1)
    assert all(policy.delay(AGAIN, 0) for _ in range(MAX_AGAIN))
    assert policy.delay(AGAIN, 0) is None
