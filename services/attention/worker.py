"""The attention worker between Redis and its engine. In: Assign and Cancel by inbox. Out: TokenEvents and heartbeats.

The event loop follows the inbox, publishes, and keeps the leases of requests until their end is in Redis; the engine
steps on a thread of its own. Requests that are cancelled, or that Redis calls stale, are dropped without an event:
their record has already ended or belongs to a later attempt. An attempt that lacks experts is given up, and the request
goes on elsewhere or later; while experts are missing this worker has no credit.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from services.attention.engine_thread import BUFFER_BYTES, Add, EngineThread, SteppedEngine, Stop
from services.attention.in_flight_requests import InFlightRequests
from services.attention.publisher import Backpressure, Publisher
from services.attention.registration import Registration
from services.attention.request_log import log_attempts, log_end, log_start
from services.attention.sleep import Sleepable, WorkerSleep
from services.errors import ErrorInfo, ExpertUnavailable, QueueUnavailable
from services.messages import Assign, Cancel, InboxMessage, TokenEvent, WorkerInfo
from services.queue.backoff import Backoff, until_answered
from services.queue.clock import RedisClock
from services.queue.connect import MAX_BLOCK_MS
from services.queue.worker_side import FIRST_ID, WorkerQueue
from services.runtime.tasks import end_tasks, first_done, unless_stopped
from services.runtime.tracing import Tracer

HEARTBEATS_PER_LEASE = 4
FLUSH_S = 2.0
"""How long, at shutdown, publishing the last tokens and deregistering may take."""
WATCH_S = 1.0
"""Time between two looks at the step in progress."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerOptions:
    """Bounds of a worker. ``credit_*``: what the scheduler may assign at a time; ``buffer_*``: what may wait to be
    published, None where the engine pauses by itself. Times are in seconds."""

    credit_tokens: int
    credit_requests: int
    lease_s: float
    buffer_tokens: int | None
    buffer_bytes: int = BUFFER_BYTES
    drain_s: float
    step_timeout_s: float


class EngineError(RuntimeError):
    """The engine's thread ended by itself. The process must exit: only then do its requests go to other workers."""


class EngineStuck(EngineError):
    """A step does not end. Its thread cannot be stopped, so the process must exit without waiting for it."""


class AttentionWorker:
    """One incarnation. ``info.id`` is never reused.

    Args:
        after_step: called on the engine's thread after every step; for metrics.
        on_refused: called with the number of results that Redis refused.
        on_given_up: called with the number of attempts that ended because experts could not be reached.
        on_held_back: called with the seconds that the engine paused because a gateway lagged.
        lacks: names what keeps the engine from computing, such as experts that cannot be reached; called often.
        tracer: traces what is published, if it traces steps.
    """

    def __init__(
        self,
        *,
        info: WorkerInfo,
        engine: SteppedEngine,
        queue: WorkerQueue,
        clock: RedisClock,
        options: WorkerOptions,
        after_step: Callable[[], None] = lambda: None,
        on_refused: Callable[[int], None] = lambda _: None,
        on_given_up: Callable[[int], None] = lambda _: None,
        on_held_back: Callable[[float], None] = lambda _: None,
        lacks: Callable[[], Sequence[str]] = lambda: (),
        tracer: Tracer | None = None,
    ) -> None:
        self._info = info
        self._queue = queue
        self._clock = clock
        self._options = options
        self._on_refused = on_refused
        self._on_given_up = on_given_up
        self._on_held_back = on_held_back
        self._tracer = tracer
        self._in_flight = InFlightRequests()
        self._loop = asyncio.get_running_loop()
        self._engine_ended: asyncio.Future[None] = self._loop.create_future()
        self._thread = EngineThread(
            engine,
            buffer_tokens=options.buffer_tokens,
            buffer_bytes=options.buffer_bytes,
            on_events=lambda: self._call_soon(self._publisher.wake),
            on_end=lambda failure: self._call_soon(self._note_end, failure),
            after_step=after_step,
        )
        self._backpressure = Backpressure(queue, self._thread.hold)
        self._publisher = Publisher(self._thread, self._publish, self._note_published, self._hold_back)
        self._heartbeat_backoff = Backoff(max_s=min(1.0, options.lease_s / 8))
        credit = options.credit_tokens, options.credit_requests
        self._registration = Registration(info, queue, lease_s=options.lease_s, credit=credit, lacks=lacks)
        self._sleep: WorkerSleep | None = None

    def sleeping(self, sleepable: Sleepable, experts: Callable[[], Awaitable[object]]) -> WorkerSleep:
        """Return what sends this worker to sleep and wakes it. ``experts`` returns once they can be reached."""
        self._sleep = WorkerSleep(
            sleepable,
            registration=self._registration,
            in_flight=self._in_flight,
            thread=self._thread,
            hand_back=self._hand_back,
            experts=experts,
            drain_s=self._options.drain_s,
        )
        return self._sleep

    @property
    def unpublished(self) -> int:
        """Tokens computed and not yet in Redis."""
        return self._thread.unpublished

    @property
    def idle_s(self) -> float:
        """Seconds since the start in which the engine had no sequence."""
        return self._thread.idle_s

    def has_room(self, tokens: int, nbytes: int) -> bool:
        """Return whether the engine may step (:meth:`EngineThread.has_room`), if it pauses by itself."""
        return self._thread.has_room(tokens, nbytes)

    def nudge(self) -> None:
        """Announce, from any thread, that the engine has work from elsewhere."""
        self._thread.nudge()

    def held(self) -> dict[str, int]:
        """Return request id -> attempt, of requests that have been accepted and not ended in Redis."""
        return self._in_flight.held()

    def missing(self) -> list[str]:
        """Return the names of things that the worker waits for before it takes requests; for /ready."""
        if not self._registration.registered:
            return ["registration"]
        return ["Redis"] if self._heartbeat_backoff.failing else []

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop``, then drain.

        Raises:
            FingerprintMismatch: the namespace serves another model.
            EngineError: the engine's thread ended, or is stuck in a step (EngineStuck). Leases are left to expire, so
                that the requests count this attempt as failed.
        """
        background = [
            asyncio.ensure_future(self._publisher.run()),
            asyncio.ensure_future(self._follow_inbox()),
            asyncio.ensure_future(self._keep_leases()),
            asyncio.ensure_future(self._watch_engine()),
            asyncio.ensure_future(self._registration.keep(self._hand_back)),
            self._engine_ended,
        ]
        self._thread.start()
        halt = self._thread.stop
        try:
            await first_done(*background, self._serve(stop))
            await first_done(*background, self._drain())
        except EngineError as error:
            self._log_attempts("lost an attempt: its worker ends", self.held())
            if isinstance(error, EngineStuck):
                halt = self._thread.abandon
            raise
        finally:
            await end_tasks(background)
            await asyncio.to_thread(halt)

    async def _serve(self, stop: asyncio.Event) -> None:
        await unless_stopped(self._registration.enter(self._clock.sync), stop)
        await stop.wait()

    async def _keep_leases(self) -> None:
        pause_s = self._options.lease_s / HEARTBEATS_PER_LEASE
        while True:
            await asyncio.sleep(pause_s)
            if self._registration.registered:
                await until_answered("heartbeat", self._heartbeat, self._heartbeat_backoff)

    async def _heartbeat(self) -> None:
        held = self._in_flight.held()
        try:  # a reply lost on the way must not cost the lease
            async with asyncio.timeout(self._options.lease_s / HEARTBEATS_PER_LEASE):
                stale = await self._queue.heartbeat(self._info.id, held)
                await self._clock.sync()
        except TimeoutError as error:
            raise QueueUnavailable("Redis did not answer a heartbeat in time.") from error
        self._abandon_all({request_id: held[request_id] for request_id in stale})

    async def _follow_inbox(self) -> None:
        last_id, backoff = FIRST_ID, Backoff()
        while True:
            last_id, messages = await until_answered(
                "inbox", partial(self._queue.read_inbox, self._info.id, last_id, MAX_BLOCK_MS), backoff
            )
            for message in messages:
                self._handle(message)

    def _handle(self, message: InboxMessage) -> None:
        match message:
            case Assign(request):
                if self._sleep and self._sleep.closed:
                    return  # it was handed back before it came
                if self._in_flight.open(request.id, request.attempt, request.tenant):
                    log_start(request)
                    self._thread.send(Add(request))
            case Cancel(request_id, attempt):
                self._log_attempts("cancelled", {request_id: attempt}, logging.DEBUG)
                self._abandon(request_id, attempt)

    def _abandon(self, request_id: str, attempt: int) -> None:
        """Stop an attempt that Redis has already moved on from, without an event."""
        self._in_flight.close(request_id, attempt)
        self._thread.send(Stop(request_id, attempt))

    def _abandon_all(self, attempts: Mapping[str, int]) -> None:
        """Stop attempts that Redis calls ended, cancelled or lost. Most belong to clients that got what they wanted."""
        self._log_attempts("stopped: Redis has no such attempt any more", attempts, logging.DEBUG)
        for request_id, attempt in attempts.items():
            self._abandon(request_id, attempt)

    async def _publish(self, events: Sequence[TokenEvent]) -> set[str]:
        kept = [event for event in events if not _given_up(event)]
        refused = await self._published(kept) if kept else set()
        given_up = {event.request_id: event.attempt for event in events if _given_up(event)}
        if error := next((event.error for event in events if _given_up(event)), None):
            await self._give_up(given_up, error)
        return refused

    async def _published(self, events: Sequence[TokenEvent]) -> set[str]:
        if self._tracer is None or not self._tracer.steps:
            return await self._queue.publish(self._info.id, events)
        with self._tracer.step("publish", time.time_ns()) as span:
            span.attributes |= {"thread.name": "publisher", "expertmesh.events": len(events)}
            return await self._queue.publish(self._info.id, events)

    async def _hold_back(self) -> None:
        if seconds := await self._backpressure.wait():
            self._on_held_back(seconds)

    async def _give_up(self, attempts: Mapping[str, int], error: ErrorInfo) -> None:
        log.warning("giving up %d requests: %s", len(attempts), error.message)
        self._log_attempts("gave up an attempt: its experts cannot be reached", attempts)
        for request_id, attempt in attempts.items():  # first: the same attempt may be assigned before the reply
            self._in_flight.close(request_id, attempt)
        await self._queue.give_up(self._info.id, attempts, error)
        self._on_given_up(len(attempts))

    def _note_published(self, events: Sequence[TokenEvent], refused: Mapping[str, int]) -> None:
        self._abandon_all(refused)
        for event in events:
            if event.finish is not None and not _given_up(event):
                if event.request_id not in refused:
                    log_end(event, self._in_flight.tenants.get(event.request_id))
                self._in_flight.close(event.request_id, event.attempt)
        if refused:
            self._on_refused(len(refused))

    def _log_attempts(self, what: str, attempts: Mapping[str, int], level: int = logging.INFO) -> None:
        log_attempts(what, attempts, level, tenants=self._in_flight.tenants)

    async def _drain(self) -> None:
        """Give back requests that have not begun, let others end in time, hand the rest over. None counts as failed."""
        if not self._registration.registered:
            return
        if len(self._in_flight):
            log.info("draining %d requests", len(self._in_flight))
        try:
            async with asyncio.timeout(self._options.drain_s if len(self._in_flight) else FLUSH_S):
                await until_answered("draining", self._registration.withdraw, Backoff())
                await until_answered("draining", self._hand_back, Backoff())
                await self._in_flight.emptied()
        except TimeoutError:
            log.warning("drain timeout reached; handing over %d requests to other workers", len(self._in_flight))
            self._log_attempts("handed over an attempt", self.held())
        await asyncio.to_thread(self._thread.stop)
        self._backpressure.end()
        try:
            async with asyncio.timeout(FLUSH_S):
                await self._publisher.flushed()
                await until_answered("leaving", partial(self._queue.deregister, self._info.id), Backoff())
        except TimeoutError:
            log.warning("stopping without deregistering: Redis does not answer; the leases will expire")

    async def _hand_back(self, *, begun: bool = False) -> None:
        held = self._in_flight.held()
        taken = await self._queue.hand_back(self._info.id, begun=begun)
        back = {name: held[name] for name in taken if name in held}
        self._log_attempts("handed over an attempt" if begun else "returned an attempt that had not started", back)
        for request_id, attempt in back.items():
            self._abandon(request_id, attempt)

    async def _watch_engine(self) -> None:
        """Raise EngineStuck for a step that lasts too long, in ticks of this loop: a paused process does not count."""
        tick_s = min(WATCH_S, self._options.step_timeout_s / 4)
        step, lasted_s = None, 0.0
        while lasted_s < self._options.step_timeout_s:
            await asyncio.sleep(tick_s)
            before, step = step, self._thread.step
            lasted_s = lasted_s + tick_s if step is not None and step == before else 0.0
        raise EngineStuck(f"A step has lasted for {lasted_s:.0f} s; what this worker holds goes to others.")

    def _note_end(self, failure: BaseException | None) -> None:
        if failure is not None and not self._engine_ended.done():
            died = EngineError("The engine's thread ended; what it held goes to other workers when its lease expires.")
            died.__cause__ = failure
            self._engine_ended.set_exception(died)

    def _call_soon(self, callback: Callable[..., object], *args: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(callback, *args)


def _given_up(event: TokenEvent) -> bool:
    return event.error is not None and event.error.code == ExpertUnavailable.code
