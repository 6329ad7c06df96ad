"""The attention role: an attention worker, with all experts in its process or behind a link. Needs Redis
and a model."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from services.attention.engine_thread import BUFFER_BYTES, BUFFER_TOKENS
from services.attention.lockstep_engine import Departure, LockstepEngine, LockstepRank
from services.attention.metrics import (
    ExpertObserver,
    LockstepObserver,
    RefusalObserver,
    SharingObserver,
    StallObserver,
    StepObserver,
)
from services.attention.routing_table import TableFollower
from services.attention.setup.build import Built, build
from services.attention.setup.capacity import credit
from services.attention.step.engine import Engine
from services.attention.worker import AttentionWorker, EngineError, EngineHung, WorkerOptions
from services.config import ATTENTION, Settings
from services.errors import LockstepBroken, LockstepLeft, QueueUnavailable
from services.fabric.link import CountingLink
from services.fabric.shared_memory.link import SharedMemoryLink
from services.fabric.tcp.link import TcpLink
from services.messages import WorkerInfo, WorkerLoad
from services.metrics import WorkerMetrics
from services.queue.clock import RedisClock
from services.queue.keys import Keys
from services.queue.limits import QueueLimits
from services.queue.loads import LoadNotes
from services.queue.quarantine import Quarantine
from services.queue.role_service import run_role_service
from services.queue.tables import TableReader
from services.queue.worker_side import WorkerQueue
from services.runtime import AGAIN, CRASHED, in_daemon, incarnation, run_role
from services.runtime.tasks import end_tasks
from services.wire import WIRE

T = TypeVar("T")
EXPERTS_EVERY_S = 1.0
DEREGISTER_S = 2.0
LOCKSTEP_END_S = 5.0
"""For the threads that a rank in lock-step has inside torch, as it ends."""
SHARED_S = 20.0
"""How long a worker with a seat of its own puts serving off until steps can go through shared memory."""
SHARED_PAUSE_S = 0.5

log = logging.getLogger(__name__)


class AttentionRole:
    """Everything around one worker: loading, experts, serving.

    Args:
        registry: gets the worker's series.
        beside_experts: this process has a seat of its own, see
        :func:`services.attention.setup.remote_link.remote_link`.
    """

    def __init__(
        self, settings: Settings, redis: Redis, registry: CollectorRegistry, *, beside_experts: bool = False
    ) -> None:
        self._settings = settings
        self._redis = redis
        self._beside_experts = beside_experts
        self._clock = RedisClock(redis)
        self._metrics = WorkerMetrics(registry)
        self._quarantine = Quarantine.of(redis, settings, ATTENTION, self._metrics.unreadable)
        self._worker: AttentionWorker | None = None
        self._experts: TableFollower | None = None
        self._id = incarnation()

    async def run(self, metrics_url: str, stop: asyncio.Event) -> None:
        """Load, serve until ``stop``, drain."""
        built: Built | None = None
        try:
            built = await _unless_stopped(self._build, stop)
            if built is not None:
                await self._with_experts(built, metrics_url, stop)
        except (LockstepBroken, LockstepLeft) as error:
            (log.info if isinstance(error, LockstepLeft) else log.error)("%s", error.message)
            os._exit(AGAIN)  # threads that wait for other ranks would hold an orderly exit up
        finally:
            if built is not None and built.lockstep is not None:
                await _ended(built.lockstep)

    def _build(self) -> Built:
        return build(self._settings, self._clock.now_ms, worker=self._id, beside_experts=self._beside_experts)

    def missing(self) -> list[str]:
        """What keeps it from serving; for /ready."""
        experts = self._experts.missing() if self._experts else []
        awaited = "weights" if self._experts is None else "kernels"
        return experts + (self._worker.missing() if self._worker else [] if experts else [awaited])

    async def _with_experts(self, built: Built, metrics_url: str, stop: asyncio.Event) -> None:
        """Serves once all experts can be reached; where they are in this process that is at once."""
        if not isinstance(built.link, TcpLink | SharedMemoryLink):
            await self._serve(built, metrics_url, stop)
            return
        keys, limits = Keys(self._settings.namespace), QueueLimits.of(self._settings)
        reader = TableReader(self._redis, keys, limits, quarantine=self._quarantine)
        self._experts = TableFollower(
            built.link,
            reader,
            worker_id=self._id,
            fingerprint=built.spec.fingerprint,
            lease_s=self._settings.lease,
        )
        following = asyncio.ensure_future(self._experts.run())
        ready, stopped = asyncio.ensure_future(self._experts.ready()), asyncio.ensure_future(stop.wait())
        tasks: list[asyncio.Future[Any]] = [following, ready, stopped]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
            if not stop.is_set():
                serving = asyncio.ensure_future(self._serve(built, metrics_url, stop))
                tasks.append(serving)
                await asyncio.wait({following, serving}, return_when=asyncio.FIRST_COMPLETED)
                (serving if serving.done() else following).result()
        finally:
            await end_tasks(tasks)
            await asyncio.to_thread(built.link.close)

    async def _serve(self, built: Built, metrics_url: str, stop: asyncio.Event) -> None:
        settings, metrics = self._settings, self._metrics
        if isinstance(built.engine, Engine):
            await in_daemon("prepare", partial(self._make_ready, built.engine, built.link, stop.is_set))
            if stop.is_set():
                return
        steps = StepObserver(metrics, built.engine.stats)
        self._worker = worker = AttentionWorker(
            info=self._info(built, metrics_url),
            engine=built.engine,
            queue=WorkerQueue(
                self._redis, Keys(settings.namespace), QueueLimits.of(settings), quarantine=self._quarantine
            ),
            clock=self._clock,
            options=self._options(built),
            after_step=steps.after_step,
            on_refused=metrics.stale_results.inc,
            on_given_up=metrics.given_up.inc,
            on_held_back=metrics.held_back.inc,
            lacks=self._experts.missing if self._experts else lambda: (),
        )
        metrics.publish_backlog.set_function(lambda: worker.unpublished)
        beside = [_watch(self._watched(built)), self._load_notes(built, steps).run()]
        departure = None
        if isinstance(built.engine, LockstepEngine):
            built.engine.has_room = partial(worker.has_room, BUFFER_TOKENS, BUFFER_BYTES)
            built.engine.on_work(worker.nudge)
            departure = Departure(built.engine, stop, worker.nudge)
            beside.append(departure.follow())
        tasks = [asyncio.create_task(each) for each in beside]
        try:
            await worker.run(departure.begun if departure else stop)
            if departure:
                await departure.end()
        except EngineHung:
            log.exception("exiting at once")
            os._exit(CRASHED)  # an orderly exit would wait for threads that wait for the engine
        except EngineError as error:
            if not isinstance(error.__cause__, LockstepBroken):
                raise
            blamed = built.engine.blamed if isinstance(built.engine, LockstepEngine) else {}
            await self._hand_over(self._id, blamed)
            raise error.__cause__ from error
        finally:
            await end_tasks(tasks)

    def _make_ready(self, engine: Engine[Any], link: CountingLink[Any], stopped: Callable[[], bool]) -> None:
        """What the first steps would wait for. Beside a seat, whose kernels that wait for rows hold the loading of
        others up, that is all: without shared memory first, then with it."""
        engine.prepare()
        link.expert_rows()  # makes what reading them needs
        if not (self._beside_experts and engine.on_gpu) or stopped():
            return
        engine.warm_up(stopped)
        if isinstance(link, SharedMemoryLink):
            until = time.monotonic() + SHARED_S
            while not (shared := link.wait_shared(SHARED_PAUSE_S)) and not stopped() and time.monotonic() < until:
                pass
            if shared:
                engine.warm_up(stopped)

    def _watched(self, built: Built) -> list[Callable[[], None]]:
        metrics, link, lockstep = self._metrics, built.link, built.lockstep
        by_layer = self._settings.layer_series
        watched: list[Callable[[], None]] = [ExpertObserver(metrics, link.expert_rows, by_layer=by_layer).refresh]
        if isinstance(link, TcpLink | SharedMemoryLink):
            watched.append(StallObserver(metrics, link.stalled_s).refresh)
            watched.append(RefusalObserver(metrics, link.faults).refresh)
        if isinstance(link, SharedMemoryLink):
            watched.append(SharingObserver(metrics, link).refresh)
        if lockstep:
            watched.append(LockstepObserver(metrics, lockstep.traffic, lambda: lockstep.steps.turns).refresh)
            watched.append(RefusalObserver(metrics, lockstep.faults.totals).refresh)
        return watched

    def _load_notes(self, built: Built, steps: StepObserver) -> LoadNotes:
        link, began = built.link, time.monotonic()
        stalled_s = link.stalled_s if isinstance(link, TcpLink | SharedMemoryLink) else dict

        def load() -> WorkerLoad:
            up_s = time.monotonic() - began
            return WorkerLoad(up_s=up_s, busy_s=steps.busy_s, stalled_s=stalled_s(), lanes=steps.lanes, wire=WIRE)

        settings = self._settings
        return LoadNotes(self._redis, Keys(settings.namespace), member_id=self._id, lease_s=settings.lease, read=load)

    async def _hand_over(self, worker_id: str, blamed: Mapping[str, int]) -> None:
        """Requests go on at once. Those that were computed count as failed, as when their worker dies: one may have
        broken the lock-step, and would break the next one."""
        queue = WorkerQueue(self._redis, Keys(self._settings.namespace), QueueLimits.of(self._settings))
        try:
            async with asyncio.timeout(DEREGISTER_S):
                await queue.deregister(worker_id, blamed)
        except (TimeoutError, QueueUnavailable):
            log.warning("left without deregistering: Redis does not answer, leases will expire")

    def _info(self, built: Built, metrics_url: str) -> WorkerInfo:
        return WorkerInfo(
            id=self._id,
            model=self._settings.model_name,
            fingerprint=built.spec.fingerprint,
            kv_tokens=built.capacity.kv_tokens,
            max_num_seqs=self._settings.max_num_seqs,
            max_model_len=built.capacity.max_model_len,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=version("expertmesh"),
            metrics_url=metrics_url,
            wire=WIRE,
        )

    def _options(self, built: Built) -> WorkerOptions:
        settings = self._settings
        tokens, requests = credit(
            kv_tokens=built.capacity.kv_tokens,
            max_num_seqs=settings.max_num_seqs,
        )
        return WorkerOptions(
            credit_tokens=tokens,
            credit_requests=requests,
            lease_s=settings.lease,
            buffer_tokens=None if built.lockstep else BUFFER_TOKENS,  # a rank goes on serving others' rows
            drain_s=settings.drain_timeout,
            step_timeout_s=settings.step_timeout,
        )


async def _watch(watched: Sequence[Callable[[], None]]) -> None:
    while True:
        await asyncio.sleep(EXPERTS_EVERY_S)
        for refresh in watched:
            await asyncio.to_thread(refresh)  # reading a device's counters may wait for its current step


async def _unless_stopped(work: Callable[[], T], stop: asyncio.Event) -> T | None:
    """``work()`` on a thread of its own; None, leaving it behind, if ``stop`` comes first."""
    done, stopped = asyncio.ensure_future(in_daemon("load", work)), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({done, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return done.result() if done.done() else None
    finally:
        await end_tasks([done, stopped])


async def _ended(lockstep: LockstepRank) -> None:
    try:
        async with asyncio.timeout(LOCKSTEP_END_S):
            await in_daemon("end the lock-step", lockstep.close)
    except TimeoutError:
        log.warning("threads of the lock-step are left behind: they did not end in %.0f s", LOCKSTEP_END_S)


async def attend(settings: Settings, stop: asyncio.Event) -> None:
    """Run an attention worker until ``stop``; then drain."""
    await run_role_service(settings, stop, partial(AttentionRole, settings))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the role."""
    return run_role(ATTENTION, attend, argv)
