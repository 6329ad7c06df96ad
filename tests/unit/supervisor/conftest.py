"""Stand-ins for the roles, which are run from ``fakes``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-ins leave their notes; also the folder of temporary files."""
    # with what this test imports: another clone of the project may be the one that is installed
    paths = [str(Path(__file__).parent / "fakes"), *(path for path in sys.path if path)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("FAKE_DIR", str(tmp_path))
    monkeypatch.setenv("EXPERTMESH_PORT", "1")
    return tmp_path
