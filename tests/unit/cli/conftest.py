"""The command line, as its user has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from services.cli.main import main


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """`expertmesh` with ``argv``, which must end with ``code``: what it says, ``.out`` and ``.err``."""

    def ran(code: int, *argv: str) -> Any:
        capsys.readouterr()
        assert main(argv) == code
        return capsys.readouterr()

    return ran
