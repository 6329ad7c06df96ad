"""What a process of the control image loads at its start: the rest is not in that image, and would cost it seconds."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {"torch", "triton", "moe_kernels", "numpy", "transformers", "huggingface_hub", "datasets", "pandas"}
_LOADED = "import {0}, json, sys; print(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"


MODULES = (
    *("services.gateway.role", "services.scheduler.role", "services.top.__main__"),
    *("services.cli.main", "services.cli.ask", "services.cli.fetch", "loadgen.client"),
)


@pytest.mark.parametrize("module", MODULES)
def test_a_control_process_loads_nothing_heavy(module: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", _LOADED.format(module)], check=True, capture_output=True, text=True, timeout=120
    )
    assert set(json.loads(found.stdout)) & HEAVY == set()
