"""What one test sets in the environment, the next does not see."""

from __future__ import annotations

import os

import pytest


@pytest.mark.parametrize("name", ["LEFT_BY_A_TEST", "EXPERTMESH_LEFT"])
@pytest.mark.parametrize("time", [1, 2])
def test_variables_go_with_the_test_that_sets_them(name: str, time: int) -> None:
    assert name not in os.environ, time
    os.environ[name] = "1"
