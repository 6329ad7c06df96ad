"""The chart, rendered by the real helm without a cluster."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from testkit.chart import CHART, helm_program

Objects = dict[tuple[str, str], dict[str, Any]]
Render = Callable[..., Objects]


@pytest.fixture(scope="session")
def helm() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs helm; the caller looks at the result."""
    program = helm_program()
    return lambda *words: subprocess.run([program, *words], capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="session")
def render(helm: Callable[..., subprocess.CompletedProcess[str]]) -> Render:
    """Objects by kind and name, of ``settings`` (``path=value``) over a profile."""

    def run(*settings: str, profile: str | None = "dev") -> Objects:
        words = ["template", "mesh", str(CHART), "--namespace", "there"]
        words += ["--values", str(Path(CHART) / f"values-{profile}.yaml")] if profile else []
        done = helm(*words, *(word for setting in settings for word in ("--set", setting)))
        assert done.returncode == 0, done.stderr
        found = [each for each in yaml.safe_load_all(done.stdout) if each]
        return {(each["kind"], each["metadata"]["name"]): each for each in found}

    return run
