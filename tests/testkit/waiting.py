"""Waiting for events: one generous limit for all, and a failure that says what was waited for and what was there."""

from __future__ import annotations

import asyncio
import functools
import inspect
import reprlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

LIMIT_S = 60.0
"""Nothing that comes at all takes so long, on a machine with busy neighbours neither."""


def until(condition: Callable[[], Any], what: str = "", *, limit_s: float = LIMIT_S, every_s: float = 0.005) -> Any:
    """Return what ``condition`` answers as soon as that is true; fail with ``what`` after ``limit_s``."""
    end = time.monotonic() + limit_s
    while True:
        late = time.monotonic() > end  # before the last look: this thread may have been kept waiting itself
        if answer := condition():
            return answer
        assert not late, in_vain(condition, what, limit_s, answer)
        time.sleep(every_s)


async def eventually(
    condition: Callable[[], Any], what: str = "", *, limit_s: float = LIMIT_S, every_s: float = 0.005
) -> Any:
    """:func:`until` for an event loop; ``condition`` may be a coroutine function."""
    end = time.monotonic() + limit_s
    while True:
        late, answer = time.monotonic() > end, condition()
        if isinstance(answer, Awaitable):
            async with asyncio.timeout(2 * limit_s):
                answer = await answer
        if answer:
            return answer
        assert not late, in_vain(condition, what, limit_s, answer)
        await asyncio.sleep(every_s)


def in_vain(condition: Callable[[], Any], what: str, limit_s: float, answer: object) -> str:
    """Where no words were given, the condition's lines and what the names in it stand for."""
    said = what or _source(condition)
    return f"waited {limit_s:g} s in vain: {said}; the last answer was {reprlib.repr(answer)}{_names(condition)}"


def _source(condition: Callable[[], Any]) -> str:
    try:
        return " ".join(inspect.getsource(condition).split())
    except (OSError, TypeError):  # a bound method of C, a partial
        return repr(condition)


def _names(condition: Callable[[], Any]) -> str:
    inner = condition.func if isinstance(condition, functools.partial) else condition
    if not inspect.isfunction(inner):
        return ""
    return "".join(
        f", {name} = {reprlib.repr(value)}" for name, value in inspect.getclosurevars(inner).nonlocals.items()
    )
