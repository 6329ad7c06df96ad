"""The scheduler role: one scheduler, leader or standby. Needs Redis, no model."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry

from services.config import SCHEDULER, Settings
from services.metrics import SchedulerMetrics, VllmNames, of_scheduler
from services.placement import Hysteresis
from services.queue.connect import check_access, connect
from services.queue.keys import Keys
from services.queue.limits import QueueLimits
from services.queue.loads import LoadReader
from services.queue.quarantine import Quarantine
from services.queue.scheduler_side import SchedulerQueue
from services.queue.script_keeper import ScriptKeeper
from services.queue.seats import WHOLE_S, SeatRegistry
from services.queue.tables import TableReader
from services.runtime import MetricsServer, incarnation, run_role, show_build
from services.runtime.tasks import end_tasks
from services.runtime.tracing import Tracer, tracing
from services.scheduler.experts import ExpertPlacement
from services.scheduler.kube import KubeReplicas, connecting
from services.scheduler.loop import Scheduler
from services.scheduler.observer import Observer
from services.scheduler.policy import DispatchPolicy, PrefixMemory
from services.scheduler.scaling import Autoscaler, ScalingOptions, Sources

SWITCH_S = 0.0005
"""How long a thread that computes a placement may keep the interpreter from a request. Python's default is 5 ms, and a
request would wait as long at each answer from Redis."""

log = logging.getLogger(__name__)


def _watched(settings: Settings) -> KubeReplicas | None:
    """Take replica counts from Kubernetes, where --kubernetes-selector asks for them."""
    if settings.kubernetes_selector is None:
        return None
    in_groups = settings.workers > 1 and settings.layout == "lockstep"
    return KubeReplicas(connecting(settings.kubernetes_selector), groups=in_groups)


def _placement(
    settings: Settings, reader: TableReader, seats: SeatRegistry, observer: Observer, watched: KubeReplicas | None
) -> Callable[[], ExpertPlacement]:
    asked = settings.expert_groups
    groups = asked or max(1, settings.disaggregated_experts)
    hysteresis = Hysteresis(wait_s=settings.rebalance_after)
    return lambda: ExpertPlacement(
        seats,
        reader,
        groups=groups,
        asked=asked,
        events=observer,
        staying=watched.staying if watched else list,
        hysteresis=hysteresis,
    )


def _autoscaler(settings: Settings, sources: Sources, observer: Observer) -> Callable[[], Autoscaler] | None:
    if settings.autoscale == "off":
        return None
    options = ScalingOptions.of(settings)
    groups = settings.expert_groups or settings.disaggregated_experts
    fresh_s = max(settings.lease, 2 * WHOLE_S)  # loads come with whole readings of the seats
    return lambda: Autoscaler(sources, options, groups=groups, lease_s=fresh_s, on_decision=observer.decided)


async def schedule(settings: Settings, stop: asyncio.Event) -> None:
    """Run a scheduler until ``stop``. It then resigns, so that a standby leads at once."""
    with tracing(settings, SCHEDULER) as tracer:
        await _schedule(settings, tracer, stop)


async def _schedule(settings: Settings, tracer: Tracer | None, stop: asyncio.Event) -> None:
    assert settings.redis_url is not None, "load_settings requires it of this role"
    registry = CollectorRegistry()
    show_build(registry, SCHEDULER, settings.process)
    watched = _watched(settings)
    redis = connect(settings.redis_url)
    keys, limits = Keys(settings.namespace), QueueLimits.of(settings)
    metrics = SchedulerMetrics(registry)
    quarantine = Quarantine.of(redis, settings, SCHEDULER, metrics.unreadable)
    queue = SchedulerQueue(redis, keys, limits, quarantine=quarantine)
    seats = SeatRegistry(redis, keys, limits, quarantine=quarantine)
    observer = Observer(metrics, queue, watched, tracer)
    if settings.metrics_vllm_names:
        registry.register(VllmNames(of_scheduler(metrics), lambda: observer.model))
    loads = LoadReader(redis, keys, limits, quarantine=quarantine)
    sources = Sources(queue=queue, registry=seats, loads=loads, counts=watched)
    reader = TableReader(redis, keys, limits, quarantine=quarantine)
    token = incarnation()
    scheduler = Scheduler(
        queue,
        DispatchPolicy(PrefixMemory(scope=settings.prefix_cache_scope)),
        observer,
        token=token,
        lease_s=settings.lease,
        placement=_placement(settings, reader, seats, observer, watched),
        autoscaler=_autoscaler(settings, sources, observer),
    )
    server = MetricsServer(registry, host=settings.host, port=settings.metrics_port, missing=scheduler.missing)
    keeping: list[asyncio.Task[None]] = []
    try:
        port = await server.start()
        log.info("scheduler %s has started, metrics on port %d", token, port)
        await check_access(redis, stop)
        if watched:
            watched.start()
        keeping.append(asyncio.create_task(ScriptKeeper(redis).run()))
        await scheduler.run(stop)
    finally:
        await end_tasks(keeping)
        if watched:
            watched.close()
        await server.close()
        await redis.aclose()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the role and return its exit code."""
    sys.setswitchinterval(SWITCH_S)
    return run_role(SCHEDULER, schedule, argv)
