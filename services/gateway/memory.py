"""Memory of work that is over, back to the machine."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
from collections.abc import Callable

log = logging.getLogger(__name__)

_LOOK_S, _MAX_LOOK_S = 5.0, 30.0
_MORE = 1.1
"""Memory is given back above this multiple of the least that the process ever held."""
_WORTH_IT = 0.05
"""The share of the memory held that a call has to free to be worth another one soon."""
_GROWTH = 1.05
"""A process that holds more than this multiple of what it held at the last look is growing."""
_MAX_GREW = 6
"""After so many looks in a row at a growing process it is looked through all the same."""
_ARENA_MAX = -8
"""M_ARENA_MAX of malloc.h."""
_STATM = "/proc/self/statm"


async def give_back_memory() -> None:
    """Gives what is free to the machine, again and again, until cancelled.

    A crowd leaves free objects on Python's lists, a few in each of its arenas, and free pages with glibc. The former
    takes a collection, some 0.1 s of the event loop for a thousand streams, which frees objects and therefore runs
    there, and seldom while more and more is held; the latter a call of up to 0.05 s in a thread, and larger allocations
    of others wait for it. Returns at once where the C library has
    no such call, or the system does not say what a process holds.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None or not held_bytes():
        return
    giver, pause_s = MemoryGiver(held=held_bytes, trim=lambda: trim(0)), _LOOK_S
    while True:
        await asyncio.sleep(pause_s)
        if giver.may_have_free:
            gc.collect()  # empties the lists
        try:
            pause_s = await asyncio.to_thread(giver.look)
        except (RuntimeError, MemoryError) as error:  # no thread, or no memory: no reason to end streams
            log.warning("cannot give memory back now: %s", error)
            pause_s = _MAX_LOOK_S


def keep_one_heap() -> None:
    """From now on new threads allocate where the first one does: of a heap of their own glibc gives back only holes,
    and keeps up to 64 MiB at its end. Where there is no such call nothing happens."""
    if choose := getattr(ctypes.CDLL(None), "mallopt", None):
        choose(_ARENA_MAX, 1)


def collect_seldom() -> None:
    """Garbage among long-lived objects is not looked for while a crowd comes: with 4,000 streams a look holds the event
    loop for 0.4 s, and hardly any garbage is in cycles. :func:`give_back_memory` looks later; so does Python, once
    there are 1.4 million containers more than at its last look. What there is now stays, and is never looked through.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 200)


class MemoryGiver:
    """Calls ``trim`` while the process holds more than at its emptiest: often where that helps, seldom where what it
    holds is in use. ``held`` says how many bytes that is, 0 where it cannot."""

    def __init__(self, held: Callable[[], int], trim: Callable[[], object]) -> None:
        self._held = held
        self._trim = trim
        self._least = self._last = held()
        self._grew = 0  # looks in a row
        self._pause_s = _LOOK_S

    @property
    def may_have_free(self) -> bool:
        """Whether the process holds more than at its emptiest, and about as much as at the last look, or has grown for
        many looks: a crowd that still comes has left nothing free, but garbage itself grows, too.
        """
        held = self._held()
        return self._more(held) and (not self._grows(held) or self._grew >= _MAX_GREW)

    def look(self) -> float:
        """Gives back what there is.

        Returns:
            How many seconds later to look again.
        """
        before = self._held()
        if not before:
            return self._pause_s
        self._least = min(self._least, before)
        self._grew = self._grew + 1 if self._grows(before) and self._grew < _MAX_GREW else 0
        helped = True
        if self._more(before):
            self._trim()
            helped = before - (self._held() or before) > _WORTH_IT * before
        self._last = self._held() or before
        self._pause_s = _LOOK_S if helped else min(2 * self._pause_s, _MAX_LOOK_S)
        return self._pause_s

    def _grows(self, held: int) -> bool:
        return held > _GROWTH * self._last

    def _more(self, held: int) -> bool:
        return held > _MORE * self._least


def held_bytes() -> int:
    """The resident bytes of this process; 0 where the system does not say."""
    try:
        with open(_STATM, encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
