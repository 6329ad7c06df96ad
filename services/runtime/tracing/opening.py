"""Opens a process's tracer as its settings ask for it, and closes it with the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from services.config import Role, Settings, TracingSettings
from services.errors import TracingExtraMissing
from services.runtime.tracing.allowance import Allowance
from services.runtime.tracing.spans import Tracer

_PACKAGES = ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def check_tracing(settings: TracingSettings) -> None:
    """Raise TracingExtraMissing where traces are asked for that this environment cannot make."""
    if not settings.traces_wanted:
        return
    for package in _PACKAGES:
        try:
            missing = find_spec(package) is None
        except ModuleNotFoundError:
            missing = True
        if missing:
            raise TracingExtraMissing(package)


@contextmanager
def tracing(settings: Settings, role: Role) -> Iterator[Tracer | None]:
    """Yield the tracer of this process, of the role ``role``; None where traces are not asked for. At the end of the
    block what was traced is sent, for a few seconds at most.

    Raises:
        TracingExtraMissing: OpenTelemetry is not installed.
        ConfigError: the folder for traces cannot be written.
    """
    if not settings.traces_wanted:
        yield None
        return
    check_tracing(settings)
    from services.runtime.tracing.export import Exports  # OpenTelemetry: a process that does not trace does without

    exports = Exports.of(settings, role)
    try:
        yield Tracer(
            exports,
            share=settings.traced_share,
            clients=Allowance(settings.trace_client_rate),
            steps=settings.trace_steps != "off" and exports.takes_steps,
        )
    finally:
        exports.close()
