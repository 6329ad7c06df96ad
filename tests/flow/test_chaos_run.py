"""Some seconds of ``make chaos``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chaos.__main__ import main

SECONDS, EVENTS = 12, 4

pytestmark = pytest.mark.alone


def test_no_request_is_lost_while_processes_die_and_cables_fail(tmp_path: Path) -> None:
    """On hosts of their own where the machine allows it, else with kills alone."""
    figures_file = tmp_path / "chaos.json"
    lasting = ["--minutes", str(SECONDS / 60), "--every", str(SECONDS / EVENTS), "--least-requests", "20"]
    files = ["--json", str(figures_file), "--svg", str(tmp_path / "chaos.svg"), "--logs", str(tmp_path / "logs")]
    assert main([*lasting, *files, "--streams", "32", "--lease", "6"]) == 0
    assert len(json.loads(figures_file.read_text())["events"]) == EVENTS
