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
from services.runtime.tasks import end_tasks

AWAKE, MOVING = 0, -1
"""States of a worker: awake, and on its way to sleep or back. Others are the level at which it sleeps."""
LEVELS = (1, 2)
"""1: weights stay in the memory of the host; 2: they are read again."""
RETRY_S = 2.0
"""Pause before another try of a worker that found too little memory to wake up."""
LOOK_S = 0.5
"""Time between two looks of a worker at what is ordered."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sleep:
    """``ordered``: the level that holds, 0 if the model is to be awake. ``notes``: the state of each live worker."""

    ordered: int
    notes: Mapping[str, int]

    @property
    def sleeping(self) -> bool:
        """Whether requests wait for a wake-up: from the order to sleep until the last worker is awake again."""
        return bool(self.ordered or any(self.notes.values()))

    @property
    def behind(self) -> int:
        """How many live workers have not done yet what is ordered."""
        return sum(state < self.ordered or (state != AWAKE and not self.ordered) for state in self.notes.values())


class SleepSwitch:
    """Orders, for gateways; looks, for whoever shows the state."""

    def __init__(self, redis: Redis, keys: Keys, limits: QueueLimits | None = None) -> None:
        self._scripts = Scripts(redis, keys, limits or QueueLimits())

    async def order(self, level: int) -> int:
        """Orders all workers to sleep at ``level``, or to wake up (0). Returns the level that holds now: a model that
        sleeps more deeply stays as it is."""
        return int(await self._scripts.run("order_sleep", level))

    async def look(self) -> Sleep:
        ordered, notes = await self._scripts.run("sleepers")
        states = zip(notes[::2], notes[1::2], strict=True)
        return Sleep(
            ordered=int(ordered),
            notes={worker.decode(errors="replace"): int(state) for worker, state in states},
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
        wait_s: longest time that the worker waits for attention workers to sleep first.
    """

    def __init__(
        self,
        notes: SleepNotes,
        *,
        fall_asleep: Callable[[int], Awaitable[object]],
        wake_up: Callable[[], Awaitable[object]],
        wait_s: float = 0.0,
    ) -> None:
        self._notes, self._fall_asleep, self._wake_up = notes, fall_asleep, wake_up
        self._most_looks = max(1, round(wait_s / LOOK_S))
        self._waited = 0
        self.level = AWAKE
        """The level at which the worker sleeps."""

    async def run(self) -> None:
        """Follow until cancelled. Raises what a move raises."""
        move: asyncio.Task[None] | None = None
        try:
            while True:
                ordered = await self._look(self.level if move is None else MOVING)
                if move is None and self._moves(ordered):
                    move = asyncio.create_task(self._move(ordered))
                elif move is None:
                    await asyncio.sleep(LOOK_S)
                elif (await asyncio.wait({move}, timeout=LOOK_S))[0]:
                    move.result()
                    move = None
        finally:
            await end_tasks([move] if move else [])

    def _moves(self, ordered: int) -> bool:
        return ordered > self.level or (ordered == AWAKE and self.level != AWAKE)

    async def _look(self, state: int) -> int:
        ordered, serving = await _noted(self._notes, state)
        self._waited = self._waited + 1 if serving else 0
        return ordered if not serving or self._waited > self._most_looks else AWAKE

    async def _move(self, ordered: int) -> None:
        if ordered != AWAKE:
            log.info("going to sleep at level %d", ordered)
            await self._fall_asleep(ordered)
            self.level = ordered
            return
        try:
            await self._wake_up()
        except OutOfMemory as error:
            log.warning("cannot wake up yet: %s", error.message)
            await self._fall_asleep(self.level)
            await asyncio.sleep(RETRY_S)
        else:
            log.info("awake again")
            self.level = AWAKE


async def until_awake(notes: SleepNotes) -> None:
    """Return once the model is to be awake; for a worker that holds nothing yet."""
    ordered, _ = await _noted(notes, AWAKE)
    if not ordered:
        return
    log.info("the model sleeps (level %d): loading waits for the wake-up", ordered)
    while ordered:
        await asyncio.sleep(LOOK_S)
        ordered, _ = await _noted(notes, LEVELS[-1])
    await _noted(notes, AWAKE)


async def _noted(notes: SleepNotes, state: int) -> tuple[int, int]:
    return await until_answered("sleep", partial(notes.note, state), Backoff())
