"""Series of processes themselves: what each one is, how often supervisors started them, and which pages answer."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from services.metrics.series import PREFIX, Label, Series

UPSTREAM_UP = PREFIX + "metrics_upstream_up"
"""Series that is 1 where a sibling's page could be read, else 0. Written by whoever merges the siblings' pages."""
UPSTREAM_UP_TEXT = "1 if the metrics page of the process could be read, else 0."


class BuildMetrics:
    """What a process is. Written by every process, once.

    Args:
        role: name of the process where it has one, such as attention-1, or else its role.
        wire: the newest version of messages that it writes.
    """

    def __init__(self, registry: CollectorRegistry, *, version: str, role: str, wire: int) -> None:
        series = Series(registry, "every process")
        self.definitions = series.definitions
        series.gauge(
            "build_info",
            "1; the labels say which release the process runs and which version of messages it writes to Redis.",
            Label("version", "release", most=1),
            Label("role", "role of the process, or its name under `serve` and `workers`", most=4),
            Label("wire", "version of messages", most=1),
        ).labels(version, role, wire).set(1)


class MachineMetrics:
    """The workers of one machine. Written by `expertmesh workers`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        series = Series(registry, "workers")
        self.definitions = series.definitions
        self.starts = series.counter(
            "worker_starts_total",
            "Starts of each worker on this machine, restarts included.",
            Label("worker", "name of the process, such as attention-1", most=256),
        )


class ServerMetrics:
    """The processes of one server. Written by `expertmesh serve`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        series = Series(registry, "serve")
        self.definitions = series.definitions
        self.starts = series.counter(
            "process_starts_total",
            "Starts of each process of the server, restarts included.",
            Label("process", "name of the process, such as gateway or attention-1", most=256),
        )


class MergedMetrics:
    """What the merged page of a whole server or machine says of the pages in it. The page's writer makes the lines."""

    def __init__(self, registry: CollectorRegistry) -> None:
        series = Series(registry, "gateway of `serve`, workers")
        self.definitions = series.definitions
        series.custom(
            "metrics_upstream_up",
            UPSTREAM_UP_TEXT,
            Label("role", "name of the process", most=256),
            only="on merged pages",
        )
