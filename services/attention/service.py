"""An attention worker with all that surrounds it: weights, experts in its process or behind a link, Redis, metrics."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any, ClassVar

from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from services.attention.engine_thread import BUFFER_TOKENS
from services.attention.metrics import ExpertObserver, Growth, SharingObserver, StepObserver, TotalsObserver
from services.attention.routing_table import TableFollower
from services.attention.setup.build import Built, build
from services.attention.setup.capacity import credit
from services.attention.sleep import EngineSleep
from services.attention.step.engine import Engine
from services.attention.worker import AttentionWorker, EngineStuck, WorkerOptions
from services.config import ATTENTION, Settings
from services.messages import WorkerInfo, WorkerLoad
from services.metrics import VllmNames, WorkerMetrics, of_worker
from services.model.device import show_memory
from services.model.sleep import RememberedWeights, collect_garbage
from services.model.weight_source import FromCheckpoint
from services.queue.clock import RedisClock
from services.queue.keys import Keys
from services.queue.limits import QueueLimits
from services.queue.loads import LoadNotes
from services.queue.quarantine import Quarantine
from services.queue.sleep import SleepFollower, SleepNotes, Start
from services.queue.tables import TableReader
from services.queue.worker_side import WorkerQueue
from services.runtime import CRASHED, in_daemon, incarnation
from services.runtime.tasks import end_tasks, first_done, forget_frames, unless_stopped
from services.runtime.tracing import Tracer
from services.wire import WIRE

METRICS_EVERY_S = 1.0
LOOK_S = 0.05
"""Time between two looks at whether the experts of this process are loaded."""
SHARED_S = 20.0
"""How long a colocated worker puts serving off until its steps can go through shared memory."""
SHARED_PAUSE_S = 0.5

log = logging.getLogger(__name__)


class SleepOrdered(Exception):
    """The model is to sleep before this worker could load all that it needs."""


class AttentionService:
    """Loads the model, serves requests until it is stopped, and drains.

    Args:
        registry: gets the worker's series.
        colocated: an expert worker runs in this process, on the same device.
        experts_loaded: says whether that one has loaded its experts, or never will.
    """

    _buffer_tokens: ClassVar[int | None] = BUFFER_TOKENS

    def __init__(
        self,
        settings: Settings,
        redis: Redis,
        registry: CollectorRegistry,
        *,
        colocated: bool = False,
        experts_loaded: Callable[[], bool] = lambda: True,
        tracer: Tracer | None = None,
    ) -> None:
        self._settings = settings
        self._redis = redis
        self._experts_loaded = experts_loaded
        self._colocated, self._tracer = colocated, tracer
        self._clock, self._id = RedisClock(redis), incarnation()
        self._metrics = WorkerMetrics(registry)
        if settings.metrics_vllm_names:
            registry.register(VllmNames(of_worker(self._metrics), lambda: settings.model_name))
        self._keys, self._limits = Keys(settings.namespace), QueueLimits.of(settings)
        self._quarantine = Quarantine.of(redis, settings, ATTENTION, self._metrics.unreadable)
        self._queue = WorkerQueue(redis, self._keys, self._limits, quarantine=self._quarantine)
        self._notes: SleepNotes | None = None
        self._weights: RememberedWeights | None = None
        self._start: Start | None = None
        self._noting: asyncio.Future[None] | None = None
        self._follower: SleepFollower | None = None
        self._waits = False
        if settings.enable_sleep_mode:
            self._notes = SleepNotes(redis, self._keys, worker=self._id, lease_s=settings.lease, limits=self._limits)
            self._start = Start(self._notes)
        self._worker: AttentionWorker | None = None
        self._experts: TableFollower | None = None

    async def run(self, metrics_url: str, stop: asyncio.Event) -> None:
        """Load, serve until ``stop``, drain."""
        if self._start is None:
            await self._load_and_serve(metrics_url, stop)
            return
        while not stop.is_set():
            await unless_stopped(self._until_awake(self._start), stop)
            self._weights = RememberedWeights(FromCheckpoint())
            self._noting = asyncio.ensure_future(self._start.keep())
            try:
                await self._load_and_serve(metrics_url, stop)
                return
            except SleepOrdered as error:
                log.info("sleep is ordered: loading begins again after the wake-up")
                forget_frames(error)
            finally:
                await end_tasks([self._noting])
            self._weights = None
            await asyncio.to_thread(collect_garbage)

    async def _load_and_serve(self, metrics_url: str, stop: asyncio.Event) -> None:
        built = None if stop.is_set() else await unless_stopped(in_daemon("load", self._build), stop)
        if built is not None:
            await self._with_experts(built, metrics_url, stop)

    async def _until_awake(self, start: Start) -> None:
        """Load nothing while the model sleeps: another job may have the memory."""
        self._waits = True
        await start.until_awake()
        self._waits = False

    def missing(self) -> list[str]:
        """Return the names of things that the worker waits for before it serves; for /ready. One that starts while the
        model sleeps waits for nothing but the wake-up, and so does one that sleeps."""
        if self._waits or (self._follower and self._follower.ordered):
            return []
        experts = self._experts.missing() if self._experts else []
        awaited = "weights" if self._experts is None else "kernels"
        return experts + (self._worker.missing() if self._worker else [] if experts else [awaited])

    def _build(self) -> Built[Any]:
        return build(
            self._settings,
            self._clock.now_ms,
            worker=self._id,
            colocated=self._colocated,
            wait=self._wait_for_experts,
            tracer=self._tracer,
            weights=self._weights,
        )

    def _wait_for_experts(self) -> None:
        """Wait in the thread that loads. Raises SleepOrdered: these experts will not be loaded before a wake-up."""
        while not self._experts_loaded():
            if self._sleep_ordered():
                raise SleepOrdered
            time.sleep(LOOK_S)

    def _sleep_ordered(self) -> bool:
        return self._start is not None and self._start.ordered.is_set()

    async def _with_experts(self, built: Built[Any], metrics_url: str, stop: asyncio.Event) -> None:
        """Serve as soon as all experts can be reached: at once, if they are in this process."""
        if built.remote is None:
            await self._serve(built, metrics_url, stop)
            return
        self._experts = TableFollower(
            built.remote,
            TableReader(self._redis, self._keys, self._limits, quarantine=self._quarantine),
            worker_id=self._id,
            fingerprint=built.served.spec.fingerprint,
            lease_s=self._settings.lease,
        )
        following = asyncio.ensure_future(self._experts.run())
        try:
            ordered = [self._start.ordered.wait()] if self._start else []  # experts may sleep before it has them
            await first_done(following, self._experts.ready(), stop.wait(), *ordered)
            if not stop.is_set():
                await first_done(self._serve(built, metrics_url, stop), following)
        finally:
            await end_tasks([following])
            await asyncio.to_thread(built.remote.close)

    async def _serve(self, built: Built[Any], metrics_url: str, stop: asyncio.Event) -> None:
        if not (self._sleep_ordered() or await self._warmed_up(built, stop)):
            return
        metrics = self._metrics
        steps = StepObserver(metrics, built.engine.stats, built.engine.take_durations, built.engine.exemplar)
        for source, seconds in built.load_s.items():
            metrics.weight_load.labels(source).set(seconds)
        self._worker = worker = AttentionWorker(
            info=self._info(built, metrics_url),
            engine=built.engine,
            queue=self._queue,
            clock=self._clock,
            options=self._options(built),
            after_step=steps.after_step,
            on_refused=metrics.stale_results.inc,
            on_given_up=metrics.given_up.inc,
            on_held_back=metrics.held_back.inc,
            lacks=self._experts.missing if self._experts else lambda: (),
            tracer=self._tracer,
        )
        metrics.publish_backlog.set_function(lambda: worker.unpublished)
        idle = partial(Growth().follow, metrics.engine_idle)
        tasks = [
            asyncio.create_task(_refresh([*self._observers(built), lambda: idle(worker.idle_s)])),
            asyncio.create_task(self._load_notes(built, steps).run()),
        ]
        try:
            await self._run_worker(built, worker, stop)
        except EngineStuck:
            log.exception("the engine is stuck; exiting immediately")
            os._exit(CRASHED)  # an orderly exit would wait for threads that wait for the engine
        finally:
            await end_tasks(tasks)

    async def _run_worker(self, built: Built[Any], worker: AttentionWorker, stop: asyncio.Event) -> None:
        if self._notes is None or self._weights is None or self._start is None:
            await worker.run(stop)
            return
        prepare = partial(self._warm_up, built, stop.is_set)
        engine = EngineSleep(built.engine, self._weights, built.served.device, prepare)
        sleep = worker.sleeping(engine, self._experts.ready if self._experts else _at_once)
        await end_tasks([self._noting] if self._noting else [])
        self._follower = SleepFollower(
            self._notes,
            fall_asleep=sleep.fall_asleep,
            wake_up=sleep.wake_up,
            give_up=sleep.give_up,
            begins=self._start.level,  # what it has not warmed up for has to wait for the wake-up
        )
        await first_done(worker.run(stop), self._follower.run())

    async def _warmed_up(self, built: Built[Any], stop: asyncio.Event) -> bool:
        """Do what the first steps would wait for. Returns False where ``stop`` came meanwhile."""
        await in_daemon("prepare", partial(self._warm_up, built, stop.is_set))
        return not stop.is_set()

    def _warm_up(self, built: Built[Engine[Any]], stopped: Callable[[], bool]) -> None:
        """Capture CUDA graphs. A colocated worker also runs dummy requests, first over TCP, then over shared memory, so
        that no kernel is loaded later: loading blocks while this process's expert kernels wait for rows."""
        engine = built.engine
        engine.prepare()
        built.link.expert_rows()  # makes what reading them needs
        if not (self._colocated and engine.on_gpu) or stopped():
            return
        engine.warm_up(stopped)
        if built.sharing is None:
            return
        until = time.monotonic() + SHARED_S
        while not (shared := built.sharing.wait_shared(SHARED_PAUSE_S)) and not stopped() and time.monotonic() < until:
            pass
        if shared:
            engine.warm_up(stopped)

    def _observers(self, built: Built[Any]) -> list[Callable[[], object]]:
        """Return functions that each bring some series up to date."""
        observers: list[Callable[[], object]]
        metrics, by_layer = self._metrics, self._settings.layer_series
        observers = [
            ExpertObserver(metrics, built.link.expert_rows, by_layer=by_layer).refresh,
            partial(show_memory, metrics.gpu_memory, built.served.device),
        ]
        if built.remote:
            observers.append(TotalsObserver(metrics.shard_stall, built.remote.stalled_s, from_now=True).refresh)
            observers.append(TotalsObserver(metrics.refused_peers, built.remote.faults).refresh)
            observers.append(TotalsObserver(metrics.exchange_bytes, built.remote.exchanged_bytes).refresh)
            observers.append(TotalsObserver(metrics.resent_rows, built.remote.resent_rows).refresh)
        if built.sharing:
            observers.append(SharingObserver(metrics, built.sharing).refresh)
        return observers

    def _load_notes(self, built: Built[Any], steps: StepObserver) -> LoadNotes:
        began = time.monotonic()
        stalled_s = built.remote.stalled_s if built.remote else dict

        def load() -> WorkerLoad:
            up_s = time.monotonic() - began
            return WorkerLoad(up_s=up_s, busy_s=steps.busy_s, stalled_s=stalled_s(), lanes=steps.lanes, wire=WIRE)

        return LoadNotes(self._redis, self._keys, member_id=self._id, lease_s=self._settings.lease, read=load)

    def _info(self, built: Built[Any], metrics_url: str) -> WorkerInfo:
        return WorkerInfo(
            id=self._id,
            model=self._settings.model_name,
            fingerprint=built.served.spec.fingerprint,
            weights=built.served.spec.weights,
            kv_tokens=built.plan.room.kv_tokens,
            max_num_seqs=built.plan.size.max_num_seqs,
            max_model_len=built.plan.room.max_model_len,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=version("expertmesh"),
            metrics_url=metrics_url,
            wire=WIRE,
            process=self._settings.process or "",
        )

    def _options(self, built: Built[Any]) -> WorkerOptions:
        settings = self._settings
        tokens, requests = credit(kv_tokens=built.plan.room.kv_tokens, max_num_seqs=built.plan.size.max_num_seqs)
        return WorkerOptions(
            credit_tokens=tokens,
            credit_requests=requests,
            lease_s=settings.lease,
            buffer_tokens=self._buffer_tokens,
            drain_s=settings.drain_timeout,
            step_timeout_s=settings.step_timeout,
        )


async def _at_once() -> None:
    """Wait for no experts: they are in this process."""


async def _refresh(observers: Sequence[Callable[[], object]]) -> None:
    while True:
        await asyncio.sleep(METRICS_EVERY_S)
        for refresh in observers:
            await asyncio.to_thread(refresh)  # reading a device's counters may wait for its current step
