"""Waiting for the first of several tasks, and ending tasks, even those that swallow a cancellation."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from services.runtime.tasks import end_tasks, first_done, unless_stopped


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


async def soon(result: str) -> str:
    await asyncio.sleep(0.01)
    return result


async def fails(error: Exception) -> None:
    await asyncio.sleep(0.01)
    raise error


async def test_the_first_to_end_gives_its_result_and_the_others_are_over() -> None:
    stubborn = Stubborn(1)

    async def waits() -> None:
        await stubborn.task

    assert await asyncio.wait_for(first_done(waits(), soon("here"), asyncio.Event().wait()), 20) == [None, "here", None]
    assert stubborn.task.done()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_of_several_errors_the_first_in_order_is_raised() -> None:
    with pytest.raises(KeyError):
        await first_done(asyncio.Event().wait(), fails(KeyError()), fails(ValueError()))
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_future_is_only_waited_for() -> None:
    going: asyncio.Future[Any] = asyncio.ensure_future(asyncio.sleep(60))
    assert await first_done(going, soon("here")) == [None, "here"]
    assert not going.done()
    await end_tasks([going])


async def test_who_waits_and_is_cancelled_leaves_nothing_running() -> None:
    waiting = asyncio.ensure_future(first_done(soon("never"), asyncio.Event().wait()))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_work_ends_when_it_is_done_or_when_stop_is_set() -> None:
    stop = asyncio.Event()
    assert await unless_stopped(soon("here"), stop) == "here"
    asyncio.get_running_loop().call_later(0.01, stop.set)
    assert await unless_stopped(asyncio.sleep(60, "never"), stop) is None
    with pytest.raises(ValueError, match="even so"):
        await unless_stopped(fails_now(), stop)


async def fails_now() -> None:
    raise ValueError("even so")
