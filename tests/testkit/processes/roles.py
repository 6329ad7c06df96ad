"""Schedulers and attention workers as tasks of one event loop, each with a connection of its own, over one Redis."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from services.attention.worker import AttentionWorker, WorkerOptions
from services.messages import WorkerInfo
from services.metrics import SchedulerMetrics
from services.queue.clock import RedisClock
from services.queue.connect import connect
from services.queue.keys import Keys
from services.queue.limits import QueueLimits
from services.queue.scheduler_side import SchedulerQueue
from services.queue.worker_side import WorkerQueue
from services.runtime.tasks import end_tasks
from services.scheduler.loop import Scheduler
from services.scheduler.observer import Observer
from services.scheduler.policy import DispatchPolicy
from testkit.models.stepping import SteppingEngine
from testkit.queue.client import Client

KEYS = Keys("test")
OPTIONS = WorkerOptions(
    credit_tokens=10_000, credit_requests=64, lease_s=30, buffer_tokens=1000, drain_s=5.0, step_timeout_s=60
)


@dataclass
class Running:
    """A role that runs. ``stop`` drains it; ``kill`` ends it as a crash would, without a word to Redis."""

    redis: Redis
    task: asyncio.Task[None]
    stop_event: asyncio.Event

    async def stop(self) -> None:
        self.stop_event.set()
        await self.task

    async def kill(self) -> None:
        await end_tasks([self.task])


@dataclass
class RunningWorker(Running):
    worker: AttentionWorker
    engine: SteppingEngine
    info: WorkerInfo
    refused: list[int] = field(default_factory=list)
    held_back: list[float] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)
    """What the worker lacks, by its answer."""


@dataclass
class RunningScheduler(Running):
    registry: CollectorRegistry

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"expertmesh_{name}", labels) or 0.0


class Deployment:
    """Async context manager; ends whatever still runs. Leases end by hand (:meth:`lapse`), not while a test waits."""

    def __init__(self, url: str, *, lease_s: float = 30, max_attempts: int = 3, **limits: Any) -> None:
        self.url = url
        self.lease_s = lease_s
        self.limits = QueueLimits(lease_s=lease_s, max_attempts=max_attempts, **limits)
        self._running: list[Running] = []
        self._clients: list[Client] = []
        self._connections: list[Redis] = []

    async def __aenter__(self) -> Deployment:
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients:
            await client.__aexit__()
        for running in self._running:
            if isinstance(running, RunningWorker):
                running.engine.gate.set()
            await running.kill()
        for connection in self._connections:
            await connection.aclose()

    def connection(self) -> Redis:
        self._connections.append(connect(self.url))
        return self._connections[-1]

    async def client(self) -> Client:
        client = Client(self.connection(), KEYS, self.limits, lease_s=30)
        self._clients.append(client)
        return await client.__aenter__()

    async def lapse(self, worker: RunningWorker) -> None:
        """Ends the lease of ``worker`` now."""
        assert await self.connection().zadd(KEYS.workers, {worker.info.id: 1}, xx=True, ch=True)

    def scheduler(self, placement: Callable[[], Any] | None = None) -> RunningScheduler:
        redis, registry = self.connection(), CollectorRegistry()
        queue = SchedulerQueue(redis, KEYS, self.limits)
        observer = Observer(SchedulerMetrics(registry), queue)
        token = uuid.uuid4().hex
        scheduler = Scheduler(queue, DispatchPolicy(), observer, token=token, lease_s=self.lease_s, placement=placement)
        task, stop = self._start(scheduler.run)
        running = RunningScheduler(redis, task, stop, registry)
        self._running.append(running)
        return running

    def worker(self, *, engine: SteppingEngine | None = None, **options: Any) -> RunningWorker:
        redis, engine = self.connection(), engine or SteppingEngine()
        chosen = replace(OPTIONS, lease_s=self.lease_s, **options)
        info = WorkerInfo(
            id=f"worker-{uuid.uuid4().hex[:6]}",
            model="model",
            fingerprint="fingerprint",
            kv_tokens=chosen.credit_tokens,
            max_num_seqs=chosen.credit_requests,
            max_model_len=chosen.credit_tokens,
            host="host",
            pid=1,
            version="0",
        )
        refused: list[int] = []
        held_back: list[float] = []
        lacks: list[str] = []
        worker = AttentionWorker(
            info=info,
            engine=engine,
            queue=WorkerQueue(redis, KEYS, self.limits),
            clock=RedisClock(redis),
            options=chosen,
            on_refused=refused.append,
            on_held_back=held_back.append,
            lacks=lambda: lacks,
        )
        task, stop = self._start(worker.run)
        running = RunningWorker(redis, task, stop, worker, engine, info, refused, held_back, lacks)
        self._running.append(running)
        return running

    def _start(self, run: Any) -> tuple[asyncio.Task[None], asyncio.Event]:
        stop = asyncio.Event()
        coroutine: Coroutine[Any, Any, None] = run(stop)
        return asyncio.create_task(coroutine), stop
