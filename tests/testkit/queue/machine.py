"""Gateways, and simulated workers and leaders, over a real queue: they follow its contract, die, forget, stand still
and lose replies. :class:`World` compares Redis with :class:`testkit.queue.model.Model` after every call.
"""

from __future__ import annotations

import asyncio
import copy
import random
import zlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs
from redis.asyncio import Redis

from services.errors import ExpertUnavailable, StaleLeader, TooManyRequests
from services.gateway.job import Choice, Job
from services.messages import AttemptLost, Cancel, GenerateRequest, TokenEvent, decode_results
from services.queue.death_notices import DeathNotices
from services.queue.gateway_side import FIRST_ID, GatewayQueue, Result
from services.queue.keys import Keys
from services.queue.limits import QueueLimits
from services.queue.scheduler_side import SchedulerQueue
from services.queue.scripts import load_scripts
from services.queue.worker_side import WorkerQueue
from services.runtime.tasks import end_tasks
from testkit.queue.gateway import Gateway
from testkit.queue.indexes import Contents, check_contents, contents, under
from testkit.queue.messages import request_of, worker_of
from testkit.queue.model import LIVE, Model
from testkit.queue.redis_server import RedisServer
from testkit.queue.steered import CLOCK, Fate, Operation, Persistent, SteeredRedis, stepped_scripts

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


def drawn(request_id: str, index: int) -> int:
    """The token that any worker draws there: a replay draws the same."""
    return zlib.crc32(f"{request_id}:{index}".encode()) % 1000


def text(request: GenerateRequest) -> list[int]:
    """All tokens of a request; one that divides by 9 stops it."""
    tokens: list[int] = []
    while len(tokens) < request.sampling.max_tokens:
        tokens.append(drawn(request.id, len(tokens)))
        if tokens[-1] % 9 == 0:
            break
    return tokens


def as_drawn(event: Result) -> None:
    if isinstance(event, TokenEvent) and event.token_id is not None:
        assert event.token_id == drawn(event.request_id, event.index)


def undisturbed() -> Fate:
    """Of each call of an operation."""
    return "go"


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
class Frontend(Actor):
    gateway: Gateway

    @property
    def jobs(self) -> list[Job]:
        """Of clients that wait here."""
        return [job for job in self.gateway.table.jobs() if job.admitted]


@dataclass(kw_only=True)
class Leader(Actor):
    epoch: int = 0
    claimed: list[GenerateRequest] = field(default_factory=list)


class World:
    """The actors, and what each of them may do. ``redis`` is the test's own connection.

    With ``server``, whose clock steps, time is the server's own, which no model follows: indexes alone are checked.
    """

    def __init__(self, redis: Redis, server: RedisServer | None = None) -> None:
        self.redis, self.keys, self._server = redis, Keys("test"), server
        self.draw = random.Random(0)
        self.model = Model(LIMITS)
        self.choices: dict[str, Choice] = {}  # as the last client of each request sees it
        self.fates: dict[str, str] = {}  # of requests whose clients never saw an end
        self.gateways: dict[str, Frontend] = {}
        self.workers: dict[str, Worker] = {}
        self.leader: Any = None
        self._former: list[Leader] = []
        """Leaders that stand still in the midst of something."""
        self._scripts = load_scripts() if server else stepped_scripts()
        self._names = {script.sha: name for name, script in self._scripts.items()}
        self._read: dict[str, str] = {}
        self._count = 0
        self._calm = False  # whether replies alone are compared, because nothing is disturbed any more
        self._ahead_s = 0
        self._saved: tuple[dict[bytes, tuple[int, bytes]], Model] | None = None

    async def start(self) -> None:
        await self.redis.flushall()
        if self._server is None:
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
        await self.run(actor, work, undisturbed)

    async def act(self, kind: str, action: str, next_fate: Callable[[], Fate | None] = undisturbed) -> None:
        """An operation of one who is not in the midst of another."""
        if idle := self.idle(kind):
            actor = self.draw.choice(idle)
            await self.run(actor, getattr(self, action)(actor), next_fate)

    async def all_act(self, kind: str, *actions: str) -> None:
        """Operations of all who are not in the midst of another, undisturbed."""
        for actor in self.idle(kind):
            for action in actions:
                await self.whole(actor, getattr(self, action)(actor))

    def idle(self, kind: str) -> list[Any]:
        """Those of a kind ("leader", "gateways", "workers") that are not in the midst of an operation."""
        actors = [self.leader] if kind == "leader" else [actor for _, actor in sorted(getattr(self, kind).items())]
        return [actor for actor in actors if actor.operation is None]

    @property
    def parked(self) -> list[Actor]:
        return [actor for actor in self.actors if actor.operation is not None]

    @property
    def actors(self) -> list[Actor]:
        return [self.leader, *self._former, *self.gateways.values(), *self.workers.values()]

    # After each call

    async def _observe(self, script: str, arguments: list[str], reply: Any) -> None:
        if self._server is not None:
            check_contents(await contents(self.redis, self.keys.prefix))
            return
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
        gateway = Gateway(queue, lease_s=LEASE_S, hear=as_drawn, clock=lambda: 0.0)
        self.gateways[name] = Frontend(name=name, redis=redis, queue=queue, gateway=gateway)
        await self.whole(self.gateways[name], queue.heartbeat(LEASE_S))
        if self.draw.random() < 0.7:  # the others write as an earlier release does
            await self.whole(self.gateways[name], queue.look())

    async def add_worker(self) -> None:
        name, redis = self._name("w"), self._connection()
        queue = Persistent(WorkerQueue(redis, self.keys, LIMITS), self._scripts)  # type: ignore[arg-type]
        self.workers[name] = Worker(name=name, redis=redis, queue=queue)
        credit = {"credit_tokens": self.draw.choice([60, 200]), "credit_requests": 6}
        await self.whole(self.workers[name], queue.register(worker_of(name), LEASE_S, **credit))

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
        await self._drop(actor)
        self.gateways.pop(actor.name, None)
        self.workers.pop(actor.name, None)
        if isinstance(actor, Frontend):
            self.fates |= dict.fromkeys(actor.gateway.live, "gateway died")

    async def _drop(self, actor: Actor) -> None:
        if actor.operation is not None:
            await actor.operation.drop()
        if isinstance(actor, Frontend):
            await end_tasks(list(actor.gateway.follower._tasks))

    async def kill_gateway(self) -> None:
        """A client of it may come back elsewhere."""
        if len(self.gateways) < 2:
            return
        dead = self.gateways[self.draw.choice(sorted(self.gateways))]
        jobs = dead.jobs[:1]
        await self.kill(dead)
        for heir, job in zip(self.idle("gateways"), jobs, strict=False):
            await self.whole(heir, self._move(dead, heir, job))

    async def kill_worker(self) -> None:
        if self.workers:
            await self.kill(self.workers[self.draw.choice(sorted(self.workers))])

    async def see_a_worker_die(self) -> None:
        if self.workers:
            await self.notice_death(self.workers[self.draw.choice(sorted(self.workers))])

    async def add(self) -> None:
        await (self.add_worker() if len(self.workers) < 3 else self.add_gateway())

    async def notice_death(self, worker: Worker) -> None:
        """Its supervisor saw the process end."""
        await self.kill(worker)
        notices = DeathNotices(self.redis, self.keys, LIMITS)
        notices._scripts._scripts = self._scripts
        ended = await notices._scripts.run("death_notice", worker.name)
        await self._observe("death_notice", [worker.name], ended)

    # What a gateway does

    async def admit(self, at: Frontend) -> None:
        tenant, priority = self.draw.choice("abc"), self.draw.choice([0, 5, 5, 5])
        batch = [
            request_of(
                self._name("r"),
                range(4),
                max_tokens=self.draw.randint(1, 12),
                tenant=tenant,
                priority=priority,
                reply_to=at.name,
            )
            for _ in range(self.draw.randint(1, 4))
        ]
        try:
            job = await at.gateway.admit(*batch)
        except TooManyRequests:
            return
        self.choices |= {choice.request.id: choice for choice in job.choices}

    async def cancel(self, at: Frontend) -> None:
        if at.jobs:
            await at.gateway.abandon(self.draw.choice(at.jobs))

    async def take_up(self, heir: Frontend, *, begun: bool = False) -> None:
        """A client comes back to this gateway while the other one lives; ``begun``: to an answer that has begun."""
        others = [front for name, front in self.gateways.items() if name != heir.name]
        jobs = [(front, job) for front in others for job in front.jobs]
        if begun:
            streamed = {name for name, record in self.model.records.items() if record.streamed}
            jobs = [(front, job) for front, job in jobs if any(c.request.id in streamed for c in job.choices)]
        if jobs:
            former, job = self.draw.choice(jobs)
            await self._move(former, heir, job)

    async def _move(self, former: Frontend, heir: Frontend, job: Job) -> None:
        """The client comes back to ``heir``, and gets its whole answer there."""
        former.gateway.table.discard(job)
        fresh = [
            structs.replace(choice.request, token_ids=choice.prompt.tolist(), prompt="", reply_to=heir.name)
            for choice in job.choices
        ]
        names = {request.id for request in fresh}
        self.fates = {name: fate for name, fate in self.fates.items() if name not in names}
        try:
            job = await heir.gateway.admit(*fresh, resumed=True)
        except TooManyRequests:
            await heir.gateway.finish_calls()
            self.fates |= dict.fromkeys(names, "refused")
        else:
            self.choices |= {choice.request.id: choice for choice in job.choices}

    async def pump(self, at: Frontend) -> None:
        await at.gateway.pump()

    async def keep_lease(self, at: Frontend) -> None:
        await at.queue.heartbeat(LEASE_S)

    async def survey(self, at: Frontend) -> None:
        await at.gateway.survey()

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
        await leader.queue.reap(leader.epoch, 100)

    # What happens to Redis

    async def tick(self, ms: int) -> None:
        if self._server is not None:
            self._ahead_s += ms // 1000
            self._server.set_clock(self._ahead_s)
            return
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
        for _ in range(200):
            await self.all_act("leader", "claim", "assign", "reap")
            await self.all_act("workers", "work", "beat")
            await self.all_act("gateways", "pump", "survey")
            records = under(await contents(self.redis, self.keys.prefix), "req:")
            live = any(record["state"] in LIVE for record in records.values())
            if not live and not any(at.gateway.live for at in self.gateways.values()):
                return
            await self.tick(2000)
        raise AssertionError(f"requests are stuck: {records}")

    async def check_end(self, *fates: str) -> None:
        """Each request has its whole text, or its client left, or it met one of ``fates``; nothing of any is left."""
        for request_id, choice in self.choices.items():
            own = choice.error.code if choice.finish == "error" and choice.error else choice.finish
            fate = self.fates.get(request_id, own)
            assert fate in ("stop", "cancelled", *fates), (request_id, fate)
            assert fate != "stop" or choice.generated.tolist() == text(choice.request)
        if self._server is None:
            await self._new_events()
            self.model.events = []
            await self._compare("at the end")
        left = await contents(self.redis, self.keys.prefix)
        assert {name: count for name, count in left["queue:stats"].items() if count != "0"} == {}
        kinds = ("queue", "ring", "deficit", "leases", "claims", "deadlines", "held", "tenant", "owned")
        assert [name for name in left if name.partition(":")[0] in kinds and name != "queue:stats"] == []

    async def close(self) -> None:
        for actor in self.actors:
            await self._drop(actor)
        for at in self.gateways.values():
            await at.queue._queue._results.close()
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
