"""A minute of ``make leaks``."""

from __future__ import annotations

import pytest
from chaos.leaks import main

pytestmark = [pytest.mark.alone, pytest.mark.night]


def test_a_minute_of_clients_leaves_nothing_behind() -> None:
    assert main(["--minutes", "1"]) == 0
