"""Blocking work on a daemon thread, which does not keep the process alive.

A process that leaves such work behind has to end by ``os._exit``: when the interpreter ends it unwinds each thread that
asks for the GIL, and torch's C++ frames turn that into an abort.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


class _Work(threading.Thread):
    """Marks these threads among all others."""


async def in_daemon(name: str, work: Callable[[], T]) -> T:
    """Run ``work()`` on a daemon thread. Cancelling leaves the thread behind: neither loop nor process waits for it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: BaseException | None) -> None:
        if not done.done():
            done.set_exception(error) if error else done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  raised again where the work is awaited
            failure = error
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(finish, result, failure)

    _Work(target=run, name=name, daemon=True).start()
    return await done


def left_behind() -> bool:
    """Return whether work goes on that nobody waits for, so that the process has to end by ``os._exit``."""
    return any(isinstance(thread, _Work) for thread in threading.enumerate())
