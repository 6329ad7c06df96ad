"""An attention worker falls asleep and wakes up: without requests first, then without memory, and back.

The event loop hands requests back and waits; the engine's thread gives memory back and takes it again. Heartbeats go on
all the while, so the worker keeps its place.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import torch

from services.attention.engine_thread import EngineThread, Run
from services.attention.in_flight_requests import InFlightRequests
from services.attention.registration import Registration
from services.attention.step.engine import Engine
from services.model.device import into_memory
from services.model.sleep import RememberedWeights
from services.queue.backoff import Backoff, until_answered
from services.queue.sleep import WakeUpGivenUp
from services.runtime.tasks import end_tasks

log = logging.getLogger(__name__)


class HandBack(Protocol):
    """Returns requests to the queue: those that have not begun, or all of them."""

    def __call__(self, *, begun: bool) -> Awaitable[object]: ...


class Sleepable(Protocol):
    """An engine with its weights. Its methods run on the engine's thread, without a request in the engine."""

    def free(self, level: int) -> None:
        """Give the memory back; again to sleep more deeply."""

    def restore(self) -> None:
        """Take the memory again. Raises OutOfMemory; then :meth:`free` is due, or another try."""

    def prepare(self) -> None:
        """Do what the first steps would wait for; experts can be reached by now."""


class EngineSleep:
    """The engine of a worker, and the weights in its process."""

    def __init__(
        self, engine: Engine[Any], weights: RememberedWeights, device: torch.device, prepare: Callable[[], object]
    ) -> None:
        self._engine, self._weights, self._device, self._prepare = engine, weights, device, prepare
        self._memory = weights.memory()
        self._kept = True

    def free(self, level: int) -> None:
        began = time.monotonic()
        self._engine.sleep()
        gc.collect()  # graphs and caches must be gone before torch's memory is given back
        self._kept = level == 1
        if not self._kept:
            self._weights.forget_forms()
        self._memory.free(keep=self._kept)
        log.info("asleep at level %d after %.2f s", level, time.monotonic() - began)

    def restore(self) -> None:
        began = time.monotonic()
        with into_memory(self._device):
            self._memory.restore()
            self._engine.wake_up()  # before weights are read: reading takes long, and there may be too little memory
            if not self._kept:
                self._weights.fill_again()
        log.info("weights are back after %.2f s", time.monotonic() - began)

    def prepare(self) -> None:
        self._prepare()


class WorkerSleep:
    """Moves one worker between serving and sleep; one move at a time.

    Args:
        hand_back: see :class:`HandBack`.
        experts: returns once all experts can be reached.
        drain_s: how long requests that have begun may take to end before they are handed back, too.
    """

    def __init__(
        self,
        sleepable: Sleepable,
        *,
        registration: Registration,
        in_flight: InFlightRequests,
        thread: EngineThread,
        hand_back: HandBack,
        experts: Callable[[], Awaitable[object]],
        drain_s: float,
    ) -> None:
        self._sleepable = sleepable
        self._registration, self._in_flight, self._thread = registration, in_flight, thread
        self._hand_back, self._experts, self._drain_s = hand_back, experts, drain_s
        self.closed = False
        """Whether assignments that still come in belong to others by now."""
        self._waiting: asyncio.Future[object] | None = None

    async def fall_asleep(self, level: int) -> None:
        await self._registration.entered.wait()
        if not self.closed:
            await self._empty()
        await self._on_engine(partial(self._sleepable.free, level))

    async def wake_up(self) -> None:
        """Serve again. Raises OutOfMemory; WakeUpGivenUp after :meth:`give_up`. The worker has to fall asleep then."""
        await self._on_engine(self._sleepable.restore)
        await self._until_experts()
        await self._on_engine(self._sleepable.prepare)
        self.closed = False
        await until_answered("waking up", partial(self._registration.suspend, False), Backoff())

    def give_up(self) -> None:
        """End a wake-up that waits for experts: they may sleep by now, and wait for nobody. Nothing else ends."""
        if self._waiting is not None:
            self._waiting.cancel()

    async def _until_experts(self) -> None:
        self._waiting = waiting = asyncio.ensure_future(self._experts())
        try:
            await asyncio.wait({waiting})
            if waiting.cancelled():
                raise WakeUpGivenUp
            waiting.result()
        finally:
            self._waiting = None
            await end_tasks([waiting])

    async def _empty(self) -> None:
        """Take no more requests, give back those that have not begun, let others end in time, hand the rest over."""
        await until_answered("falling asleep", partial(self._registration.suspend, True), Backoff())
        self.closed = True
        await until_answered("falling asleep", partial(self._hand_back, begun=False), Backoff())
        try:
            async with asyncio.timeout(self._drain_s):
                await self._in_flight.emptied()
        except TimeoutError:
            log.warning("handing over %d requests: they go on after the sleep", len(self._in_flight))
            await until_answered("falling asleep", partial(self._hand_back, begun=True), Backoff())

    async def _on_engine(self, work: Callable[[], object]) -> None:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def settle(error: Exception | None) -> None:
            if not ended.done():
                ended.set_exception(error) if error else ended.set_result(None)

        def done(error: Exception | None) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle, error)

        self._thread.send(Run(work, done))
        await ended
