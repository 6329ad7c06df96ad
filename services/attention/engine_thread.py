"""The thread that runs the engine. Commands come from the event loop, batches of TokenEvents go back to it.

Commands are taken before every step, so that a cancel holds before the next step is planned; an idle thread wakes at
once. Events wait in a bounded buffer: the publisher sends those of one step while the engine computes the next. If the
publisher leaves events behind, the engine only cancels until they are taken: new events would wait even longer. While
Redis is away the engine pauses once ``buffer_tokens`` events wait, or ``buffer_bytes`` of them; also while it is held.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, takewhile
from typing import Protocol

from services.messages import GenerateRequest, TokenEvent, event_bytes

BUFFER_BYTES = 64 * 1024 * 1024
BUFFER_TOKENS = 65_536
"""How many computed tokens, and bytes of them, are kept while Redis is away. Then the engine pauses."""


class SteppedEngine(Protocol):
    """An engine as the thread uses it (:class:`services.attention.step.engine.Engine`). Not thread-safe."""

    @property
    def has_work(self) -> bool: ...

    def add(self, request: GenerateRequest) -> None: ...

    def cancel(self, request_id: str, attempt: int) -> None:
        """End the request if its attempt is at most ``attempt``; the next step returns the event of its end."""

    def step(self) -> list[TokenEvent]: ...

    def held(self) -> dict[str, int]:
        """Return the attempt of every request that has not ended."""


@dataclass(frozen=True, slots=True)
class Add:
    """Start a request. A higher attempt replaces a lower one."""

    request: GenerateRequest


@dataclass(frozen=True, slots=True)
class Stop:
    """Drop a request if the attempt held is at most ``attempt``. No event follows: Redis knows already."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Run:
    """Call ``work`` once the engine has nothing to compute or to report, then ``done`` with the error it raised."""

    work: Callable[[], object]
    done: Callable[[Exception | None], object]


Command = Add | Stop | Run


class EngineThread:
    """Owns ``engine`` between :meth:`start` and :meth:`stop`.

    Args:
        buffer_tokens: how many events may wait for the publisher, up to those of one more step. None: the thread never
            pauses the engine, which asks :meth:`has_room` and pauses by itself.
        buffer_bytes: roughly how many bytes they may take. Not used without ``buffer_tokens``.
        on_events: called from the engine's thread when there are events to :meth:`take` again.
        on_end: called from the engine's thread when it ends, with the error that ended it, if any.
        after_step: called from the engine's thread when a step is done; for metrics.
    """

    def __init__(
        self,
        engine: SteppedEngine,
        *,
        buffer_tokens: int | None,
        buffer_bytes: int = BUFFER_BYTES,
        on_events: Callable[[], None],
        on_end: Callable[[BaseException | None], None],
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._buffer_tokens = buffer_tokens
        self._buffer_bytes = buffer_bytes
        self._on_events = on_events
        self._on_end = on_end
        self._after_step = after_step
        self._ready = threading.Condition()
        self._commands: list[Command] = []
        self._errands: list[Run] = []
        self._events: list[TokenEvent] = []
        self._unpublished = self._unpublished_bytes = 0
        self._announced = False
        self._left_over = self._held = False
        self._stopping = False
        self._steps = 0
        self._in_step = False
        self._idle_s, self._idle_since = 0.0, time.monotonic()
        self._idle = True
        self._silenced: dict[str, tuple[int, int]] = {}  # id -> attempt, how many ends of it are still to come
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current step and wait for it. Unpublished events can still be taken."""
        self.abandon()
        self._thread.join()

    def abandon(self) -> None:
        """End the thread after its current step, if that ever ends."""
        with self._ready:
            self._stopping = True
            self._ready.notify()

    def send(self, command: Command) -> None:
        with self._ready:
            self._commands.append(command)
            self._ready.notify()

    def take(self, limit: int, nbytes: int) -> list[TokenEvent]:
        """Take events in order: up to ``limit``, up to about ``nbytes``, at least one if there is any. They count as
        unpublished until :meth:`published`. The engine makes no more while some are left."""
        with self._ready:
            if self._unpublished_bytes > nbytes:
                limit = min(limit, _fitting(self._events, nbytes))
            if len(self._events) <= limit:
                events, self._events = self._events, []
                self._announced = False
            else:
                events = list(islice(self._events, limit))
                del self._events[:limit]
            self._left_over = bool(self._events)
            self._ready.notify()  # the engine may have paused
            return events

    def published(self, events: Sequence[TokenEvent]) -> None:
        """Count ``events``, which were taken, as published."""
        with self._ready:
            self._unpublished -= len(events)
            self._unpublished_bytes -= event_bytes(events)
            self._ready.notify()  # the engine may have paused

    def hold(self, held: bool) -> None:
        """Set whether the engine has to pause although it has work and room."""
        with self._ready:
            self._held = held
            self._ready.notify()

    def nudge(self) -> None:
        """Make the thread look again whether the engine has work."""
        with self._ready:
            self._ready.notify()

    @property
    def step(self) -> int | None:
        """Number of the step in progress; None between steps."""
        return self._steps if self._in_step else None

    @property
    def idle_s(self) -> float:
        """Seconds since the start in which the engine had no sequence."""
        with self._ready:
            return self._idle_s + (time.monotonic() - self._idle_since if self._idle else 0.0)

    @property
    def unpublished(self) -> int:
        """Events computed and not yet published."""
        return self._unpublished

    def has_room(self, tokens: int, nbytes: int) -> bool:
        """Return whether the engine may make events: those not yet published are fewer than ``tokens`` and take less
        than about ``nbytes``, the publisher left none behind, and the engine is not held."""
        if self._held or self._left_over:
            return False
        return self._unpublished < tokens and self._unpublished_bytes < nbytes

    def _main(self) -> None:
        failure: BaseException | None = None
        try:
            while self._turn():
                pass
        except BaseException as error:  # noqa: BLE001  the thread's boundary: the event loop gets it and ends the process
            failure = error
        self._on_end(failure)

    def _turn(self) -> bool:
        """Apply the commands, do one step, hand over its events. False to end."""
        commands, may_step = self._next()
        if self._stopping:
            return False
        for command in commands:
            self._apply(command)
        if may_step and self._engine.has_work:
            events = self._audible(self._step())
            self._after_step()
            self._hand_over(events)
        elif commands:
            self._after_step()  # a cancel while paused frees blocks too
        if self._errands and not self._engine.has_work:
            self._run_errands()
        return True

    def _run_errands(self) -> None:
        errands, self._errands = self._errands, []
        for errand in errands:
            try:
                errand.work()
            except Exception as error:  # noqa: BLE001  whoever sent it gets it
                errand.done(error)
            else:
                errand.done(None)
        self._after_step()

    def _step(self) -> list[TokenEvent]:
        self._steps += 1
        self._in_step = True
        try:
            return self._engine.step()
        finally:
            self._in_step = False

    def _next(self) -> tuple[list[Command], bool]:
        """Wait for something to do. Returns the commands, and whether a step may follow."""
        with self._ready:
            self._note_idle(not self._engine.has_work)
            while not (self._stopping or self._commands or (self._may_step and self._engine.has_work)):
                self._ready.wait()
            self._note_idle(False)
            commands, self._commands = self._commands, []
            return commands, self._may_step

    def _note_idle(self, idle: bool) -> None:
        if idle != self._idle:
            now = time.monotonic()
            self._idle_s += now - self._idle_since if self._idle else 0.0
            self._idle, self._idle_since = idle, now

    @property
    def _may_step(self) -> bool:
        return self._buffer_tokens is None or self.has_room(self._buffer_tokens, self._buffer_bytes)

    def _apply(self, command: Command) -> None:
        match command:
            case Add(request):
                self._engine.add(request)
            case Stop(request_id, attempt):
                held = self._engine.held().get(request_id)
                if held is not None and held <= attempt:
                    silenced, ends = self._silenced.get(request_id, (held, 0))
                    self._silenced[request_id] = held, (ends if silenced == held else 0) + 1
                self._engine.cancel(request_id, attempt)
            case Run():
                self._errands.append(command)

    def _audible(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """Drop the events of silenced attempts. A silence ends with its attempt: the same attempt may be assigned once
        more, after it was given back or after Redis lost it in a crash."""
        return [event for event in events if not self._silences(event)] if self._silenced else events

    def _silences(self, event: TokenEvent) -> bool:
        silenced, ends = self._silenced.get(event.request_id, (-1, 0))
        if event.finish is not None and event.attempt == silenced:
            if ends > 1:  # stopped, assigned again and stopped again during one step
                self._silenced[event.request_id] = silenced, ends - 1
            else:
                del self._silenced[event.request_id]
        return event.attempt <= silenced

    def _hand_over(self, events: list[TokenEvent]) -> None:
        if not events:
            return
        with self._ready:
            self._events += events
            self._unpublished += len(events)
            self._unpublished_bytes += event_bytes(events)
            announce, self._announced = not self._announced, True
        if announce:
            self._on_events()


def _fitting(events: Sequence[TokenEvent], nbytes: int) -> int:
    """Return how many of the first ``events`` take about ``nbytes`` together; at least 1."""
    sizes = accumulate(event.nbytes for event in events)
    return max(1, sum(1 for _ in takewhile(lambda size: size <= nbytes, sizes)))
