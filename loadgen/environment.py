"""The machine that sends a load, as a report names it: what the figures depend on besides the server."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def environment() -> dict[str, Any]:
    """Returns names and values for people. CPUs are those that this process may use."""
    load = os.getloadavg()[0]
    return {
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_average_1m": round(load, 2),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: found for name in ("expertmesh", "httptools", "uvloop") if (found := _version(name))},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # a clone that is not installed
        return None
