"""Gateways, and simulated workers and a leader, over a real queue: they follow its contract, die, forget and move."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from services.errors import ExpertUnavailable, StaleLeader, TooManyRequests
from services.gateway.job import Choice, Job
from services.messages import Cancel, GenerateRequest, TokenEvent
from services.queue.gateway_side import FIRST_ID, Result
from testkit.queue.gateway import Gateway
from testkit.queue.indexes import check

NO_REPLICA = ExpertUnavailable("No replica.").info()


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


@dataclass
class SimWorker:
    id: str
    last_id: str = FIRST_ID
    held: dict[str, GenerateRequest] = field(default_factory=dict)


class World:
    """The actors, and the actions that a walk may take."""

    def __init__(self, bench: Any, seed: int) -> None:
        self.bench = bench
        self.draw = random.Random(seed)
        self.choices: dict[str, Choice] = {}  # as the last client of each request sees it
        self.fates: dict[str, str] = {}  # of requests whose clients never saw an end
        self.gateways: dict[str, Gateway] = {}
        self.workers: dict[str, SimWorker] = {}
        self.claimed: list[GenerateRequest] = []
        self.names = 0

    def name(self, kind: str) -> str:
        self.names += 1
        return f"{kind}{self.names}"

    async def add_gateway(self) -> None:
        name = self.name("g")
        self.gateways[name] = Gateway(self.bench.new_gateway(name), hear=as_drawn)
        await self.gateways[name].queue.heartbeat(600)
        if self.draw.random() < 0.7:  # the others write as an earlier release does
            await self.gateways[name].queue.look()

    async def add_worker(self) -> None:
        worker = SimWorker(self.name("w"))
        self.workers[worker.id] = worker
        await self.bench.add_worker(worker.id, tokens=self.draw.choice([30, 100]), requests=6, lease_s=600)

    async def admit(self) -> None:
        name = self.draw.choice(list(self.gateways))
        gateway = self.gateways[name]
        tenant, priority = self.draw.choice("abc"), self.draw.choice([0, 5, 5, 5])
        batch = [
            self.bench.request(
                self.name("r"), tenant=tenant, priority=priority, reply_to=name, max_tokens=self.draw.randint(1, 12)
            )
            for _ in range(self.draw.randint(1, 4))
        ]
        try:
            job = await gateway.admit(*batch)
        except TooManyRequests:
            return
        self.choices |= {choice.request.id: choice for choice in job.choices}

    async def cancel(self) -> None:
        gateway = self.draw.choice(list(self.gateways.values()))
        if jobs := gateway.table.jobs():
            await gateway.abandon(self.draw.choice(jobs))

    async def claim(self) -> None:
        claims = await self.bench.scheduler.claim(self.bench.epoch, self.draw.randint(1, 6))
        self.claimed += [claim.request for claim in claims]

    async def assign(self) -> None:
        if self.workers:
            pairs = [(request, self.draw.choice(list(self.workers))) for request in self.claimed]
            await self.bench.scheduler.assign(self.bench.epoch, pairs)
            self.claimed = []

    async def release(self) -> None:
        await self.bench.scheduler.release(self.bench.epoch, self.claimed)
        self.claimed = []

    async def forget_claims(self) -> None:
        self.claimed = []

    async def work(self) -> None:
        for worker in list(self.workers.values()):
            worker.last_id, messages = await self.bench.worker.read_inbox(worker.id, worker.last_id, 0)
            for message in messages:
                if isinstance(message, Cancel):
                    if message.request_id in worker.held and worker.held[message.request_id].attempt <= message.attempt:
                        del worker.held[message.request_id]
                else:
                    worker.held[message.request.id] = message.request
            events = [self.next_token(request) for request in worker.held.values() if self.draw.random() < 0.8]
            gone = await self.bench.worker.publish(worker.id, events)
            for event in events:
                request = worker.held[event.request_id]
                worker.held[event.request_id] = structs.replace(request, token_ids=[*request.token_ids, event.token_id])
                if event.finish or event.request_id in gone:
                    del worker.held[event.request_id]

    def next_token(self, request: GenerateRequest) -> TokenEvent:
        index, whole = request.delivered, text(request)
        return self.bench.token(
            request, index, token_id=whole[index], finish="stop" if index + 1 == len(whole) else None
        )

    async def beat(self) -> None:
        for worker in self.workers.values():
            held = {request.id: request.attempt for request in worker.held.values()}
            for request_id in await self.bench.worker.heartbeat(worker.id, held):
                del worker.held[request_id]

    async def give_up(self) -> None:
        """A worker lacks experts for some of what it runs."""
        for worker in self.workers.values():
            given = self.draw.sample(sorted(worker.held), min(2, len(worker.held)))
            attempts = {request_id: worker.held.pop(request_id).attempt for request_id in given}
            await self.bench.worker.give_up(worker.id, attempts, NO_REPLICA)

    async def pump(self) -> None:
        for gateway in self.gateways.values():
            await gateway.pump()

    async def survey(self) -> None:
        for gateway in self.gateways.values():
            await gateway.survey()

    async def kill_worker(self) -> None:
        if self.workers:
            worker_id = self.draw.choice(list(self.workers))
            del self.workers[worker_id]
            await self.bench.redis.zadd(self.bench.keys.workers, {worker_id: 1}, xx=True)

    async def leave_worker(self) -> None:
        """With suspects among what it ran, as a rank whose group broke has."""
        if self.workers:
            worker = self.workers.pop(self.draw.choice(list(self.workers)))
            suspects = self.draw.sample(sorted(worker.held), min(1, len(worker.held)))
            attempts = {request_id: worker.held[request_id].attempt for request_id in suspects}
            await self.bench.worker.deregister(worker.id, attempts)

    async def kill_gateway(self) -> None:
        """Its requests are cancelled, except those of a client that comes back elsewhere."""
        if len(self.gateways) < 2:
            return
        name = self.draw.choice(list(self.gateways))
        dead = self.gateways.pop(name)
        await self.bench.redis.zadd(self.bench.keys.gateways, {name: 1}, xx=True)
        for job in dead.table.jobs()[:1]:
            await self.move(dead, self.draw.choice(list(self.gateways)), job)
        self.fates |= dict.fromkeys(dead.live, "gateway died")

    async def move(self, former: Gateway, heir: str, job: Job) -> None:
        """The client comes back to ``heir``, and gets its whole answer there."""
        former.table.discard(job)
        fresh = [
            structs.replace(choice.request, token_ids=choice.prompt.tolist(), prompt="", reply_to=heir)
            for choice in job.choices
        ]
        try:
            job = await self.gateways[heir].admit(*fresh, resumed=True)
        except TooManyRequests:
            await self.gateways[heir].finish_calls()
            self.fates |= {request.id: "refused" for request in fresh}
        else:
            self.choices |= {choice.request.id: choice for choice in job.choices}

    async def take_up(self) -> None:
        """The client comes back to another gateway while the first one lives."""
        former, heir = (self.draw.choice(list(self.gateways)) for _ in range(2))
        if former != heir and (jobs := self.gateways[former].table.jobs()):
            await self.move(self.gateways[former], heir, self.draw.choice(jobs))

    async def new_leader(self) -> None:
        await self.bench.redis.delete(self.bench.keys.leader)
        await self.bench.lead()
        self.claimed = []

    async def expire_leases(self) -> None:
        """Time passes for everything that no live worker or leader renews."""
        held = {request_id for worker in self.workers.values() for request_id in worker.held}
        kept = held | {request.id for request in self.claimed}
        for member in await self.bench.redis.zrange(self.bench.keys.leases, 0, -1):
            if member.decode() not in kept:
                await self.bench.redis.zadd(self.bench.keys.leases, {member: 1})

    async def reap(self) -> None:
        await self.bench.scheduler.reap(self.bench.epoch, self.draw.choice([2, 100]))

    async def snapshot(self) -> dict[bytes, tuple[int, bytes]]:
        redis = self.bench.redis
        return {key: (max(await redis.pttl(key), 0), await redis.dump(key)) for key in await redis.keys("*")}

    async def rewind(self, saved: dict[bytes, tuple[int, bytes]]) -> None:
        async with self.bench.redis.pipeline(transaction=True) as everything:  # gateways write meanwhile, too
            everything.flushall()
            for key, (ttl, value) in saved.items():
                everything.restore(key, ttl, value)
            await everything.execute()
        for name in await self.bench.redis.zrange(self.bench.keys.gateways, 0, -1):
            if name.decode() not in self.gateways:
                await self.bench.redis.zadd(self.bench.keys.gateways, {name: 1})
        for name in await self.bench.redis.zrange(self.bench.keys.workers, 0, -1):
            if name.decode() not in self.workers:
                await self.bench.redis.zadd(self.bench.keys.workers, {name: 1})

    async def act(self, action: str) -> None:
        try:
            await getattr(self, action)()
        except StaleLeader:
            await self.new_leader()


async def finish(world: World) -> None:
    """Lets everything run to its end."""
    await world.add_worker()
    for _ in range(400):
        for action in ("claim", "assign", "work", "beat", "pump", "survey", "expire_leases", "reap"):
            await world.act(action)
        records = await world.bench.redis.keys(world.bench.keys.request("*"))
        states = [await world.bench.redis.hget(key, "state") for key in records]
        if not any(gateway.live for gateway in world.gateways.values()) and all(state == b"done" for state in states):
            return
    raise AssertionError("requests are stuck")


async def ended_well(world: World, *fates: str) -> None:
    """Each request has its whole text, or its client left, or it met one of ``fates``."""
    assert world.choices
    for request_id, choice in world.choices.items():
        fate = world.fates.get(request_id, choice.finish)
        assert fate in ("stop", "cancelled", *fates), (request_id, fate, choice.error)
        assert fate != "stop" or choice.generated.tolist() == text(choice.request)
    await check(world.bench)
    assert await world.bench.depth() == (0, 0)
    for pattern in (
        "queue:[0-9]*",
        "ring:*",
        "deficit:*",
        "leases",
        "claims",
        "deadlines",
        "held:*",
        "tenant:*",
        "owned:*",
    ):
        assert await world.bench.redis.keys(world.bench.keys.prefix + pattern) == []
    assert all(s.outstanding_tokens == s.outstanding_requests == 0 for s in await world.bench.scheduler.workers())
