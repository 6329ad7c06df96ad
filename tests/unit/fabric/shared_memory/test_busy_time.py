"""Time in steps that run side by side, as that of a seat that serves one after the other."""

from __future__ import annotations

import pytest

from services.fabric.shared_memory.busy_time import Occupied


@pytest.mark.parametrize(
    ("readings", "busy_s", "waited_s"),
    [
        ([(1.0, 0.0), (2.0, 0.0)], 0.0, 0.0),
        ([(1.0, 0.25), (2.0, 0.5)], 0.5, 0.0),
        ([(1.0, 1.0), (2.0, 2.0)], 2.0, 0.0),
        ([(1.0, 3.0), (2.0, 6.0)], 2.0, 4.0),  # three workers' calls, all the time
        ([(1.0, 3.0), (2.0, 3.5)], 1.5, 2.0),  # a full second, then half of one
        ([(1.0, 0.75), (1.0, 0.75)], 0.75, 0.0),  # two readings at once take nothing away
    ],
)
def test_a_seat_is_busy_at_most_all_the_time(
    readings: list[tuple[float, float]], busy_s: float, waited_s: float
) -> None:
    """A reading: when it is taken, and the seconds in all steps until then."""
    now = 0.0
    occupied = Occupied(lambda: now)
    for at, total_s in readings:
        now = at
        occupied.add(total_s)
    assert (occupied.busy_s, occupied.waited_s) == (busy_s, waited_s)
