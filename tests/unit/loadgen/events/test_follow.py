"""When events happen, and what is said of those that fail or never begin."""

from __future__ import annotations

import asyncio
import time

import pytest

from loadgen.events.follow import NOT_REACHED, Following, check
from loadgen.events.host import EventImpossible
from loadgen.events.plan import Planned, planned


class Scripted:
    """A host whose targets say what becomes of them."""

    def __init__(self) -> None:
        self.acted: list[str] = []

    async def find(self, event: Planned) -> str:
        if event.target == "nobody":
            raise EventImpossible("There is no process nobody.")
        return event.target

    async def act(self, event: Planned) -> str:
        self.acted.append(event.target)
        if event.target == "hangs":
            await asyncio.sleep(600)
        if event.target == "broken":
            raise ZeroDivisionError
        return await self.find(event)


async def test_events_happen_in_the_order_of_their_times_and_are_found() -> None:
    host = Scripted()
    events = [planned(text) for text in ("80ms:kill:b", "10ms:kill:a", "20ms:kill:nobody")]
    async with Following(events, host, time.perf_counter()) as following:
        await asyncio.sleep(0.3)
    assert host.acted == ["a", "nobody", "b"]
    found = following.events
    assert [event.target for event in found] == ["a", "nobody", "b"]
    assert [event.error for event in found] == [None, "There is no process nobody.", None]
    for event in found:
        assert event.began_s is not None
        assert event.ended_s is not None
        assert event.at_s <= event.began_s + 1e-3
        assert event.began_s <= event.ended_s


async def test_the_end_of_the_load_ends_them() -> None:
    host = Scripted()
    events = [planned(text) for text in ("0:kill:hangs", "1h:kill:late")]
    async with Following(events, host, time.perf_counter()) as following:
        await asyncio.sleep(0.05)
    assert host.acted == ["hangs"]
    assert [event.error for event in following.events] == ["broken off at the end of the load", NOT_REACHED]
    assert following.events[1].began_s is None


async def test_a_fault_of_this_program_is_not_swallowed() -> None:
    with pytest.raises(ZeroDivisionError):
        async with Following([planned("0:kill:broken")], Scripted(), time.perf_counter()):
            await asyncio.sleep(0.05)


async def test_targets_are_looked_for_before_the_load() -> None:
    await check([planned("1h:kill:a")], Scripted())
    with pytest.raises(EventImpossible, match="no process nobody"):
        await check([planned("1h:kill:a"), planned("1h:kill:nobody")], Scripted())
