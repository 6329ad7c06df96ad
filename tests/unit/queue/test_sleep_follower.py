"""A worker brings itself to where it is ordered to be, one move at a time."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from testkit.processes.background import ended
from testkit.waiting import eventually

from services.errors import CheckpointError, OutOfMemory
from services.queue.sleep import AWAKE, MOVING, STARTING, Sleep, SleepFollower, Start, WakeUpGivenUp


class Redis:
    """What is ordered, and what the worker noted."""

    def __init__(self, ordered: int = 0, serving: int = 0) -> None:
        self.ordered, self.serving = ordered, serving
        self.noted: list[int] = []

    async def note(self, state: int) -> tuple[int, int]:
        self.noted.append(state)
        return self.ordered, self.serving if state == AWAKE else 0


class Worker:
    def __init__(self) -> None:
        self.moves: list[object] = []
        self.may = asyncio.Event()
        self.may.set()
        self.fails: list[Exception] = []
        self.given_up = 0

    def give_up(self) -> None:
        self.given_up += 1

    async def fall_asleep(self, level: int) -> None:
        self.moves.append(level)
        await self.may.wait()

    async def wake_up(self) -> None:
        self.moves.append("up")
        await self.may.wait()
        if self.fails:
            raise self.fails.pop()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("LOOK_S", 0.01), ("RETRY_S", 0.01), ("MAX_RETRY_S", 0.05)):
        monkeypatch.setattr(f"services.queue.sleep.{name}", seconds)


@asynccontextmanager
async def following(redis: Redis, worker: Worker, **options: float) -> AsyncIterator[SleepFollower]:
    follower = SleepFollower(
        redis,  # type: ignore[arg-type]
        fall_asleep=worker.fall_asleep,
        wake_up=worker.wake_up,
        give_up=worker.give_up,
        **options,  # type: ignore[arg-type]
    )
    task = asyncio.create_task(follower.run())
    yield follower
    await ended([task])


async def test_it_sleeps_sleeps_more_deeply_and_wakes_once_each() -> None:
    redis, worker = Redis(), Worker()
    async with following(redis, worker) as follower:
        for ordered, moves in ((1, [1]), (1, [1]), (2, [1, 2]), (1, [1, 2]), (0, [1, 2, "up"]), (0, [1, 2, "up"])):
            redis.ordered = ordered
            looks = len(redis.noted)
            await eventually(lambda looks=looks: len(redis.noted) > looks + 4)
            assert worker.moves == moves
            assert follower.level == (max(ordered, 2) if ordered and 2 in moves else ordered)
        assert MOVING in redis.noted


async def test_an_order_that_changes_amid_a_move_is_followed_after_it() -> None:
    redis, worker = Redis(ordered=1), Worker()
    async with following(redis, worker):
        await eventually(lambda: worker.moves == [1])
        worker.may.clear()
        redis.ordered = 0
        await eventually(lambda: worker.moves == [1, "up"])
        redis.ordered = 1
        looks = len(redis.noted)
        await eventually(lambda: len(redis.noted) > looks + 2)
        assert worker.moves == [1, "up"]
        assert redis.noted[-1] == MOVING, "it says that it is on its way"
        worker.may.set()
        await eventually(lambda: worker.moves == [1, "up", 1])
        await eventually(lambda: redis.noted[-1] == 1)


async def test_too_little_memory_to_wake_up_is_no_end() -> None:
    redis, worker = Redis(ordered=2), Worker()
    async with following(redis, worker) as follower:
        await eventually(lambda: follower.level == 2)
        worker.fails = [OutOfMemory("Others have it."), OutOfMemory("Others have it.")]
        redis.ordered = 0
        await eventually(lambda: follower.level == AWAKE)
        assert worker.moves == [2, "up", 2, "up", 2, "up"], "each time it gave back what it had taken"


async def test_any_other_error_ends_the_worker() -> None:
    redis, worker = Redis(ordered=2), Worker()
    worker.fails = [CheckpointError("It has changed.")]
    follower = SleepFollower(redis, fall_asleep=worker.fall_asleep, wake_up=worker.wake_up)  # type: ignore[arg-type]
    task = asyncio.create_task(follower.run())
    await eventually(lambda: follower.level == 2)
    redis.ordered = 0
    with pytest.raises(CheckpointError):
        await task


async def test_experts_wait_for_attention_workers_for_a_while() -> None:
    redis, worker = Redis(ordered=1, serving=3), Worker()
    async with following(redis, worker, wait_s=600.0):
        await eventually(lambda: len(redis.noted) > 20)
        assert worker.moves == []
        redis.serving = 0
        await eventually(lambda: worker.moves == [1])
    redis, worker = Redis(ordered=1, serving=3), Worker()
    async with following(redis, worker, wait_s=0.05):
        await eventually(lambda: worker.moves == [1])


async def test_a_wake_up_that_waits_for_others_is_given_up_where_sleep_is_ordered() -> None:
    redis, worker = Redis(ordered=1), Worker()
    async with following(redis, worker) as follower:
        await eventually(lambda: follower.level == 1)
        worker.may.clear()
        redis.ordered = 0
        await eventually(lambda: worker.moves == [1, "up"])
        asked = worker.given_up
        redis.ordered = 2
        await eventually(lambda: worker.given_up > asked)
        worker.fails = [WakeUpGivenUp()]
        worker.may.set()
        await eventually(lambda: follower.level == 2)
        assert worker.moves == [1, "up", 1, 2], "what the wake-up took is given back, then it sleeps more deeply"


async def test_a_failed_wake_up_holds_nothing_while_the_worker_gives_its_memory_back() -> None:
    class Weights:
        pass

    alive: list[bool] = []

    class Full(Worker):
        held: weakref.ref[Weights] | None = None

        async def wake_up(self) -> None:
            weights = Weights()
            self.held = weakref.ref(weights)
            try:
                raise MemoryError
            except MemoryError as error:
                raise OutOfMemory("Others have it.") from error

        async def fall_asleep(self, level: int) -> None:
            alive.append(self.held is not None and self.held() is not None)
            await super().fall_asleep(level)

    redis, worker = Redis(ordered=1), Full()
    async with following(redis, worker) as follower:
        await eventually(lambda: follower.level == 1)
        redis.ordered = 0
        await eventually(lambda: len(worker.moves) > 2)
    assert len(alive) > 1
    assert not any(alive)


async def test_tries_to_wake_up_become_rarer() -> None:
    redis, worker = Redis(ordered=1), Worker()
    pauses: list[float] = []
    worker.fails = [OutOfMemory("Others have it.") for _ in range(6)]
    async with following(redis, worker) as follower:
        await eventually(lambda: follower.level == 1)
        pause = follower._pause

        async def noted() -> None:
            pauses.append(follower._retry_s)
            await pause()

        follower._pause = noted  # type: ignore[method-assign]
        redis.ordered = 0
        await eventually(lambda: follower.level == AWAKE)
    assert pauses == [0.01, 0.02, 0.04, 0.05, 0.05, 0.05]


async def test_a_worker_that_cannot_serve_yet_sleeps_first() -> None:
    redis, worker = Redis(ordered=0), Worker()
    async with following(redis, worker, begins=2) as follower:
        await eventually(lambda: worker.moves == [2, "up"])
        await eventually(lambda: follower.level == AWAKE)
        assert redis.noted[0] == MOVING


async def test_a_worker_that_starts_amid_a_sleep_waits_for_its_end() -> None:
    redis = Redis(ordered=1)
    start = Start(redis)  # type: ignore[arg-type]
    task = asyncio.create_task(start.until_awake())
    await eventually(lambda: len(redis.noted) > 3)
    assert not task.done()
    assert set(redis.noted[1:]) == {2}, "it holds nothing, which is as deep as it gets"
    redis.ordered = 0
    await task
    noting = asyncio.create_task(start.keep())
    looks = len(redis.noted)
    await eventually(lambda: len(redis.noted) > looks + 3)
    assert set(redis.noted[looks:]) == {MOVING}, "requests wait for it while it loads"
    assert not start.ordered.is_set()
    redis.ordered = 2
    await start.ordered.wait()
    assert start.level == 2
    await ended([noting])


async def test_a_worker_that_starts_says_so_until_it_follows() -> None:
    redis = Redis()
    start = Start(redis)  # type: ignore[arg-type]
    await start.until_awake()
    noting = asyncio.create_task(start.keep())
    await eventually(lambda: len(redis.noted) > 3)
    assert set(redis.noted) == {STARTING}
    await ended([noting])


@pytest.mark.parametrize(
    ("ordered", "states", "sleeping", "behind"),
    [
        (0, [0, 0], False, 0),
        (0, [], False, 0),
        (0, [0, -1, 2], True, 2),
        (0, [0, -2], False, 1),
        (1, [1, -2], True, 1),
        (1, [0, -1, 1, 2], True, 2),
        (2, [2, 1, 2], True, 1),
        (2, [], True, 0),
    ],
)
def test_what_workers_noted_says_how_far_it_is(ordered: int, states: list[int], sleeping: bool, behind: int) -> None:
    found = Sleep(ordered=ordered, notes={str(at): state for at, state in enumerate(states)})
    assert (found.sleeping, found.behind) == (sleeping, behind)
