"""The expert role: an expert worker. Needs Redis, the checkpoint and the cluster's secret."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version

import torch
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from services.config import EXPERTS, Settings
from services.errors import ConfigError, QueueUnavailable
from services.experts.observer import ExpertsObserver
from services.experts.serving import Loader, TcpServing
from services.experts.worker import ExpertWorker, Timing
from services.messages import ExpertInfo
from services.metrics import ExpertMetrics
from services.model.device import check_device, serving_dtype, show_memory, torch_device
from services.model.hub import with_checkpoint
from services.model.load_spec import load_spec
from services.model.spec import ModelSpec
from services.model.weights_sample import with_weights
from services.queue.expert_side import ExpertQueue
from services.queue.keys import Keys
from services.queue.limits import QueueLimits
from services.queue.quarantine import Quarantine
from services.queue.role_service import run_role_service
from services.queue.sleep import SleepFollower, SleepNotes, Start
from services.queue.tables import TableReader
from services.routing import RoutingTable
from services.runtime import advertised, incarnation, node_name, run_role
from services.runtime.tasks import first_done, unless_stopped
from services.runtime.tracing import Tracer, tracing

REFRESH_S = 1.0
TABLE_S = 5.0
"""How long a loading worker waits for the routing table, to find peers with its weights; then it reads the disk."""

AFTER_ATTENTION_S = 10.0
"""How much longer than for a drain it waits for attention workers to sleep before it."""

log = logging.getLogger(__name__)


async def _observe(*refresh: Callable[[], None]) -> None:
    while True:
        for each in refresh:
            await asyncio.to_thread(each)  # reading a device's counters may wait for it
        await asyncio.sleep(REFRESH_S)


class ExpertsRole:
    """Runs one expert worker.

    Args:
        registry: gets the worker's series.
        colocated: see :class:`services.experts.serving.Loader`.

    Raises:
        ConfigError: the model has no experts.
        CheckpointError: the checkpoint cannot be read.
    """

    def __init__(
        self,
        settings: Settings,
        redis: Redis,
        registry: CollectorRegistry,
        *,
        colocated: bool = False,
        tracer: Tracer | None = None,
    ) -> None:
        assert settings.model is not None, "load_settings requires it of this role"
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        self._settings = settings
        formats = settings.held_experts, settings.dense_format
        self._spec = with_weights(load_spec(settings.model), settings.model, *formats)
        if not self._spec.moe_layers:
            raise ConfigError(f"The model in {settings.model} has no experts.", hint="Serve it without expert workers.")
        self._metrics, self._colocated, self._tracer = ExpertMetrics(registry), colocated, tracer
        keys, limits = Keys(settings.namespace), QueueLimits.of(settings)
        quarantine = Quarantine.of(redis, settings, EXPERTS, self._metrics.unreadable)
        self._notes = partial(SleepNotes, redis, keys, lease_s=settings.lease, after_attention=True, limits=limits)
        self._queue = ExpertQueue(redis, keys, limits, quarantine=quarantine)
        self._reader = TableReader(redis, keys, limits, quarantine=quarantine)
        self._worker: ExpertWorker | None = None
        self._over = self._waits = False

    async def run(self, metrics_url: str, stop: asyncio.Event) -> None:
        """Take a seat, serve until ``stop`` or until the scheduler orders it to leave, then leave it."""
        settings, name = self._settings, incarnation()
        notes = self._notes(worker=name) if settings.enable_sleep_mode else None
        if notes is not None:
            self._waits = True
            await unless_stopped(Start(notes).until_awake(), stop)
            self._waits = False
        device, dtype = torch_device(settings.device), serving_dtype(settings.dtype, self._spec)
        check_device(device, dtype)
        loader = Loader(
            settings,
            self._spec,
            worker=name,
            dtype=dtype,
            device=device,
            version=version("expertmesh"),
            tables=partial(_newest, self._reader, asyncio.get_running_loop()),
            colocated=self._colocated,
            tracer=self._tracer,
        )
        self._worker = worker = ExpertWorker(
            info=_info(settings, self._spec, name, metrics_url),
            queue=self._queue,
            reader=self._reader,
            load=loader,
            timing=Timing(lease=settings.lease, drain=settings.drain_timeout),
            rest=loader.rest,
        )
        log.info("expert worker %s on %s, experts are held %s", name, device, self._spec.experts.title)
        observer = ExpertsObserver(self._metrics, worker, loader.faults, by_layer=settings.layer_series)
        memory = partial(show_memory, self._metrics.gpu_memory, device)
        traced = () if self._tracer is None else (partial(_end_idle, worker),)
        observing = asyncio.create_task(_observe(observer.refresh, memory, *traced))
        try:
            await (
                worker.run(stop) if notes is None else first_done(worker.run(stop), self._follower(notes, worker).run())
            )
            self._over = True
        finally:
            observing.cancel()

    def _follower(self, notes: SleepNotes, worker: ExpertWorker) -> SleepFollower:
        """Return what sends ``worker`` to sleep, once requests that need it have ended or were handed back."""
        wait_s = self._settings.drain_timeout + AFTER_ATTENTION_S
        return SleepFollower(notes, fall_asleep=worker.fall_asleep, wake_up=worker.wake_up, wait_s=wait_s)

    def missing(self) -> list[str]:
        """Return what the worker waits for before it serves, for /ready; nothing once it has left, or while it waits
        for a wake-up."""
        if self._over or self._waits:
            return []
        return self._worker.missing() if self._worker else ["a seat"]

    def loaded(self) -> bool:
        """Say whether the experts have taken their memory, or never will: the worker has left."""
        return self._over or (self._worker is not None and self._worker.held is not None)


def _end_idle(worker: ExpertWorker) -> None:
    """End the spans of steps that no call comes for any more."""
    if isinstance(worker.serving, TcpServing) and worker.serving.traces is not None:
        worker.serving.traces.end_idle()


def _newest(reader: TableReader, loop: asyncio.AbstractEventLoop) -> RoutingTable | None:
    """Read the newest table from a thread that is not the loop's; None where Redis does not answer in time."""
    asked = asyncio.run_coroutine_threadsafe(reader.read_table(), loop)
    try:
        return asked.result(TABLE_S)
    except (QueueUnavailable, TimeoutError):
        return None


def _info(settings: Settings, spec: ModelSpec, name: str, metrics_url: str) -> ExpertInfo:
    return ExpertInfo(
        id=name,
        fingerprint=spec.fingerprint,
        weights=spec.weights,
        num_experts=spec.num_experts,
        layers=tuple(spec.moe_layers),
        host=advertised(settings),
        port=settings.fabric_port,
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        pid=os.getpid(),
        version=version("expertmesh"),
        node=node_name(settings),
        metrics_url=metrics_url,
        group=settings.expert_group,
        max_experts=settings.expert_capacity,
        pod=settings.pod,
        process=settings.process or "",
    )


async def host_experts(settings: Settings, stop: asyncio.Event) -> None:
    """Run an expert worker until ``stop``; then leave its seat."""
    with tracing(settings, EXPERTS) as tracer:
        await run_role_service(EXPERTS, settings, stop, partial(ExpertsRole, settings, tracer=tracer))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the role and return its exit code."""
    return run_role(EXPERTS, host_experts, argv, prepare=with_checkpoint)
