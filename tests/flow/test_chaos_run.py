"""Some seconds of ``make chaos``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chaos.__main__ import hosts, main, parse
from chaos.plan import NEED_CABLES

KINDS = ("kill gateway", "kill attention", "kill leader", "kill experts", "cut from")
EVERY_S = 2.5

pytestmark = pytest.mark.alone


def test_no_request_is_lost_while_processes_die_and_cables_fail(tmp_path: Path) -> None:
    """On hosts of their own where the machine allows it, else with kills alone. How long clients wait is not judged:
    a busy machine takes a minute to start a process."""
    kinds = [kind for kind in KINDS if hosts(parse([])) or kind not in NEED_CABLES]
    figures_file = tmp_path / "chaos.json"
    lasting = ["--minutes", str(len(kinds) * EVERY_S / 60), "--every", str(EVERY_S), "--least-requests", "20"]
    files = ["--json", str(figures_file), "--svg", str(tmp_path / "chaos.svg"), "--logs", str(tmp_path / "logs")]
    unjudged = ["--refused-share", "1", "--refused-leases", "100", "--gap-leases", "100"]
    load = ["--streams", "32", "--lease", "6", "--kinds", ",".join(kinds)]
    assert main([*lasting, *files, *unjudged, *load]) == 0
    figures = json.loads(figures_file.read_text())
    assert sorted(event["kind"] for event in figures["events"]) == sorted(kinds)
    history = figures["history"]
    assert (history["requests"], history["problems"]) == (figures["requests"], {})
    assert history["tries"] > history["requests"], "clients came again"
