"""Work that blocks, on a thread that keeps no process alive.

A process that leaves such work behind must not let its interpreter end: that stops each thread where it next asks for
the GIL, by an unwinding that torch's C++ does not let through, and so aborts the process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


class _Work(threading.Thread):
    """Tells such threads from others."""


async def in_daemon(name: str, work: Callable[[], T]) -> T:
    """``work()`` on a daemon thread. Cancelling it leaves the thread behind: neither the loop nor the process waits."""
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
        with suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            loop.call_soon_threadsafe(finish, result, failure)

    _Work(target=run, name=name, daemon=True).start()
    return await done


def left_behind() -> bool:
    """Whether work goes on that nobody waits for: leave with ``os._exit``."""
    return any(isinstance(thread, _Work) for thread in threading.enumerate())
