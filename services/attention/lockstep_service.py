"""Layout lockstep: an attention worker that is one rank of several. All ranks step together, and all end together."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from services.attention.engine_thread import BUFFER_BYTES, BUFFER_TOKENS
from services.attention.lockstep_engine import Departure, LockstepEngine, LockstepRank
from services.attention.metrics import Growth, TotalsObserver
from services.attention.service import AttentionService
from services.attention.setup.build import (
    Built,
    engine_options,
    load_draft,
    load_model,
    served_model,
    worker_plan,
)
from services.attention.step.engine import Engine, EngineTracing
from services.attention.worker import AttentionWorker, EngineError
from services.errors import LockstepBroken, LockstepLeft, QueueUnavailable
from services.metrics import CHECKPOINT, WorkerMetrics
from services.model.device import into_memory
from services.model.progress import loading_progress
from services.runtime import AGAIN, in_daemon
from services.runtime.tasks import end_tasks

DEREGISTER_S = 2.0
END_S = 5.0
"""How long the threads that a rank has inside torch may take to end."""

log = logging.getLogger(__name__)


class LockstepService(AttentionService):
    """One rank. Where another rank breaks off or leaves, this process exits and asks to be started again."""

    _buffer_tokens = None  # the engine goes on serving the other ranks' rows while its own results wait for Redis
    _rank: LockstepRank | None = None

    async def run(self, metrics_url: str, stop: asyncio.Event) -> None:
        """Load, meet the other ranks, serve until ``stop`` or until another rank leaves, drain."""
        try:
            await super().run(metrics_url, stop)
        except (LockstepBroken, LockstepLeft) as error:
            (log.info if isinstance(error, LockstepLeft) else log.error)("%s", error.message)
            os._exit(AGAIN)  # threads that wait for other ranks would hold an orderly exit up
        finally:
            if self._rank is not None:
                await _close(self._rank)

    def _build(self) -> Built[LockstepEngine]:
        """Build the engine. Raises LockstepBroken, too: the ranks have to start again."""
        settings = self._settings
        served = served_model(settings, rank=settings.rank)
        tokens = served.fitting.size().max_num_batched_tokens
        rank = LockstepRank(settings, served.spec, dtype=served.dtype, device=served.device, step_tokens=tokens)
        began = time.monotonic()
        with loading_progress(log) as progress, into_memory(served.device):
            model, draft = load_model(served, progress), load_draft(served, progress)
            loaded_s = time.monotonic() - began
            link = rank.connect(self._id, progress)
        # Neither overlap, nor graphs, nor lookahead: the ranks must cut their steps alike.
        plan = worker_plan(served, model, None)
        options = engine_options(settings, plan, lookahead="off")
        traced = None if self._tracer is None else EngineTracing(self._tracer, None)
        drafter = None if draft is None else draft.drafter(options, None)
        clock = self._clock.now_ms
        engine = Engine(model=model, link=link, options=options, clock=clock, tracing=traced, drafter=drafter)
        stepped = LockstepEngine(engine, rank)
        return Built(served=served, plan=plan, engine=stepped, link=link, load_s={CHECKPOINT: loaded_s + rank.load_s})

    async def _with_experts(self, built: Built[Any], metrics_url: str, stop: asyncio.Event) -> None:
        self._rank = built.engine.rank
        await super()._with_experts(built, metrics_url, stop)

    async def _warmed_up(self, built: Built[Any], stop: asyncio.Event) -> bool:
        """Return True: a step needs all ranks, and a rank that is to end announces that to the others first."""
        del built, stop
        return True

    async def _run_worker(self, built: Built[Any], worker: AttentionWorker, stop: asyncio.Event) -> None:
        engine: LockstepEngine = built.engine
        engine.has_room = partial(worker.has_room, BUFFER_TOKENS, BUFFER_BYTES)
        engine.rank.on_notify = worker.nudge
        departure = Departure(engine, stop, worker.nudge)
        following = asyncio.create_task(departure.follow())
        try:
            await worker.run(departure.begun)
            await departure.end()
        except EngineError as error:
            if not isinstance(error.__cause__, LockstepBroken):
                raise
            await self._hand_over(engine.suspects)
            raise error.__cause__ from error
        finally:
            await end_tasks([following])

    async def _hand_over(self, suspects: Mapping[str, int]) -> None:
        """Let requests go on elsewhere at once. Attempts that were computed count as failed, as when their worker dies:
        one of them may have broken the lock-step, and would break the next one."""
        try:
            async with asyncio.timeout(DEREGISTER_S):
                await self._queue.deregister(self._id, suspects)
        except (TimeoutError, QueueUnavailable):
            log.warning("stopping without deregistering: Redis does not answer; the leases will expire")

    def _observers(self, built: Built[Any]) -> list[Callable[[], object]]:
        metrics, rank = self._metrics, built.engine.rank
        refusals = TotalsObserver(metrics.refused_peers, rank.faults.totals)
        return [*super()._observers(built), LockstepObserver(metrics, rank).refresh, refusals.refresh]


class LockstepObserver:
    """Counts the steps of all ranks together, and what goes to the other ranks."""

    def __init__(self, metrics: WorkerMetrics, rank: LockstepRank) -> None:
        self._metrics, self._rank, self._growth = metrics, rank, Growth()

    def refresh(self) -> None:
        metrics, traffic = self._metrics, self._rank.traffic
        self._growth.follow(metrics.lockstep_turns, self._rank.steps.turns)
        for scope in list(traffic.messages):
            self._growth.follow(metrics.lockstep_messages.labels(scope), traffic.messages[scope])
            self._growth.follow(metrics.lockstep_bytes.labels(scope), traffic.bytes[scope])


async def _close(rank: LockstepRank) -> None:
    try:
        async with asyncio.timeout(END_S):
            await in_daemon("end the lock-step", rank.close)
    except TimeoutError:
        log.warning("lock-step threads did not end within %.0f s; exiting without them", END_S)
