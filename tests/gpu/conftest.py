"""What one GPU shows of the product (``make gpu1-test``). Elsewhere these tests skip and say why."""

from __future__ import annotations

import pytest
from testkit.gpu.workers import why_not


@pytest.fixture(scope="session", autouse=True)
def _one_gpu() -> None:
    if reason := why_not(1):
        pytest.skip(f"on a GPU: {reason}")
