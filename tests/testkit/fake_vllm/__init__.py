"""A Python that has vLLM, as far as a bench sees."""

from __future__ import annotations

import sys
from pathlib import Path


def python_with_vllm(folder: Path) -> Path:
    """Returns an interpreter in ``folder`` that finds the package beside this file."""
    script = folder / "python-with-vllm"
    here = Path(__file__).parent
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{here}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    return script
