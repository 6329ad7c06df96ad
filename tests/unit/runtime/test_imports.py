"""What a process of the control image loads at its start: the rest is not in that image, and would cost it seconds."""

from __future__ import annotations

import subprocess
import sys

HEAVY = {"torch", "triton", "moe_kernels", "numpy", "transformers", "huggingface_hub", "datasets", "pandas"}
MODULES = (
    *("services.gateway.role", "services.scheduler.role", "services.top.__main__"),
    *("services.cli.main", "services.cli.ask", "services.cli.fetch", "loadgen.client"),
)
_LOADED = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    print(name, *{name.split(".")[0] for name in sys.modules})
"""


def test_control_processes_load_nothing_heavy() -> None:
    command = [sys.executable, "-c", _LOADED, *MODULES]
    run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    loaded = {name: set(packages) for name, *packages in map(str.split, run.stdout.splitlines())}
    assert list(loaded) == list(MODULES)
    assert {name: packages & HEAVY for name, packages in loaded.items() if packages & HEAVY} == {}
