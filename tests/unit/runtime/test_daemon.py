"""Blocking work on a thread next to the loop: results, errors, and being left behind."""

from __future__ import annotations

import asyncio
import threading

import pytest
from testkit.waiting import until

from services.runtime import in_daemon, left_behind


async def test_results_and_errors_come_back() -> None:
    assert await in_daemon("work", lambda: threading.current_thread().daemon)
    with pytest.raises(ZeroDivisionError):
        await in_daemon("work", lambda: 1 // 0)


async def test_a_cancelled_wait_leaves_the_work_behind() -> None:
    go = threading.Event()
    ended = threading.Event()

    def work() -> None:
        go.wait(20)
        ended.set()

    waiting = asyncio.create_task(in_daemon("work", work))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not ended.is_set()
    assert left_behind()
    go.set()
    assert await asyncio.to_thread(ended.wait, 20)
    await asyncio.to_thread(until, lambda: not left_behind(), "its thread has ended")
