"""What a gateway makes of its queue, whatever happens to attempts, events, records and leases.

The same over Redis and over the scripted queue, by which the gateway's own tests go.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from msgspec import structs
from testkit.queue.gateway import Gateway
from testkit.queue.scripted import ScriptedQueue

from services.errors import AttemptsExhausted
from services.gateway.job import Job
from services.gateway.table import MAX_MISSED
from services.messages import GenerateRequest, SamplingParams, TokenEvent
from services.queue.gateway_side import Unreadable

ids = itertools.count()


class Scripted:
    """Scheduler, worker and faults over the scripted queue."""

    def __init__(self) -> None:
        self.last = ScriptedQueue("g1")
        self.records = self.last.records

    def queue(self, name: str) -> ScriptedQueue:
        if name not in self.last.gateways:
            ScriptedQueue(name, other=self.last)
        return self.last.gateways[name]

    async def run(self) -> list[GenerateRequest]:
        """What the worker gets of what waits."""
        waiting = [record for record in self.records.values() if record.state == "queued"]
        for record in waiting:
            record.state = "running"
        return [record.request for record in waiting]

    async def publish(self, *events: TokenEvent) -> set[str]:
        return self.last.publish(*events)

    async def lose(self, request_id: str) -> None:
        self.last.lose(request_id)

    async def forget(self, request_id: str) -> None:
        """Redis does, and may still have the request's events."""
        del self.records[request_id]

    async def change(self, request_id: str, field: str, value: str) -> None:
        record = self.records[request_id]
        record.change(**{"state": record.state, field: value})

    async def unread(self, name: str) -> None:
        """The newest entry of a gateway's stream is gone."""
        self.queue(name).events.pop()

    async def garble(self, name: str, request_id: str) -> None:
        self.queue(name).emit(Unreadable(request_id, "not msgpack"))

    async def send(self, name: str, event: TokenEvent) -> None:
        """An event of a request that the queue does not know."""
        self.queue(name).emit(event)

    async def bury(self, name: str) -> None:
        """The gateway counts as dead."""
        for record in list(self.records.values()):
            if record.owner == name and record.state != "done":
                self.last.end(record.request.id)

    async def state(self, request_id: str) -> str:
        return str(self.records[request_id].state)


class Redis:
    """The same over Redis."""

    def __init__(self, bench: Any) -> None:
        self.bench = bench

    def queue(self, name: str) -> Any:
        return self.bench.new_gateway(name)

    async def run(self) -> list[GenerateRequest]:
        await self.bench.add_worker("w")
        claimed = [claim.request for claim in await self.bench.scheduler.claim(self.bench.epoch, 100)]
        assert all(await self.bench.scheduler.assign(self.bench.epoch, [(request, "w") for request in claimed]))
        return [await self.bench.whole(request) for request in claimed]

    async def publish(self, *events: TokenEvent) -> set[str]:
        return await self.bench.worker.publish("w", events)

    async def lose(self, request_id: str) -> None:
        await self.bench.expire_lease(self.bench.keys.leases, request_id)
        assert (await self.bench.scheduler.reap(self.bench.epoch)).lost == 1

    async def forget(self, request_id: str) -> None:
        await self.bench.redis.delete(self.bench.keys.request(request_id))

    async def change(self, request_id: str, field: str, value: str) -> None:
        await self.bench.redis.hset(self.bench.keys.request(request_id), field, value)

    async def unread(self, name: str) -> None:
        stream = self.bench.keys.results(name)
        ((newest, _),) = await self.bench.redis.xrevrange(stream, count=1)
        await self.bench.redis.xdel(stream, newest)

    async def garble(self, name: str, request_id: str) -> None:
        await self.bench.redis.xadd(self.bench.keys.results(name), {request_id: b"\xc1"})

    async def send(self, name: str, event: TokenEvent) -> None:
        from services.messages import encode

        await self.bench.redis.xadd(self.bench.keys.results(name), {event.request_id: encode([event])})

    async def bury(self, name: str) -> None:
        await self.bench.expire_lease(self.bench.keys.gateways, name)
        assert (await self.bench.scheduler.reap(self.bench.epoch)).gateways == 1

    async def state(self, request_id: str) -> str:
        return await self.bench.state(request_id)


class Answer:
    """A request at gateway ``name``, step by step."""

    def __init__(self, room: Any, gateway: Gateway, name: str, job: Job) -> None:
        self.room, self.gateway, self.name, self.job = room, gateway, name, job
        (self.choice,) = job.choices
        self.id = self.choice.request.id

    @property
    def seen(self) -> tuple[list[int], str | None]:
        return self.choice.generated.tolist(), self.choice.finish

    async def attempt(self) -> GenerateRequest:
        """What the worker gets."""
        (request,) = await self.room.run()
        assert request.id == self.id
        return request

    async def tokens(self, attempt: GenerateRequest, *indexes: int, last: int = 9) -> None:
        """The worker sends tokens, which are 100 and their indexes, and the gateway reads them."""
        for index in indexes:
            assert await self.room.publish(token(attempt, index, last)) == set()
        await self.gateway.pump()

    async def goes_on(self, attempt: int, *delivered: int) -> None:
        """The next attempt comes with what was delivered, and ends the answer; all before are fenced off."""
        request = await self.attempt()
        assert (request.attempt, request.token_ids) == (attempt, [5, 6, 7, *delivered])
        for earlier in range(1, attempt):
            late = structs.replace(request, attempt=earlier)
            assert await self.room.publish(token(late, len(delivered), 9)) == {self.id}
        await self.tokens(request, *range(len(delivered), 4), last=3)
        assert self.seen == ([100, 101, 102, 103], "length")
        assert await self.room.publish(token(request, 4, 9)) == {self.id}


def token(request: GenerateRequest, index: int, last: int) -> TokenEvent:
    finish = "length" if index == last else None
    return TokenEvent(request_id=request.id, attempt=request.attempt, index=index, token_id=100 + index, finish=finish)


Ask = Callable[..., Awaitable[Answer]]


@pytest.fixture
def ask(room: Any) -> Ask:
    async def begin(name: str = "g1", *, again: Answer | None = None, **options: Any) -> Answer:
        gateway = Gateway(room.queue(name), **options)
        await gateway.queue.heartbeat(600)
        request = GenerateRequest(
            id=again.id if again else f"r{next(ids)}",
            attempt=1,
            token_ids=[5, 6, 7],
            prompt_len=3,
            sampling=SamplingParams(max_tokens=9),
            deadline_ms=0,
            priority=5,
            tenant="t",
            reply_to=name,
        )
        return Answer(room, gateway, name, await gateway.admit(request, resumed=again is not None))

    return begin


class Followers:
    async def test_tokens_come_in_order_and_once_and_end_once(self, room, ask):
        answer = await ask()
        request = await answer.attempt()
        await answer.tokens(request, 0, 1, 0, 1, 2, 3, last=3)
        assert answer.seen == ([100, 101, 102, 103], "length")
        assert answer.gateway.live == {}
        assert await room.publish(token(request, 4, 4)) == {answer.id}
        assert await answer.gateway.queue.cancel([answer.id]) == 0

    async def test_a_lost_attempt_goes_on_after_what_was_delivered(self, room, ask):
        answer = await ask()
        await answer.tokens(await answer.attempt(), 0, 1)
        await room.lose(answer.id)
        await answer.gateway.pump()
        await answer.goes_on(2, 100, 101)

    async def test_a_gap_ends_the_attempt(self, room, ask):
        answer = await ask()
        request = await answer.attempt()
        await answer.tokens(request, 0)
        assert await room.publish(token(request, 1, 9)) == set()
        await room.unread("g1")
        await answer.tokens(request, 2)
        await answer.goes_on(2, 100)

    async def test_events_that_cannot_be_read_end_the_attempt_and_then_the_request(self, room, ask):
        answer = await ask()
        for attempt in range(1, MAX_MISSED + 1):
            assert (await answer.attempt()).attempt == attempt
            await room.garble("g1", answer.id)
            await answer.gateway.pump()
        await room.garble("g1", answer.id)
        await answer.gateway.pump()
        assert (answer.choice.finish, answer.choice.error.code) == ("error", "internal_error")
        assert await room.state(answer.id) == "done"

    async def test_what_redis_forgot_is_asked_for_again(self, room, ask):
        answer = await ask()
        await answer.tokens(await answer.attempt(), 0, 1)
        await room.forget(answer.id)
        await answer.gateway.survey()
        request = await answer.attempt()
        assert (request.attempt, request.delivered) == (1, 2)
        await answer.tokens(request, 2, 3, last=3)
        assert answer.seen == ([100, 101, 102, 103], "length")

    async def test_what_redis_forgot_goes_on_as_a_later_attempt_where_events_are_missing(self, room, ask):
        answer = await ask()
        await answer.tokens(await answer.attempt(), 0)
        await room.forget(answer.id)
        await room.garble("g1", answer.id)
        await answer.gateway.pump()
        await answer.goes_on(2, 100)

    async def test_a_loss_that_was_never_read_is_found(self, room, ask):
        answer = await ask()
        await answer.tokens(await answer.attempt(), 0)
        await room.lose(answer.id)
        await room.unread("g1")
        await answer.gateway.survey()
        await answer.goes_on(2, 100)

    async def test_an_end_that_was_never_read_is_missed_at_the_second_look(self, room, ask):
        answer = await ask()
        request = await answer.attempt()
        await answer.tokens(request, 0)
        assert await room.publish(token(request, 1, 1)) == set()
        await room.unread("g1")
        await answer.gateway.survey()
        assert await room.run() == []  # its end may be in the stream
        await answer.gateway.survey()
        await answer.goes_on(2, 100)

    async def test_a_request_under_way_is_left_alone(self, ask):
        answer = await ask()
        request = await answer.attempt()
        for index in range(3):
            await answer.gateway.survey()
            await answer.tokens(request, index, last=2)
        assert answer.seen == ([100, 101, 102], "length")

    async def test_an_answer_of_a_gateway_that_was_taken_for_dead_goes_on(self, room, ask):
        answer = await ask()
        await answer.tokens(await answer.attempt(), 0)
        await room.bury("g1")
        await answer.gateway.queue.heartbeat(600)
        await answer.gateway.pump()
        await answer.goes_on(2, 100)

    async def test_a_client_that_leaves_ends_its_request(self, room, ask):
        answer = await ask()
        request = await answer.attempt()
        await answer.tokens(request, 0)
        await answer.gateway.abandon(answer.job)
        assert answer.seen == ([100], "cancelled")
        assert await room.state(answer.id) == "done"
        assert await room.publish(token(request, 1, 9)) == {answer.id}
        assert await answer.gateway.queue.resync(answer.id, 1) is None
        again = structs.replace(answer.choice.request, attempt=2)
        assert not await answer.gateway.queue.resubmit(again, answer.job.prompts)

    async def test_a_request_that_nobody_here_knows_is_cancelled_unless_it_ends(self, room, ask):
        answer = await ask()
        request = await answer.attempt()
        answer.gateway.table.discard(answer.job)
        await answer.tokens(request, 0)
        assert await room.state(answer.id) == "done"
        await room.send("g1", token(structs.replace(request, id="ended"), 0, 0))
        await answer.gateway.pump()

    async def test_the_queues_own_error_ends_a_request(self, room, ask):
        answer = await ask()
        request = await answer.attempt()
        error = AttemptsExhausted("It failed three times.").info()
        end = structs.replace(token(request, 0, 0), token_id=None, finish="error", error=error)
        assert await room.publish(end) == set()
        await answer.gateway.pump()
        assert (answer.choice.finish, answer.choice.error.code) == ("error", error.code)

    @pytest.mark.parametrize("begun", [False, True])
    async def test_a_client_that_comes_back_elsewhere_gets_its_whole_answer_there(self, ask, begun):
        former = await ask()
        request = await former.attempt()
        if begun:
            await former.tokens(request, 0)
        heir = await ask("g2", again=former)
        if begun:
            await heir.goes_on(2)
        else:
            await heir.tokens(request, 0, 1, last=1)
            assert heir.seen == ([100, 101], "length")
        await former.gateway.pump()
        assert (former.choice.finish, former.choice.error.code) == ("error", "unavailable")
        assert await former.gateway.queue.cancel([former.id]) == 0

    async def test_a_client_that_comes_back_after_the_end_gets_a_later_attempt(self, ask):
        former = await ask()
        await former.gateway.abandon(former.job)
        await (await ask("g2", again=former)).goes_on(2)

    async def test_a_move_that_redis_forgot_is_made_again(self, room, ask):
        former = await ask()
        await former.tokens(await former.attempt(), 0)
        heir = await ask("g2", again=former)
        await heir.tokens(await heir.attempt(), 0, 1)
        await room.change(heir.id, "reply_to", "g1")
        await heir.gateway.survey()
        assert await room.run() == []  # "cancelled" may be in the stream
        await heir.gateway.survey()
        await heir.goes_on(3, 100, 101)

    async def test_a_gateway_whose_lease_had_ended_does_not_take_a_request_back(self, room, ask):
        """It never learned that a client had come back elsewhere."""
        answer = await ask(own_lease_s=0.0)
        await answer.tokens(await answer.attempt(), 0)
        await room.change(answer.id, "reply_to", "g2")
        await answer.gateway.survey()
        assert answer.choice.finish is None
        await answer.gateway.survey()
        assert (answer.choice.finish, answer.choice.error.code) == ("error", "unavailable")
        assert await room.run() == []


class TestOverRedis(Followers):
    @pytest.fixture
    def room(self, bench):
        return Redis(bench)


class TestScripted(Followers):
    @pytest.fixture
    def room(self):
        return Scripted()
