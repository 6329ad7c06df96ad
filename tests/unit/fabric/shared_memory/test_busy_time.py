"""Time in steps that run side by side, as that of a seat that serves one after the other."""

from __future__ import annotations

import pytest

from services.fabric.shared_memory.busy_time import Occupied


class Clock:
    at = 100.0

    def __call__(self) -> float:
        return self.at


@pytest.mark.parametrize(
    ("totals", "busy_s", "waited_s"),
    [
        ([0.0, 0.0], 0.0, 0.0),
        ([0.25, 0.5], 0.5, 0.0),
        ([1.0, 2.0], 2.0, 0.0),
        ([3.0, 6.0], 2.0, 4.0),  # three workers' calls, all the time
        ([3.0, 3.5], 1.5, 2.0),  # a full second, then half of one
    ],
)
def test_a_seat_is_busy_at_most_all_the_time(totals: list[float], busy_s: float, waited_s: float) -> None:
    clock = Clock()
    occupied = Occupied(clock)
    for total_s in totals:  # one a second
        clock.at += 1.0
        occupied.add(total_s)
    assert (occupied.busy_s, occupied.waited_s) == (busy_s, waited_s)


def test_two_readings_at_once_take_nothing_away() -> None:
    clock = Clock()
    occupied = Occupied(clock)
    clock.at += 1.0
    for _ in range(2):
        occupied.add(0.75)
    assert (occupied.busy_s, occupied.waited_s) == (0.75, 0.0)
