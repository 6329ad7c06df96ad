"""Ending tasks: also those that swallow a cancellation, and those that are ended while they end others."""

from __future__ import annotations

import asyncio
import gc

import pytest

from services.queue.tasks import end_tasks


class Stubborn:
    """Goes on after so many cancellations, as a Redis command may after one."""

    def __init__(self, swallowed: int) -> None:
        self._left = swallowed
        self.task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self._left -= 1
                if self._left < 0:
                    raise


async def test_a_task_that_swallows_a_cancellation_is_asked_again() -> None:
    stubborn = Stubborn(2)
    await asyncio.sleep(0)
    await asyncio.wait_for(end_tasks([stubborn.task]), 20)
    assert stubborn.task.cancelled()


async def test_what_a_task_raised_before_is_read(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ValueError

    task = asyncio.ensure_future(fail())
    await asyncio.sleep(0)
    await end_tasks([task])
    del task
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_nothing_is_left_behind_by_one_who_is_ended_meanwhile() -> None:
    stubborn = Stubborn(3)
    later: list[str] = []

    async def role() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await end_tasks([stubborn.task])  # the second cancellation comes while this waits
            later.append("not when cancelled")

    running = asyncio.ensure_future(role())
    await asyncio.sleep(0)
    await asyncio.wait_for(end_tasks([running]), 20)
    assert running.cancelled()
    assert stubborn.task.cancelled(), "it would keep its lease for ever"
    assert later == []


async def test_who_ends_others_is_cancelled_once_they_are_over() -> None:
    stubborn = Stubborn(1)
    await asyncio.sleep(0)
    ending = asyncio.ensure_future(end_tasks([stubborn.task]))
    await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert stubborn.task.done()
