"""Sleep and wake across Redis: a gateway orders them, workers follow and note how far they are.

The order is one key of the namespace, so workers that join while the model sleeps find it, too. Notes of workers are
under leases. All methods raise QueueUnavailable while Redis does not answer, and may be repeated.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

from redis.asyncio import Redis

from services.errors import OutOfMemory
from services.queue.backoff import Backoff, until_answered
from services.queue.keys import Keys
from services.queue.limits import QueueLimits
from services.queue.scripts import Scripts, milliseconds
from services.runtime.tasks import end_tasks, forget_frames

AWAKE, MOVING, STARTING = 0, -1, -2
"""States of a worker: awake, on its way to sleep or back, and loading for the first time while others may be awake.
Others are the level at which it sleeps."""
LEVELS = (1, 2)
"""1: weights stay in the memory of the host; 2: they are read again."""
RETRY_S, MAX_RETRY_S = 2.0, 30.0
"""Pause before another try of a worker that found too little memory to wake up; it doubles each time, up to the
second."""
LOOK_S = 0.5
"""Time between two looks of a worker at what is ordered."""

log = logging.getLogger(__name__)


class WakeUpGivenUp(Exception):
    """A wake-up that waited for others was given up, because sleep is ordered again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sleep:
    """``ordered``: the level that holds, 0 if the model is to be awake. ``notes``: the state of each live worker.
    ``silent``: how many registered workers and seats have none; they follow no order, but serve without one."""

    ordered: int
    notes: Mapping[str, int]
    silent: int = 0

    @property
    def sleeping(self) -> bool:
        """Whether requests wait for a wake-up: from the order to sleep until the last worker is awake again."""
        return bool(self.ordered or any(state not in (AWAKE, STARTING) for state in self.notes.values()))

    @property
    def behind(self) -> int:
        """How many live workers have not done yet what is ordered."""
        late = sum(state < self.ordered or (state != AWAKE and not self.ordered) for state in self.notes.values())
        return late + (self.silent if self.ordered else 0)


class SleepSwitch:
    """Orders, for gateways; looks, for whoever shows the state."""

    def __init__(self, redis: Redis, keys: Keys, limits: QueueLimits | None = None) -> None:
        self._scripts = Scripts(redis, keys, limits or QueueLimits())

    async def order(self, level: int) -> int:
        """Orders all workers to sleep at ``level``, or to wake up (0). Returns the level that holds now: a model that
        sleeps more deeply stays as it is."""
        return int(await self._scripts.run("order_sleep", level))

    async def look(self) -> Sleep:
        ordered, notes, silent = await self._scripts.run("sleepers")
        states = zip(notes[::2], notes[1::2], strict=True)
        return Sleep(
            ordered=int(ordered),
            notes={worker.decode(errors="replace"): int(state) for worker, state in states},
            silent=int(silent),
        )


class SleepNotes:
    """A worker's side. ``after_attention``: it has experts, and sleeps only once no attention worker needs them."""

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        *,
        worker: str,
        lease_s: float,
        after_attention: bool = False,
        limits: QueueLimits | None = None,
    ) -> None:
        self._scripts = Scripts(redis, keys, limits or QueueLimits())
        self._worker, self._lease_ms, self._after = worker, milliseconds(lease_s), after_attention
        self._kind = "experts" if after_attention else "attention"

    async def note(self, state: int) -> tuple[int, int]:
        """Notes ``state``. Returns the level that is ordered, and how many attention workers still serve (0 where the
        worker does not wait for them)."""
        asks = int(self._after and state == AWAKE)
        ordered, serving = await self._scripts.run("note_sleep", self._worker, self._kind, state, self._lease_ms, asks)
        return int(ordered), int(serving)


class SleepFollower:
    """Brings one worker to where it is ordered to be, one move at a time.

    Args:
        fall_asleep: called with the level, also to sleep more deeply.
        wake_up: called to serve again.
        give_up: called again and again while a move goes on and sleep is ordered; lets :exc:`WakeUpGivenUp` end a
            wake-up that waits for others.
        wait_s: longest time that the worker waits for attention workers to sleep first.
        begins: the level at which the worker sleeps first, whatever is ordered; :data:`AWAKE`: it does not.
    """

    def __init__(
        self,
        notes: SleepNotes,
        *,
        fall_asleep: Callable[[int], Awaitable[object]],
        wake_up: Callable[[], Awaitable[object]],
        give_up: Callable[[], object] = lambda: None,
        wait_s: float = 0.0,
        begins: int = AWAKE,
    ) -> None:
        self._notes, self._fall_asleep, self._wake_up, self._give_up = notes, fall_asleep, wake_up, give_up
        self._most_looks = max(1, round(wait_s / LOOK_S))
        self._waited = 0
        self._begins, self._retry_s = begins, RETRY_S
        self.level = AWAKE
        """The level at which the worker sleeps."""
        self.ordered = begins
        """The level that was ordered when it looked last; :data:`AWAKE` to be awake."""

    async def run(self) -> None:
        """Follow until cancelled. Raises what a move raises."""
        move = asyncio.create_task(self._move(self._begins)) if self._begins else None
        try:
            while True:
                ordered = await self._look(self.level if move is None else MOVING)
                if move is None and self._moves(ordered):
                    move = asyncio.create_task(self._move(ordered))
                elif move is None:
                    await asyncio.sleep(LOOK_S)
                else:
                    if ordered != AWAKE:
                        self._give_up()
                    if (await asyncio.wait({move}, timeout=LOOK_S))[0]:
                        move.result()
                        move = None
        finally:
            await end_tasks([move] if move else [])

    def _moves(self, ordered: int) -> bool:
        return ordered > self.level or (ordered == AWAKE and self.level != AWAKE)

    async def _look(self, state: int) -> int:
        ordered, serving = await _noted(self._notes, state)
        self.ordered = ordered
        self._waited = self._waited + 1 if serving else 0
        return ordered if not serving or self._waited > self._most_looks else AWAKE

    async def _move(self, ordered: int) -> None:
        if ordered != AWAKE:
            log.info("going to sleep at level %d", ordered)
            await self._fall_asleep(ordered)
            self.level = ordered
            return
        if await self._woke():
            log.info("awake again")
            self.level, self._retry_s = AWAKE, RETRY_S
        else:  # not where the error is caught: it holds what the try took
            await self._fall_asleep(self.level)
            await self._pause()

    async def _woke(self) -> bool:
        try:
            await self._wake_up()
        except WakeUpGivenUp:
            log.info("not waking up: sleep is ordered again")
            self._retry_s = 0.0
        except OutOfMemory as error:
            log.warning("cannot wake up yet: %s", error.message)
            forget_frames(error)
        else:
            return True
        return False

    async def _pause(self) -> None:
        await asyncio.sleep(self._retry_s)
        self._retry_s = min(MAX_RETRY_S, max(RETRY_S, 2 * self._retry_s))


class Start:
    """The notes of a worker from its start until a :class:`SleepFollower` takes over: workers count as behind while
    they load.
    """

    def __init__(self, notes: SleepNotes) -> None:
        self._notes = notes
        self._state = STARTING
        self.level = AWAKE
        """The level that was ordered while the worker loads; :data:`AWAKE` where none was."""
        self.ordered = asyncio.Event()
        """Set with :attr:`level`."""

    async def until_awake(self) -> None:
        """Return once the model is to be awake; for a worker that holds nothing yet."""
        ordered, _ = await _noted(self._notes, self._state)
        if ordered:
            log.info("the model sleeps (level %d): loading waits for the wake-up", ordered)
            self._state = MOVING  # after the sleep requests wait for this worker, too
        while ordered:
            await asyncio.sleep(LOOK_S)
            ordered, _ = await _noted(self._notes, LEVELS[-1])
        self.level = AWAKE
        self.ordered.clear()
        await _noted(self._notes, self._state)

    async def keep(self) -> None:
        """Note that the worker loads, and look what is ordered, until cancelled."""
        while True:
            ordered, _ = await _noted(self._notes, self._state)
            if ordered:
                self.level = ordered
                self.ordered.set()
            await asyncio.sleep(LOOK_S)


async def _noted(notes: SleepNotes, state: int) -> tuple[int, int]:
    return await until_answered("sleep", partial(notes.note, state), Backoff())
