"""The command line, as its user has it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.cli.main import main


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], temporary: Path) -> Callable[..., Any]:  # noqa: ARG001
    """`expertmesh` with ``argv``, which must end with ``code``, where no server runs: what it says, ``.out``,
    ``.err``."""

    def ran(code: int, *argv: str) -> Any:
        capsys.readouterr()
        assert main(argv) == code
        return capsys.readouterr()

    return ran
