"""Schedulers and attention workers as tasks of one event loop, each with a connection of its own, over one Redis."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pytest
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
from services.scheduler.loop import Scheduler
from services.scheduler.observer import Observer
from services.scheduler.policy import DispatchPolicy
from services.wire import WIRE
from testkit.models.stepping import SteppingEngine
from testkit.processes.background import ended
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
    expected: tuple[type[BaseException], ...] = field(default=(), kw_only=True)
    """What it may die of."""

    async def stop(self) -> None:
        self.stop_event.set()
        await self.task

    async def kill(self) -> None:
        left = self.task.done() and not self.task.cancelled() and not self.stop_event.is_set()
        await ended([self.task], *self.expected)
        assert not left or self.expected, "it ended though nobody stopped it"

    async def dies_of(self, error: type[BaseException], match: str | None = None) -> BaseException:
        """Waits for it to die of ``error``."""
        self.expected = (error,)
        with pytest.raises(error, match=match) as caught:
            await self.task
        return caught.value


@dataclass
class RunningWorker(Running):
    worker: AttentionWorker
    engine: SteppingEngine
    info: WorkerInfo
    refused: list[int] = field(default_factory=list)
    held_back: list[float] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)
    """What the worker lacks, by its answer."""

    async def end(self) -> None:
        """Kills it, also where its engine is held."""
        self.engine.gate.set()
        await self.kill()


@dataclass
class RunningScheduler(Running):
    registry: CollectorRegistry
    scheduler: Scheduler

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"expertmesh_{name}", labels) or 0.0


class Deployment:
    """Async context manager; ends whatever still runs, and raises what died of something that nobody expected. Leases
    end by hand (:meth:`lapse`), not while a test waits."""

    def __init__(self, url: str, *, lease_s: float = 30, max_attempts: int = 3, **limits: Any) -> None:
        self.url = url
        self.lease_s = lease_s
        self.limits = QueueLimits(lease_s=lease_s, max_attempts=max_attempts, **limits)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Deployment:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def connection(self) -> Redis:
        connection = connect(self.url)
        self._stack.push_async_callback(connection.aclose)
        return connection

    async def client(self) -> Client:
        return await self._stack.enter_async_context(Client(self.connection(), KEYS, self.limits, lease_s=30))

    async def lapse(self, worker: RunningWorker) -> None:
        """Ends the lease of ``worker`` now."""
        assert await self.connection().zadd(KEYS.workers, {worker.info.id: 1}, xx=True, ch=True)

    @cached_property
    def queue(self) -> SchedulerQueue:
        """As a scheduler sees it."""
        return SchedulerQueue(self.connection(), KEYS, self.limits)

    async def has_credit(self, *requests: int) -> bool:
        """Whether the workers may be assigned so many requests."""
        return [state.credit_requests for state in await self.queue.workers()] == list(requests)

    def scheduler(self, placement: Callable[[], Any] | None = None) -> RunningScheduler:
        redis, registry = self.connection(), CollectorRegistry()
        queue = SchedulerQueue(redis, KEYS, self.limits)
        observer = Observer(SchedulerMetrics(registry), queue)
        token = uuid.uuid4().hex
        scheduler = Scheduler(queue, DispatchPolicy(), observer, token=token, lease_s=self.lease_s, placement=placement)
        task, stop = self._start(scheduler.run)
        running = RunningScheduler(redis, task, stop, registry, scheduler)
        self._stack.push_async_callback(running.kill)
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
            wire=WIRE,
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
        self._stack.push_async_callback(running.end)
        return running

    def _start(self, run: Any) -> tuple[asyncio.Task[None], asyncio.Event]:
        stop = asyncio.Event()
        coroutine: Coroutine[Any, Any, None] = run(stop)
        return asyncio.create_task(coroutine), stop
