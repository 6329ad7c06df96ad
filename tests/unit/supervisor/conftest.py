"""Stand-ins for the roles, which are run from ``fakes``."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-ins leave their notes; also the folder of temporary files."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "fakes"))
    monkeypatch.setenv("FAKE_DIR", str(tmp_path))
    monkeypatch.setenv("EXPERTMESH_PORT", "1")
    return tmp_path
