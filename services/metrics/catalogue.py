"""All series by what writes them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from services.metrics.attention import WorkerMetrics
from services.metrics.experts import ExpertMetrics
from services.metrics.gateway import GatewayMetrics
from services.metrics.process import BuildMetrics, MachineMetrics, MergedMetrics, ServerMetrics
from services.metrics.scheduler import SchedulerMetrics
from services.metrics.series import Definition


def catalogue() -> list[Definition]:
    """Return every series of every role."""
    made = (
        GatewayMetrics(CollectorRegistry()),
        SchedulerMetrics(CollectorRegistry()),
        WorkerMetrics(CollectorRegistry()),
        ExpertMetrics(CollectorRegistry()),
        ServerMetrics(CollectorRegistry()),
        MachineMetrics(CollectorRegistry()),
        MergedMetrics(CollectorRegistry()),
        BuildMetrics(CollectorRegistry(), version="", role="", wire=0),
    )
    return [definition for each in made for definition in each.definitions]
