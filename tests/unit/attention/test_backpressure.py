"""Backpressure: a worker waits for gateways that lag and get on, and for no others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from testkit.models.stepping import SteppingEngine
from testkit.processes.roles import Deployment
from testkit.queue.client import Client, check, complete, finish

from services.attention import publisher
from services.attention.publisher import LONGEST_S, LOOK_S, REMEMBERED_S, STALLED_S, Backpressure
from services.errors import QueueUnavailable


class Report:
    """What looks one after the other find; the last stays."""

    def __init__(self) -> None:
        self.lagging: dict[str, str] = {}
        self.looks = 0
        self.script()

    def script(self, *found: dict[str, str]) -> None:
        self._found: Iterator[dict[str, str]] = iter(found)

    async def look_at_lag(self) -> None:
        self.looks += 1
        self.lagging = next(self._found, self.lagging)


class Rig:
    """A backpressure whose time is that of its sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.held, self.report = 100.0, list[bool](), Report()
        self.backpressure = Backpressure(self.report, self.held.append, clock=lambda: self.now)
        monkeypatch.setattr(publisher.asyncio, "sleep", self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.now += seconds

    async def wait(self, lagging: dict[str, str], *found: dict[str, str]) -> float:
        """After a call that found ``lagging``, where looks after it find ``found``."""
        self.report.lagging = lagging
        self.report.script(*found)
        return await self.backpressure.wait()


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


async def test_where_no_gateway_lags_nobody_waits_or_looks(rig: Rig) -> None:
    assert await rig.wait({}) == 0
    assert (rig.held, rig.report.looks) == ([], 0)


async def test_the_engine_is_held_until_the_gateway_has_caught_up(rig: Rig) -> None:
    assert await rig.wait({"g": "1-0"}, {"g": "2-0"}, {"g": "3-0"}, {}) == pytest.approx(3 * LOOK_S)
    assert rig.held == [True, False]


async def test_one_that_gets_on_is_waited_for_so_long_at_most(rig: Rig) -> None:
    gets_on = [{"g": f"{number}-0"} for number in range(1, 1000)]
    assert await rig.wait(*gets_on) == pytest.approx(LONGEST_S, abs=2 * LOOK_S)
    assert rig.held == [True, False]
    assert await rig.wait(*gets_on[500:]) == pytest.approx(LONGEST_S, abs=2 * LOOK_S)


async def test_one_that_stands_still_is_waited_for_once(rig: Rig) -> None:
    """Until it gets on: it may be dead, and the others' tokens must not wait for it. A call that writes nothing to it
    says nothing of it.
    """
    waits = [await rig.wait({"g": "1-0"}) for _ in range(4)]
    assert sum(waits) == pytest.approx(STALLED_S, abs=4 * LOOK_S)
    assert max(waits) < LONGEST_S + 2 * LOOK_S
    for _ in range(10):
        rig.now += 0.01
        assert await rig.wait({"g": "1-0"}) == 0
        assert await rig.wait({}) == 0
    assert await rig.wait({"g": "2-0"}) > 0


async def test_a_gateway_that_stands_still_does_not_end_the_wait_for_another(rig: Rig) -> None:
    still = {"dead": "1-0"}
    while await rig.wait(still):
        pass
    assert await rig.wait(still | {"g": "5-0"}, still | {"g": "6-0"}, still) == pytest.approx(2 * LOOK_S)


async def test_what_is_remembered_of_gateways_that_are_gone_is_forgotten(rig: Rig) -> None:
    for number in range(100):
        await rig.wait({f"g{number}": "1-0"})
        rig.now += REMEMBERED_S / 10
    assert len(rig.backpressure._seen) <= 10


async def test_a_wait_that_is_cancelled_lets_the_engine_go() -> None:
    report = Report()
    held: list[bool] = []
    report.lagging = {"g": "1-0"}
    waiting = asyncio.create_task(Backpressure(report, held.append).wait())
    while not held:
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert held == [True, False]


async def test_once_the_engine_has_ended_nobody_waits(rig: Rig) -> None:
    rig.backpressure.end()
    assert await rig.wait({"g": "1-0"}) == 0


async def test_redis_that_is_away_ends_the_wait(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away() -> None:
        raise QueueUnavailable("away")

    monkeypatch.setattr(rig.report, "look_at_lag", away)
    assert await rig.wait({"g": "1-0"}) == pytest.approx(LOOK_S)
    assert rig.held == [True, False]


@pytest.mark.parametrize("deployment", [{"lag_bytes": 0}], indirect=True)
async def test_a_worker_computes_no_more_than_a_slow_gateway_takes(deployment: Deployment, client: Client) -> None:
    """Of an engine that makes a token each millisecond, and a gateway that takes some hundreds a second."""
    worker = deployment.worker(engine=SteppingEngine(step_s=0.001), buffer_tokens=100_000)
    client.rest_s = 0.1
    [stream] = await client.submit([1], max_tokens=2500)
    ahead = 0
    while len(stream.tokens) < 1000:
        await asyncio.sleep(0.01)
        ahead = max(ahead, worker.engine.steps - len(stream.tokens))
    assert ahead < 800
    assert sum(worker.held_back) > 0.2
    client.rest_s = 0
    await complete([stream], 2500)


@pytest.mark.parametrize("deployment", [{"lag_bytes": 0}], indirect=True)
async def test_a_gateway_that_stands_still_stops_nobody_elses_tokens(deployment: Deployment, client: Client) -> None:
    worker = deployment.worker(engine=SteppingEngine(step_s=0.005))
    stopped = await deployment.client()
    [lost] = await stopped.submit([1], max_tokens=5000)
    [stream] = await client.submit([2], max_tokens=300)
    while len(lost.tokens) < 20:
        await asyncio.sleep(0.01)
    stopped.rest_s = 60
    await finish([stream], timeout_s=20)
    check([stream], 300)
    assert 0 < sum(worker.held_back) < 2
    await client.queue.cancel([lost.request.id])
