"""What travels: results to gateways, Cancel to workers, wake-ups to the scheduler; and how streams stay bounded."""

from __future__ import annotations

import asyncio
import time

import pytest
from testkit.waiting import LIMIT_S

from services.messages import Cancel, PromptScores, TokenEvent
from services.queue.connect import MAX_BLOCK_MS
from services.queue.gateway_side import FIRST_ID
from services.queue.limits import QueueLimits
from services.queue.scripts import PIECE_BYTES


async def test_a_step_is_one_entry_per_gateway(bench):
    await bench.add_worker("w")
    other = bench.new_gateway("g2")
    mine, mine2 = await bench.run_on("w", bench.request("a"), bench.request("b"))
    await other.admit([bench.request("c", reply_to="g2")], timeout_s=60)
    (theirs,) = await bench.claim()
    await bench.scheduler.assign(bench.epoch, [(theirs, "w")])
    step = [bench.token(mine, 0), bench.token(theirs, 0), bench.token(mine2, 0), bench.token(mine, 1)]
    assert await bench.worker.publish("w", step) == set()
    assert await bench.redis.xlen(bench.keys.results("g1")) == 1
    assert await bench.redis.xlen(bench.keys.results("g2")) == 1
    assert [(e.request_id, e.index) for e in await bench.events()] == [("a", 0), ("a", 1), ("b", 0)]
    assert [(e.request_id, e.index) for e in await bench.events("g2")] == [("c", 0)]


async def test_a_finish_is_an_acknowledgement(bench):
    await bench.add_worker("w")
    (request,) = await bench.run_on("w", bench.request("a"))
    while await bench.scheduler.wait_for_work(0.01):
        pass
    await bench.worker.publish("w", [bench.token(request, 0, finish="length")])
    assert await bench.outstanding("w") == (0, 0)
    assert await bench.live() == 0
    assert await bench.state("a") == "done"
    assert 0 < await bench.redis.pttl(bench.keys.request("a")) <= bench.limits.tombstone_s * 1000
    assert await bench.redis.zcard(bench.keys.leases) == 0
    assert await bench.scheduler.wait_for_work(0.01)
    assert await bench.worker.publish("w", [bench.token(request, 1)]) == {"a"}


async def test_stale_results_are_refused_and_written_nowhere(bench):
    await bench.add_worker("w")
    await bench.add_worker("w2")
    (request,) = await bench.run_on("w", bench.request("a"))
    assert await bench.worker.publish("w2", [bench.token(request, 0)]) == {"a"}
    other = TokenEvent(request_id="a", attempt=2, index=0, token_id=1)
    assert await bench.worker.publish("w", [other]) == {"a"}
    unknown = TokenEvent(request_id="nope", attempt=1, index=0, token_id=1)
    assert await bench.worker.publish("w", [unknown, bench.token(request, 0)]) == {"nope"}
    await bench.gateway.cancel(["a"])
    assert await bench.worker.publish("w", [bench.token(request, 1)]) == {"a"}
    assert [event.index for event in await bench.events()] == [0]


@pytest.mark.parametrize("queue_limits", [QueueLimits(max_requests=5000)])
async def test_a_step_of_1200_requests_fits(bench):
    await bench.add_worker("w", tokens=10**9, requests=5000)
    await bench.admit(*(bench.request() for _ in range(1200)))
    claimed = await bench.claim(1200)
    assert len(claimed) == 1200
    assert all(await bench.scheduler.assign(bench.epoch, [(request, "w") for request in claimed]))
    assert await bench.worker.heartbeat("w", {request.id: 1 for request in claimed} | {"x": 1}) == {"x"}
    stale = TokenEvent(request_id="x", attempt=1, index=0, token_id=1)
    assert await bench.worker.publish("w", [*(bench.token(request, 0) for request in claimed), stale]) == {"x"}
    assert len(await bench.events()) == 1200
    assert await bench.gateway.cancel([request.id for request in claimed]) == 1200
    assert await bench.outstanding("w") == (0, 0)


async def test_cancel_reaches_the_worker_and_frees_its_credit(bench):
    await bench.add_worker("w")
    await bench.run_on("w", bench.request("a"))
    last_id, _ = await bench.worker.read_inbox("w", FIRST_ID, 0)
    reading = asyncio.create_task(bench.worker.read_inbox("w", last_id, MAX_BLOCK_MS))
    await asyncio.sleep(0.02)
    start = time.monotonic()
    assert await bench.gateway.cancel(["a", "unknown"]) == 1
    _, messages = await reading
    assert time.monotonic() - start < MAX_BLOCK_MS / 2000
    assert messages == [Cancel("a", 1)]
    assert await bench.outstanding("w") == (0, 0)
    assert await bench.gateway.cancel(["a"]) == 0
    assert await bench.events() == []


async def test_a_gateway_cancels_only_its_own(bench):
    await bench.admit(bench.request("a"))
    assert await bench.new_gateway("g2").cancel(["a"]) == 0
    assert await bench.order() == ["a"]


async def test_streams_are_trimmed_behind_their_reader(bench):
    await bench.add_worker("w")
    (request,) = await bench.run_on("w", bench.request("a", max_tokens=1000))
    last_id, seen = FIRST_ID, []
    for index in range(400):
        await bench.worker.publish("w", [bench.token(request, index)])
        if index % 4 == 3:
            last_id, events = await bench.gateway.follow(last_id, 0)
            seen += [event.index for event in events]
    assert seen == list(range(400))
    assert await bench.redis.xlen(bench.keys.results("g1")) <= 100


LAG = pytest.mark.parametrize("queue_limits", [QueueLimits(lag_s=0.05, lag_bytes=0)])


class Lags:
    """Two gateways that say what they have handled with each reading, and a worker that publishes to both."""

    def __init__(self, bench) -> None:
        self._bench = bench
        self.gateways = {name: bench.new_gateway(name) for name in ("g1", "g2")}
        self.handled = dict.fromkeys(self.gateways, FIRST_ID)

    async def start(self) -> None:
        await self._bench.add_worker("w")
        await self.gateways["g2"].admit([self._bench.request("b", reply_to="g2")], timeout_s=60)
        found = await self._bench.run_on("w", self._bench.request("a"))
        self._requests = {request.id: request for request in found}

    async def publish(self, index: int) -> dict[str, str]:
        """A token for each gateway; which of them lag."""
        await self._bench.worker.publish("w", [self._bench.token(self._requests[name], index) for name in "ab"])
        return self._bench.worker.lagging

    async def read(self, name: str) -> str:
        """What is new, which is not handled before the next reading; its last id."""
        self.handled[name], _ = await self.gateways[name].follow(self.handled[name], 0)
        await asyncio.sleep(0.01)  # what was handled is reported by another task
        return self.handled[name]


@LAG
async def test_a_worker_learns_which_gateways_lag(bench):
    """By what they have not handled, not by what they have not read."""
    lags = Lags(bench)
    await lags.start()
    assert await lags.publish(0) == {}
    first = await lags.read("g1")
    await lags.read("g1")  # g1 has handled its first entry, g2 has read it
    theirs = await lags.read("g2")
    await asyncio.sleep(0.06)
    assert await lags.publish(1) == {}  # g2 has never said what it handles
    await lags.read("g2")
    await asyncio.sleep(0.06)
    assert await lags.publish(2) == {"g1": first, "g2": theirs}
    for _ in range(2):
        await lags.read("g1")
    await bench.worker.look_at_lag()
    assert bench.worker.lagging == {"g2": theirs}
    for _ in range(2):
        await lags.read("g2")
    await bench.worker.look_at_lag()
    assert bench.worker.lagging == {}


@LAG
async def test_a_gateway_that_had_nothing_to_read_for_long_does_not_lag(bench):
    lags = Lags(bench)
    await lags.start()
    await lags.publish(0)
    for name in ("g1", "g2", "g1", "g2"):
        await lags.read(name)
    await asyncio.sleep(0.06)
    assert await lags.publish(1) == {}


@pytest.mark.parametrize("queue_limits", [QueueLimits(lag_s=0.05, lag_bytes=100_000)])
async def test_a_gateway_that_has_little_to_handle_does_not_lag(bench):
    lags = Lags(bench)
    await lags.start()
    await lags.publish(0)
    for name in ("g1", "g2", "g1", "g2"):
        await lags.read(name)  # the second time nothing is new: what was handled is reported
    await lags.publish(1)
    await asyncio.sleep(0.06)
    assert await lags.publish(2) == {}
    part = PromptScores(start=1, width=0, logprobs=bytes(100_000))
    await bench.worker.publish("w", [TokenEvent(request_id="a", attempt=1, index=3, scores=part)])
    assert set(bench.worker.lagging) == {"g1"}


@LAG
@pytest.mark.parametrize("wrong", ["position", "type"])
async def test_whatever_is_wrong_with_a_position_tokens_are_published(bench, wrong):
    lags = Lags(bench)
    await lags.start()
    await lags.publish(0)
    if wrong == "position":
        await bench.redis.set(bench.keys.handled("g1"), "no id")
    else:
        await bench.redis.lpush(bench.keys.handled("g1"), "a list")
    await asyncio.sleep(0.06)
    assert await lags.publish(1) == {}
    assert [event.index for event in await bench.events()] == [0, 1]


@pytest.mark.parametrize("queue_limits", [QueueLimits(stream_entries=100)])
async def test_streams_that_nobody_reads_are_bounded_and_expire(bench):
    await bench.add_worker("w")
    (request,) = await bench.run_on("w", bench.request("a", max_tokens=10_000))
    for index in range(500):
        await bench.worker.publish("w", [bench.token(request, index)])
    assert await bench.redis.xlen(bench.keys.results("g1")) <= 300
    for key in (bench.keys.results("g1"), bench.keys.inbox("w"), bench.keys.worker("w"), bench.keys.held("w")):
        assert 0 < await bench.redis.pttl(key) <= bench.limits.stream_s * 1000


async def test_a_full_server_is_emptied_by_who_reads_its_streams(bench):
    await bench.add_worker("w")
    (request,) = await bench.run_on("w", bench.request("a", max_tokens=1000))
    for index in range(200):
        await bench.worker.publish("w", [bench.token(request, index)])
    await bench.redis.config_set("maxmemory", 1)
    try:
        assert [event.index for event in await bench.events()] == list(range(200))
        async with asyncio.timeout(LIMIT_S):
            last_id = bench.read_to("g1")
            while await bench.redis.xlen(bench.keys.results("g1")) > 1:
                await bench.gateway.follow(last_id, 0)
                await asyncio.sleep(0.01)
    finally:
        await bench.redis.config_set("maxmemory", 0)


async def test_follow_wakes_at_once_and_returns_empty_after_its_time(bench):
    await bench.add_worker("w")
    (request,) = await bench.run_on("w", bench.request("a"))
    start = time.monotonic()
    assert await bench.gateway.follow(FIRST_ID, 30) == (FIRST_ID, [])
    assert 0.02 < time.monotonic() - start < 1
    following = asyncio.create_task(bench.gateway.follow(FIRST_ID, MAX_BLOCK_MS))
    await asyncio.sleep(0.02)
    await bench.worker.publish("w", [bench.token(request, 0)])
    _, events = await asyncio.wait_for(following, MAX_BLOCK_MS / 2000)
    assert len(events) == 1


async def test_the_scheduler_is_woken(bench):
    while await bench.scheduler.wait_for_work(0.01):
        pass
    waiting = asyncio.create_task(bench.scheduler.wait_for_work(MAX_BLOCK_MS / 1000))
    await asyncio.sleep(0.02)
    await bench.admit(bench.request())
    assert await asyncio.wait_for(waiting, MAX_BLOCK_MS / 2000)
    await bench.scheduler.release(bench.epoch, await bench.claim())
    assert not await bench.scheduler.wait_for_work(0.01)  # its own release is no news
    await bench.add_worker("w")
    assert await bench.scheduler.wait_for_work(0.01)


async def measured(bench) -> int:
    """How often scripts measured a stream."""
    stats = await bench.redis.info("commandstats")
    return sum(each["calls"] for name, each in stats.items() if name.startswith("cmdstat_memory"))


async def test_a_stream_is_measured_at_each_64th_entry_and_each_large_one(bench):
    """To measure a long one takes as long as many writes."""
    await bench.add_worker("w")
    (request,) = await bench.run_on("w", bench.request("a", max_tokens=1000))
    before = await measured(bench)
    for index in range(130):
        await bench.worker.publish("w", [bench.token(request, index)])
    assert await measured(bench) - before == 2
    part = PromptScores(start=1, width=0, logprobs=bytes(70_000))
    large = TokenEvent(request_id="a", attempt=1, index=130, scores=part)
    await bench.worker.publish("w", [large])
    assert await measured(bench) - before == 3


async def test_the_ends_of_a_dead_gateways_requests_are_one_entry(bench):
    await bench.add_worker("w")
    await bench.run_on("w", *(bench.request() for _ in range(5)))
    await bench.admit(*(bench.request() for _ in range(20)))
    await bench.expire_lease(bench.keys.gateways, "g1")
    assert (await bench.scheduler.reap(bench.epoch)).cancelled == 25
    assert sorted(bench.ends(await bench.events())) == sorted((f"r{i}", "cancelled") for i in range(25))
    assert await bench.redis.xlen(bench.keys.results("g1")) == 1
    assert await bench.outstanding("w") == (0, 0)


async def test_one_requests_backlog_of_scores_takes_several_entries_and_stays_in_order(bench):
    """As one it would push out what others have in the stream, and Redis would serve nobody meanwhile."""
    await bench.add_worker("w")
    request, other = await bench.run_on("w", bench.request("a"), bench.request("b"))
    await bench.worker.publish("w", [bench.token(other, 0)])
    parts = [PromptScores(start=1 + 50_000 * number, width=0, logprobs=bytes(200_000)) for number in range(30)]
    backlog = [TokenEvent(request_id="a", attempt=1, index=0, scores=part) for part in parts]
    await bench.worker.publish("w", [*backlog, bench.token(request, 0, finish="stop")])
    entries = await bench.redis.xrange(bench.keys.results("g1"))
    assert max(sum(map(len, fields.values())) for _, fields in entries) <= PIECE_BYTES + 1024
    events = await bench.events()
    assert [event.request_id for event in events] == ["b"] + ["a"] * 31
    assert [event.scores for event in events[1:-1]] == parts
    assert bench.ends(events) == [("a", "stop")]


async def test_a_backlog_that_is_cut_unevenly_loses_no_part(bench):
    """A reader takes the fields of an entry by their names, which are the requests' ids."""
    await bench.add_worker("w")
    (request,) = await bench.run_on("w", bench.request("a"))
    sizes = [300_000] * 4 + [80_000]
    parts = [PromptScores(start=1 + 75_000 * i, width=0, logprobs=bytes(size)) for i, size in enumerate(sizes)]
    backlog = [TokenEvent(request_id="a", attempt=1, index=0, scores=part) for part in parts]
    await bench.worker.publish("w", [*backlog, bench.token(request, 0), bench.token(request, 1)])
    events = await bench.events()
    assert [event.scores for event in events[:5]] == parts
    assert [event.index for event in events[5:]] == [0, 1]


async def test_the_rest_of_a_backlog_is_refused_once_its_attempt_is_over(bench):
    await bench.add_worker("w")
    await bench.run_on("w", bench.request("a"))
    scores = PromptScores(start=1, width=0, logprobs=bytes(800_000))
    event = TokenEvent(request_id="a", attempt=1, index=0, scores=scores)
    await bench.gateway.cancel(["a"])
    assert await bench.worker.publish("w", [event] * 3) == {"a"}
    assert await bench.events() == []
