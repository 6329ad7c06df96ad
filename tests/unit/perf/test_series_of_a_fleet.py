"""A fleet of 2,000 expert workers has no more series than docs/scale.md says."""

from __future__ import annotations

import re
from pathlib import Path

import prometheus_client
import pytest

from perf.fleet import series

ROOT = Path(__file__).parents[3]
MOST = 21_726
"""What a fleet had before its series covered the whole path of a request."""


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(prometheus_client.metrics, "_use_created", True)  # main() sets it for the whole process
    series.main()
    return capsys.readouterr().out


def test_the_fleet_stays_within_its_bound_and_the_page_has_its_numbers(printed: str) -> None:
    without, with_layers = (int(count) for count in re.findall(r"(\d+) series \(", printed))
    of_experts = int(re.findall(r"experts (\d+)\)", printed)[0])
    assert without <= MOST
    page = (ROOT / "docs/scale.md").read_text()
    assert f"| {without:,}; {of_experts} |" in page
    assert f"a fleet of this size has {with_layers:,} series" in " ".join(page.split())
