"""Each role stopped (SIGSTOP) for longer than a lease, and let go again, while some clients of ``abuse.pauses`` ask."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from abuse.pauses import LEASE_S, ROLES, main

pytestmark = [pytest.mark.alone, pytest.mark.night]


def test_no_answer_is_lost_doubled_or_changed_while_each_role_stands_still(tmp_path: Path) -> None:
    figures = tmp_path / "pauses.json"
    asked = ["--streams", "24", "--seconds", str(LEASE_S + 2), "--json", str(figures), "--logs", str(tmp_path / "logs")]
    assert main(asked) == 0
    assert len(json.loads(figures.read_text())["events"]) == len(ROLES)
