"""Ending tasks that talk to Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

_AGAIN_S = 0.1


async def end_tasks(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancels ``tasks`` and waits until they are done, whatever their outcome.

    It cancels repeatedly, with doubling pauses, because ``asyncio.wait_for`` (up to Python 3.11, and Redis commands are
    sent inside one) swallows a cancellation that arrives together with its result. Cancelling the caller meanwhile
    takes effect afterwards: tasks left behind would live on.
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
