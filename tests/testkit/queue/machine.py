"""Simulated gateways, workers and leaders over a real queue: they follow its contract, die, forget, stand still and
lose replies. :class:`World` compares Redis with :class:`testkit.queue.model.Model` after every call.
"""

from __future__ import annotations

import asyncio
import copy
import random
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs
from redis.asyncio import Redis

from services.errors import ExpertUnavailable, StaleLeader, TooManyRequests
from services.messages import (
    AttemptLost,
    Cancel,
    GenerateRequest,
    SamplingParams,
    TokenEvent,
    WorkerInfo,
    decode_results,
)
from services.queue.death_notices import DeathNotices
from services.queue.gateway_side import FIRST_ID, GatewayQueue
from services.queue.keys import Keys
from services.queue.limits import QueueLimits
from services.queue.scheduler_side import SchedulerQueue
from services.queue.worker_side import WorkerQueue
from services.wire import WIRE
from testkit.queue.contract_gateway import SimGateway
from testkit.queue.indexes import Contents, check_contents, contents
from testkit.queue.model import LIVE, Model
from testkit.queue.steered import CLOCK, Fate, Operation, Persistent, SteeredRedis, stepped_scripts
from testkit.queue.world import text

LEASE_S = 6.0
LIMITS = QueueLimits(
    lease_s=LEASE_S,
    tombstone_s=10**5,
    lost_s=2 * LEASE_S,
    max_requests=30,
    quantum=16,
    max_attempts=10**6,
    max_stuck=10**6,
)
NO_REPLICA = ExpertUnavailable("No replica.").info()
NOON = 1_700_000_000_000


@dataclass(kw_only=True)
class Actor:
    """A process with one operation at a time. ``queue`` is its side of the queue."""

    name: str
    redis: SteeredRedis
    queue: Any
    operation: Operation | None = None


@dataclass(kw_only=True)
class Worker(Actor):
    last_id: str = FIRST_ID
    held: dict[str, GenerateRequest] = field(default_factory=dict)


@dataclass(kw_only=True)
class Gateway(Actor):
    sim: SimGateway


@dataclass(kw_only=True)
class Leader(Actor):
    epoch: int = 0
    claimed: list[GenerateRequest] = field(default_factory=list)


class World:
    """The actors, and what each of them may do. ``redis`` is the test's own connection."""

    def __init__(self, redis: Redis) -> None:
        self.redis, self.keys = redis, Keys("test")
        self.draw = random.Random(0)
        self.model = Model(LIMITS)
        self.ends: dict[str, list[str]] = {}
        self.gateways: dict[str, Gateway] = {}
        self.workers: dict[str, Worker] = {}
        self.leader: Any = None
        self._former: list[Leader] = []
        """Leaders that stand still in the midst of something."""
        self._scripts = stepped_scripts()
        self._names = {script.sha: name for name, script in self._scripts.items()}
        self._read: dict[str, str] = {}
        self._count = 0
        self._calm = False  # whether replies alone are compared, because nothing is disturbed any more
        self._saved: tuple[dict[bytes, tuple[int, bytes]], Model] | None = None

    async def start(self) -> None:
        await self.redis.flushall()
        await self.redis.set(CLOCK, NOON)
        for script in self._scripts.values():
            await self.redis.script_load(script.text)
        await self.new_leader()
        for _ in range(2):
            await self.add_gateway()
            await self.add_worker()

    # Operations

    async def run(self, actor: Actor, work: Coroutine[Any, Any, None], next_fate: Callable[[], Fate | None]) -> None:
        """Begin an operation, or go on with one. ``next_fate`` says what becomes of a call; None leaves it waiting."""
        actor.operation = Operation(actor.redis, work)
        await self.go_on(actor, next_fate)

    async def go_on(self, actor: Actor, next_fate: Callable[[], Fate | None]) -> None:
        operation = actor.operation
        assert operation is not None
        try:
            while await operation.reach_call():
                if (fate := next_fate()) is None:
                    return
                operation.go(fate)
        except StaleLeader:
            pass
        actor.operation = None

    async def whole(self, actor: Actor, work: Coroutine[Any, Any, None]) -> None:
        await self.run(actor, work, lambda: "go")

    def idle(self, actors: dict[str, Any]) -> list[str]:
        return [name for name, actor in actors.items() if actor.operation is None]

    @property
    def parked(self) -> list[Actor]:
        return [actor for actor in self.actors if actor.operation is not None]

    @property
    def actors(self) -> list[Actor]:
        return [self.leader, *self._former, *self.gateways.values(), *self.workers.values()]

    # After each call

    async def _observe(self, script: str, arguments: list[str], reply: Any) -> None:
        now, held_until = await self.redis.mget(CLOCK, f"{self.keys.prefix}reclaim_after")
        self.model.now, self.model.held_until = int(now), int(held_until or 0)
        self.model.apply(script, arguments, reply)
        if not self._calm:
            await self._compare(f"after {script} {arguments} -> {reply}")

    async def _compare(self, said: str) -> None:
        found = await contents(self.redis, self.keys.prefix)
        check_contents(found)
        wanted = self.model.state()
        differing = {kind: (held, wanted[kind]) for kind, held in _seen(found).items() if held != wanted[kind]}
        assert not differing, f"{said}: found and wanted {differing}"
        events = await self._new_events()
        assert sorted(events) == sorted(self.model.events), f"{said}: {events} instead of {self.model.events}"

    async def _new_events(self) -> list[tuple[str, str, str, int]]:
        """Ends and lost attempts that were written into gateways' streams since the last look."""
        events: list[tuple[str, str, str, int]] = []
        for gateway in self._read:
            entries = await self.redis.xrange(self.keys.results(gateway), f"({self._read[gateway]}", "+")
            for entry_id, fields in entries:
                self._read[gateway] = entry_id.decode()
                for event in (event for data in fields.values() for event in decode_results(data)):
                    if isinstance(event, AttemptLost):
                        events.append((gateway, "lost", event.request_id, event.attempt))
                    elif isinstance(event, TokenEvent) and event.finish:
                        events.append((gateway, event.finish, event.request_id, event.attempt))
        return events

    # Comings and goings

    def _name(self, kind: str) -> str:
        self._count += 1
        return f"{kind}{self._count}"

    def _connection(self) -> SteeredRedis:
        return SteeredRedis(self.redis, self._names, self._observe)

    async def add_gateway(self) -> None:
        name, redis = self._name("g"), self._connection()
        queue = Persistent(GatewayQueue(redis, self.keys, name, LIMITS), self._scripts)  # type: ignore[arg-type]
        self._read[name] = FIRST_ID
        sim = SimGateway(queue, self.ends)  # type: ignore[arg-type]
        self.gateways[name] = Gateway(name=name, redis=redis, queue=queue, sim=sim)
        await self.whole(self.gateways[name], queue.heartbeat(LEASE_S))
        if self.draw.random() < 0.7:  # the others write as an earlier release does
            await self.whole(self.gateways[name], queue.look())

    async def add_worker(self) -> None:
        name, redis = self._name("w"), self._connection()
        queue = Persistent(WorkerQueue(redis, self.keys, LIMITS), self._scripts)  # type: ignore[arg-type]
        self.workers[name] = Worker(name=name, redis=redis, queue=queue)
        info = WorkerInfo(
            id=name, model="m", fingerprint="f", kv_tokens=1, max_num_seqs=8, max_model_len=512, host="h", pid=1,
            version="0", wire=WIRE,
        )  # fmt: skip
        credit = {"credit_tokens": self.draw.choice([60, 200]), "credit_requests": 6}
        await self.whole(self.workers[name], queue.register(info, LEASE_S, **credit))

    async def new_leader(self) -> None:
        """The former one stands still, or has died: its claims are forgotten."""
        if self.leader is not None and self.leader.operation is not None:
            self._former.append(self.leader)
        await self.redis.delete(self.keys.leader)
        redis = self._connection()
        queue = Persistent(SchedulerQueue(redis, self.keys, LIMITS), self._scripts)  # type: ignore[arg-type]
        self.leader = Leader(name=self._name("s"), redis=redis, queue=queue)

        async def campaign(leader: Leader) -> None:
            leader.epoch = await queue.campaign(leader.name, LEASE_S)

        await self.whole(self.leader, campaign(self.leader))

    async def kill(self, actor: Actor) -> None:
        if actor.operation is not None:
            await actor.operation.drop()
        self.gateways.pop(actor.name, None)
        self.workers.pop(actor.name, None)
        if isinstance(actor, Gateway):
            for request_id in list(actor.sim.live):
                actor.sim.end(request_id, "gateway died")

    async def notice_death(self, worker: Worker) -> None:
        """Its supervisor saw the process end."""
        await self.kill(worker)
        notices = DeathNotices(self.redis, self.keys, LIMITS)
        notices._scripts._scripts = self._scripts
        ended, _ = await notices._scripts.run("death_notice", worker.name)
        await self._observe("death_notice", [worker.name], ended)

    # What a gateway does

    async def admit(self, gateway: Gateway) -> None:
        tenant, priority = self.draw.choice("abc"), self.draw.choice([0, 5, 5, 5])
        batch = [self._request(gateway.name, tenant, priority) for _ in range(self.draw.randint(1, 4))]
        try:
            admitted = await gateway.queue.admit(batch, timeout_s=10**6)
        except TooManyRequests:
            return
        for request in admitted:
            gateway.sim.wait_for(request)
            self.ends[request.id] = []

    def _request(self, gateway: str, tenant: str, priority: int) -> GenerateRequest:
        return GenerateRequest(
            id=self._name("r"),
            attempt=0,
            token_ids=[0, 1, 2, 3],
            prompt_len=4,
            sampling=SamplingParams(max_tokens=self.draw.randint(1, 12)),
            deadline_ms=0,
            priority=priority,
            tenant=tenant,
            reply_to=gateway,
        )

    async def cancel(self, gateway: Gateway) -> None:
        live = gateway.sim.live
        left = {name: live[name].delivered for name in self.draw.sample(sorted(live), min(2, len(live)))}
        for request_id in left:
            gateway.sim.end(request_id, "cancelled")
        await gateway.queue.cancel(left, left)

    async def take_up(self, heir: Gateway, *, begun: bool = False) -> None:
        """A client comes back to this gateway while the other one lives; ``begun``: to an answer that has begun."""
        records = self.model.records
        live = [(o.sim, r) for name, o in self.gateways.items() if name != heir.name for r in sorted(o.sim.live)]
        if begun:
            live = [(sim, r) for sim, r in live if r in records and records[r].streamed]
        if not live:
            return
        former, request_id = self.draw.choice(live)
        request = former.live.pop(request_id)
        fresh = structs.replace(request, token_ids=request.token_ids[: request.prompt_len], reply_to=heir.name)
        try:
            heir.sim.wait_for(await heir.queue.take_up(fresh, timeout_s=10**6))
        except TooManyRequests:
            self.ends[request.id].append("refused")
        except asyncio.CancelledError:
            self.ends[request.id].append("gateway died")
            raise

    async def pump(self, gateway: Gateway) -> None:
        await gateway.sim.pump()

    async def survey(self, gateway: Gateway) -> None:
        await gateway.queue.heartbeat(LEASE_S)
        await gateway.sim.survey()

    # What a worker does

    async def read(self, worker: Worker) -> None:
        worker.last_id, messages = await worker.queue.read_inbox(worker.name, worker.last_id, 0)
        for message in messages:
            if not isinstance(message, Cancel):
                worker.held[message.request.id] = message.request
            elif message.request_id in worker.held and worker.held[message.request_id].attempt <= message.attempt:
                del worker.held[message.request_id]

    async def work(self, worker: Worker) -> None:
        await self.read(worker)
        events = [_next_token(request) for request in worker.held.values() if self.draw.random() < 0.8]
        gone = await worker.queue.publish(worker.name, events)
        for event in events:
            request = worker.held[event.request_id]
            worker.held[event.request_id] = structs.replace(request, token_ids=[*request.token_ids, event.token_id])
            if event.finish or event.request_id in gone:
                del worker.held[event.request_id]

    async def beat(self, worker: Worker) -> None:
        held = {request.id: request.attempt for request in worker.held.values()}
        for request_id in await worker.queue.heartbeat(worker.name, held):
            del worker.held[request_id]

    async def give_up(self, worker: Worker) -> None:
        """It lacks experts for some of what it runs."""
        given = self.draw.sample(sorted(worker.held), min(2, len(worker.held)))
        attempts = {request_id: worker.held.pop(request_id).attempt for request_id in given}
        await worker.queue.give_up(worker.name, attempts, NO_REPLICA)

    async def leave(self, worker: Worker) -> None:
        """With suspects among what it ran, as a rank whose group broke has."""
        suspects = self.draw.sample(sorted(worker.held), min(1, len(worker.held)))
        await worker.queue.deregister(worker.name, {name: worker.held[name].attempt for name in suspects})
        self.workers.pop(worker.name, None)

    # What a leader does

    async def claim(self, leader: Leader) -> None:
        leader.claimed += [claim.request for claim in await leader.queue.claim(leader.epoch, self.draw.randint(1, 6))]

    async def assign(self, leader: Leader, to: str | None = None) -> None:
        if self.workers:
            pairs = [(request, to or self.draw.choice(sorted(self.workers))) for request in leader.claimed]
            leader.claimed = []
            await leader.queue.assign(leader.epoch, pairs)

    async def release(self, leader: Leader) -> None:
        requests, leader.claimed = leader.claimed, []
        await leader.queue.release(leader.epoch, requests)

    async def forget_claims(self, leader: Leader) -> None:
        leader.claimed = []

    async def reap(self, leader: Leader) -> None:
        await leader.queue.reap(leader.epoch, 10_000)  # all there is: the model knows of no parts

    # What happens to Redis

    async def tick(self, ms: int) -> None:
        await self.redis.incrby(CLOCK, ms)
        if ms < 0:
            self._saved = None  # a clock that goes back and a file that lacks its end are two faults at once

    async def save(self) -> None:
        keys = [key for key in await self.redis.keys("*") if key != CLOCK.encode()]
        contents = {key: (max(await self.redis.pttl(key), 0), await self.redis.dump(key)) for key in keys}
        self._saved = contents, copy.deepcopy(self.model)

    async def rewind(self) -> None:
        """An append-only file may lack its end: all keys go back to what was saved, the processes do not."""
        if self._saved is None:
            return
        now = await self.redis.get(CLOCK)
        async with self.redis.pipeline(transaction=True) as everything:
            for key in await self.redis.keys("*"):
                everything.delete(key)
            everything.set(CLOCK, now)
            for key, (ttl, value) in self._saved[0].items():
                everything.restore(key, ttl, value)
            await everything.execute()
        self.model, self._saved, self._read = self._saved[1], None, dict.fromkeys(self._read, FIRST_ID)
        await self._new_events()

    # The end

    async def finish(self) -> None:
        """Lets everything run to its end, undisturbed."""
        for actor in list(self.parked):
            await self.go_on(actor, lambda: "go")
        self._calm = True
        await self.new_leader()
        await self.add_worker()
        least, rounds = sys.maxsize, 0
        while rounds < 200:  # without an end: hundreds of requests may wait, and a few end each round
            for do in (self.claim, self.assign, self.reap):
                await self.whole(self.leader, do(self.leader))
            for worker in list(self.workers.values()):
                for step in (self.work, self.beat):
                    await self.whole(worker, step(worker))
            for gateway in self.gateways.values():
                for part in (self.pump, self.survey):
                    await self.whole(gateway, part(gateway))
            live = sum(record.state in LIVE for record in self.model.records.values())
            live += sum(len(gateway.sim.live) for gateway in self.gateways.values())
            if not live:
                return
            least, rounds = min(least, live), 0 if live < least else rounds + 1
            await self.tick(1500)
        raise AssertionError(f"requests are stuck: {self.model.records}")

    async def check_end(self) -> None:
        """Every request has ended once, and nothing of any is left."""
        assert {request_id: ends for request_id, ends in self.ends.items() if len(ends) != 1} == {}
        await self._new_events()
        self.model.events = []
        await self._compare("at the end")
        left = await contents(self.redis, self.keys.prefix)
        assert {name: count for name, count in left["queue:stats"].items() if count != "0"} == {}
        kinds = ("queue", "ring", "deficit", "leases", "claims", "deadlines", "held", "tenant", "owned")
        assert [name for name in left if name.partition(":")[0] in kinds and name != "queue:stats"] == []

    async def close(self) -> None:
        for actor in self.parked:
            assert actor.operation is not None
            await actor.operation.drop()
        for gateway in self.gateways.values():
            await gateway.queue._queue._results.close()
        await asyncio.sleep(0)


def _next_token(request: GenerateRequest) -> TokenEvent:
    index, answer = request.delivered, text(request)
    finish: Any = "stop" if index + 1 == len(answer) else None
    return TokenEvent(
        request_id=request.id, attempt=request.attempt, index=index, token_id=answer[index], finish=finish
    )


def _seen(found: Contents) -> dict[str, Any]:
    """What Redis holds of what the model knows."""
    records = {name.removeprefix("req:"): r for name, r in found.items() if name.startswith("req:")}
    return {
        "records": {n: (r["state"], int(r["attempt"]), r.get("holder", ""), r["reply_to"]) for n, r in records.items()},
        **{index: found.get(index, {}) for index in ("leases", "workers", "gateways")},
    }
