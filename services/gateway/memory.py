"""Gives the memory of finished work back to the machine."""

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
"""The share of its memory that a call has to free for another call soon."""
_GROWTH = 1.05
"""A process grows when it holds more than this multiple of its memory at the last look."""
_MAX_GREW = 6
"""After this many looks in a row at a growing process its garbage is collected all the same."""
_ARENA_MAX = -8
"""M_ARENA_MAX of malloc.h."""
_STATM = "/proc/self/statm"


async def give_back_memory() -> None:
    """Gives free memory back to the machine, repeatedly, until cancelled.

    After many clients Python's free lists keep objects in each of its arenas, and glibc keeps free pages. A garbage
    collection empties the lists: about 0.1 s of the event loop for a thousand streams, so it is rare while the process
    grows. A call of up to 0.05 s in a thread returns the pages; larger allocations of other threads wait for it. The
    function returns at once where the C library has no such call, or the system reports no process's memory.
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
        except (RuntimeError, MemoryError) as error:  # no thread, or no memory: streams go on all the same
            log.warning("cannot return free memory to the system: %s", error)
            pause_s = _MAX_LOOK_S


def keep_one_heap() -> None:
    """Makes new threads allocate from the main heap: glibc keeps up to 64 MiB at the end of any other heap. Does
    nothing where the C library has no such call."""
    if choose := getattr(ctypes.CDLL(None), "mallopt", None):
        choose(_ARENA_MAX, 1)


def collect_seldom() -> None:
    """Makes collections of long-lived objects rare: with 4,000 streams one blocks the event loop for 0.4 s, and hardly
    any garbage is in cycles. :func:`give_back_memory` collects later; so does Python once there are 1.4 million more
    containers than at its last collection. Objects that exist now are never looked through again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 200)


class MemoryGiver:
    """Calls ``trim`` while the process holds more than its minimum so far: often where that helps, rarely where the
    memory is in use. ``held`` returns how many bytes the process holds, 0 where it cannot."""

    def __init__(self, held: Callable[[], int], trim: Callable[[], object]) -> None:
        self._held = held
        self._trim = trim
        self._least = self._last = held()
        self._grew = 0  # looks in a row
        self._pause_s = _LOOK_S

    @property
    def may_have_free(self) -> bool:
        """Whether the process holds more than its minimum, and does not grow or has grown for many looks: while clients
        still come nothing is free, but growing garbage looks the same."""
        held = self._held()
        return self._more(held) and (not self._grows(held) or self._grew >= _MAX_GREW)

    def look(self) -> float:
        """Gives back what is free. Returns the seconds until the next look."""
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
    """Returns the resident bytes of this process; 0 where the system does not say."""
    try:
        with open(_STATM, encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
