"""promtool, Prometheus' own program for rules: whether it takes them, and what they do over time."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from testkit.alerts.case import Case, Line

ABSENT = "promtool is not installed (Debian: prometheus)"


def promtool() -> str | None:
    return shutil.which("promtool")


def judged(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run promtool. The caller looks at the result."""
    found = promtool()
    assert found is not None
    return subprocess.run([found, *map(str, words)], capture_output=True, text=True, timeout=120, check=False)


def expected(case: Case, severity: str, scrapes: Sequence[Mapping[str, str]], *, chart: bool) -> list[dict[str, Any]]:
    """A test of promtool for each way in which the alert fires or stays quiet, for each of ``scrapes``."""
    return list(_tests(case, severity, scrapes, chart=chart))


def _tests(case: Case, severity: str, scrapes: Sequence[Mapping[str, str]], *, chart: bool) -> Iterator[dict[str, Any]]:
    for scrape in scrapes:
        for lines in case.fires:
            yield trial(case, lines, scrape, [{"labels": case.firing(scrape, severity, chart=chart), "value": 1}])
        for lines in case.quiet:
            yield trial(case, lines, scrape, [])


def trial(case: Case, lines: Sequence[Line], scrape: Mapping[str, str], samples: list[Any]) -> dict[str, Any]:
    """One of promtool's tests: with ``lines`` the alert has ``samples`` of ALERTS."""
    asked = f'ALERTS{{alertname="{case.alert}",alertstate="firing"}}'
    return {
        "interval": "1m",
        "input_series": [each.series(scrape) for each in lines],
        "promql_expr_test": [{"expr": asked, "eval_time": f"{case.at}m", "exp_samples": samples}],
    }


def tried(
    folder: Path, rule: Mapping[str, Any], tests: Sequence[Mapping[str, Any]]
) -> subprocess.CompletedProcess[str]:
    """Run ``tests`` of one rule, alone: promtool evaluates every rule of a file at every minute."""
    rules, asked = folder / "rules.yaml", folder / "tests.yaml"
    rules.write_text(yaml.safe_dump({"groups": [{"name": "one", "rules": [rule]}]}))
    asked.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": list(tests)}))
    return judged("test", "rules", asked)
