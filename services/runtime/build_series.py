"""The series that says what a process is."""

from __future__ import annotations

from importlib.metadata import version

from prometheus_client import CollectorRegistry

from services.metrics import BuildMetrics
from services.wire import WIRE


def show_build(registry: CollectorRegistry, role: str, process: str | None = None) -> None:
    """Add it to ``registry``; ``process`` is the name of the process, where a supervisor gave it one."""
    BuildMetrics(registry, version=release(), role=process or role, wire=WIRE)


def release() -> str:
    """Return the version of the program."""
    return version("expertmesh")
