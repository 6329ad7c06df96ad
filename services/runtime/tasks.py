"""Waiting for several tasks at once, and ending them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
_AGAIN_S = 0.1


async def first_done(*works: Awaitable[Any]) -> list[Any]:
    """Run ``works`` at the same time until one of them ends, then cancel and await the others.

    A future among ``works`` is only waited for: whoever made it also ends it.

    Returns:
        The result of each that has ended, None for the others.

    Raises:
        What the first in order of those that have ended raised.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return [task.result() if task.done() else None for task in tasks]
    finally:
        await end_tasks(task for task, work in zip(tasks, works, strict=True) if task is not work)


async def unless_stopped(work: Awaitable[T], stop: asyncio.Event) -> T | None:
    """Return the result of ``work``; None, with ``work`` cancelled, if ``stop`` is set first."""
    result: T | None = (await first_done(work, stop.wait()))[0]
    return result


async def end_tasks(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel ``tasks`` and wait until they are over, whatever they ended with.

    Cancelling is repeated, at growing intervals: ``asyncio.wait_for`` (up to Python 3.11, and Redis commands are sent
    inside one) swallows a cancellation that arrives together with its result. A caller who is cancelled meanwhile gets
    the CancelledError only once all ``tasks`` are over, so that none of them lives on.
    """
    pending = set(tasks)
    timeout_s, cancelled = _AGAIN_S, False
    while pending:
        for task in pending:
            task.cancel()  # does nothing to one that is done
        try:
            await asyncio.wait(pending, timeout=timeout_s)
            timeout_s *= 2
        except asyncio.CancelledError:
            cancelled = True
        done = {task for task in pending if task.done()}
        pending -= done
        for task in done:
            if not task.cancelled():
                task.exception()  # read, or asyncio reports it as never retrieved
    if cancelled:
        raise asyncio.CancelledError


def forget_frames(error: BaseException) -> None:
    """Let ``error`` and what it came from hold no local variables of who raised them: they may be large."""
    found: BaseException | None = error
    while found is not None:
        found.__traceback__ = None
        found = found.__cause__ or found.__context__
