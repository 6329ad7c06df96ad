"""Clients spread over devices first, then over replicas of one device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from services.fabric.shared_memory.step_choice import seat_for


def seats(devices: dict[int, str], place: int) -> list[Any]:
    """By number, as a client sees them that has this place at each."""
    return [
        SimpleNamespace(link=SimpleNamespace(seat=SimpleNamespace(number=number)), place=place, device=device)
        for number, device in devices.items()
    ]


@pytest.mark.parametrize(
    ("devices", "used"),
    [
        ({4: "a", 2: "a", 7: "b"}, [2, 7, 4, 2]),
        ({1: "a", 2: "a", 3: "a", 4: "b", 5: "b"}, [1, 4, 2, 5]),
        ({3: "", 1: "", 2: ""}, [1, 2, 3, 1]),
        ({6: "c"}, [6, 6, 6, 6]),
    ],
)
def test_two_clients_use_two_devices(devices: dict[int, str], used: list[int]) -> None:
    assert [seat_for(seats(devices, place)).link.seat.number for place in range(4)] == used
