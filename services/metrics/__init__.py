"""Every Prometheus series: its name, labels, buckets and unit.

One class per role, built on a registry that the caller owns, so that two roles fit in one process. Labels are
bounded (:mod:`services.metrics.series`): no request id, no API key, no expert id (experts appear as the ``rank`` of the
busiest and per shard). docs/metrics.md lists them all, as :func:`catalogue` does.
"""

from services.metrics.attention import WorkerMetrics
from services.metrics.catalogue import catalogue
from services.metrics.common import ALL_LAYERS, CHECKPOINT, HOST, PEER, TOP_EXPERTS, TOP_TENANTS, WeightSource
from services.metrics.experts import ExpertMetrics
from services.metrics.gateway import GatewayMetrics
from services.metrics.pages import OPENMETRICS, TEXT, PageFormat, format_for
from services.metrics.process import UPSTREAM_UP, UPSTREAM_UP_TEXT, BuildMetrics, MachineMetrics, ServerMetrics
from services.metrics.scheduler import SchedulerMetrics
from services.metrics.series import OTHER, Definition
from services.metrics.vllm import VllmNames, of_gateway, of_scheduler, of_worker

__all__ = [
    "ALL_LAYERS",
    "CHECKPOINT",
    "HOST",
    "OPENMETRICS",
    "OTHER",
    "PEER",
    "TEXT",
    "TOP_EXPERTS",
    "TOP_TENANTS",
    "UPSTREAM_UP",
    "UPSTREAM_UP_TEXT",
    "BuildMetrics",
    "Definition",
    "ExpertMetrics",
    "GatewayMetrics",
    "MachineMetrics",
    "PageFormat",
    "SchedulerMetrics",
    "ServerMetrics",
    "VllmNames",
    "WeightSource",
    "WorkerMetrics",
    "catalogue",
    "format_for",
    "of_gateway",
    "of_scheduler",
    "of_worker",
]
