"""When a process is started again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.errors import PortInUse
from services.runtime import AGAIN
from services.supervisor.policy import FATAL_CODES, MAX_AGAIN, RestartPolicy


@pytest.mark.parametrize(
    ("max_failures", "ends", "delays"),
    [
        pytest.param(5, [(70, 0.1)] * 5, [1, 2, 3, 3, None], id="short lives back off and end"),
        pytest.param(3, [(-9, s) for s in (1, 1, 10, 1, 1)], [1, 2, 1, 2, None], id="a healthy life clears the record"),
        pytest.param(2, [(AGAIN, 0)] * 5, [1, 2, 3, 3, 3], id="one that ended because of another has not failed"),
        pytest.param(2, [(-9, 0), (AGAIN, 60), (-9, 0)], [1, 1, None], id="nor does that clear the record"),
        pytest.param(3, [(PortInUse.exit_code, 0)], [1], id="a taken port is tried again"),
        *(pytest.param(3, [(code, 1e6)], [None], id=f"{code} at start-up is final") for code in sorted(FATAL_CODES)),
    ],
)
def test_delays_until_the_next_start(
    max_failures: int, ends: list[tuple[int, float]], delays: list[float | None]
) -> None:
    policy = RestartPolicy(first_delay_s=1, max_delay_s=3, healthy_s=10, max_failures=max_failures)
    assert [policy.delay(code, lived) for code, lived in ends] == delays


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


def test_what_makes_processes_end_together_again_and_again_is_not_tried_for_ever() -> None:
    policy = RestartPolicy(first_delay_s=1)
    assert all(policy.delay(AGAIN, 0) for _ in range(MAX_AGAIN))
    assert policy.delay(AGAIN, 0) is None
