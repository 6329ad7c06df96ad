"""Waiting says what it waited for, and looks once more after a pause of its own."""

from __future__ import annotations

import time
from functools import partial

import pytest
from testkit.waiting import eventually, until


def test_it_returns_the_first_answer_that_is_true() -> None:
    answers = iter([0, "", "there"])
    assert until(lambda: next(answers)) == "there"


def test_a_wait_in_vain_names_the_condition_and_what_was_there() -> None:
    found = [1, 2]
    with pytest.raises(AssertionError, match=r"in vain: .*len\(found\) == 3.* was False, found = \[1, 2\]"):
        until(lambda: len(found) == 3, limit_s=0.0)
    with pytest.raises(AssertionError, match=r"waited 0 s in vain: three of them; the last answer was \[1, 2\]|False"):
        until(partial(found.__contains__, 3), "three of them", limit_s=0.0)


async def test_an_event_loop_awaits_what_answers_later() -> None:
    async def there(answer: int) -> int:
        return answer

    assert await eventually(partial(there, 3)) == 3
    with pytest.raises(AssertionError, match="in vain: none"):
        await eventually(partial(there, 0), "none", limit_s=0.0)


def test_what_came_during_a_pause_of_its_own_counts() -> None:
    looks: list[float] = []

    def slow() -> bool:
        looks.append(time.monotonic())
        time.sleep(0.02)
        return len(looks) > 1

    assert until(slow, limit_s=0.01)
