"""What anybody may ask for is made once in a while, whoever asks how often."""

from __future__ import annotations

import asyncio

import pytest

from services.gateway import recent as recent_module
from services.gateway.recent import Recent


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


class Maker:
    """Counts, and can be made to wait or to fail."""

    def __init__(self) -> None:
        self.made = 0
        self.go = asyncio.Event()
        self.go.set()
        self.failure: Exception | None = None

    async def make(self) -> int:
        self.made += 1
        await self.go.wait()
        if self.failure is not None:
            raise self.failure
        return self.made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(recent_module, "time", found)
    return found


async def test_it_is_made_for_each_who_asks_now_and_then_and_not_for_each_of_many(clock):
    maker = Maker()
    recent = Recent(maker.make, 4.0)
    assert [await recent.get() for _ in range(100)][-1] == maker.made == 5
    for second in range(1, 11):
        for _ in range(100):
            clock.now += 0.01
            found = await recent.get()
        assert 0 <= maker.made - (5 + 4 * second) <= 1
        assert found == maker.made
    clock.now += 0.3
    assert await recent.get() == maker.made
    made = maker.made
    for _ in range(10):
        clock.now += 1
        await recent.get()
    assert maker.made == made + 10


async def test_all_who_ask_while_it_is_made_get_the_same_and_one_that_leaves_takes_it_from_nobody(clock):
    maker = Maker()
    maker.go.clear()
    recent = Recent(maker.make, 4.0)
    asked = [asyncio.create_task(recent.get()) for _ in range(5)]
    await asyncio.sleep(0)
    clock.now += 60  # it takes long
    asked.append(asyncio.create_task(recent.get()))
    await asyncio.sleep(0)
    asked[0].cancel()
    await asyncio.sleep(0)
    maker.go.set()
    assert await asyncio.gather(*asked[1:]) == [1] * 5


async def test_a_failure_reaches_all_who_wait_and_is_kept_no_longer_than_a_result(clock):
    maker = Maker()
    maker.failure = OSError("away")
    recent = Recent(maker.make, 4.0)
    found = await asyncio.gather(*(recent.get() for _ in range(3)), return_exceptions=True)
    assert [str(error) for error in found] == ["away"] * 3
    assert maker.made == 1
    for _ in range(100):
        with pytest.raises(OSError, match="away"):
            await recent.get()
    assert maker.made == 5
    maker.failure = None
    clock.now += 0.25
    assert await recent.get() == 6
