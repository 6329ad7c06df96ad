"""Real Redis servers for the queue's contract: every test runs on the chart's version, and by night on the oldest."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from msgspec import structs
from redis.asyncio import Redis
from testkit.fabric.expert_floor import Floor
from testkit.native import Absent
from testkit.queue.redis_server import APPEND_ONLY, LOADS, NAMESPACE, RedisServer, running_redis
from testkit.queue.redis_versions import CHARTED, EMBEDDED, OLDEST, binary_of

from services.messages import (
    AttemptLost,
    FinishReason,
    GenerateRequest,
    ResultEvent,
    SamplingParams,
    TokenEvent,
    WorkerInfo,
)
from services.queue.connect import connect
from services.queue.dead_letters import DeadLetters
from services.queue.gateway_side import FIRST_ID, GatewayQueue
from services.queue.keys import Keys
from services.queue.limits import QueueLimits
from services.queue.prompts import unpack_ids, whole
from services.queue.scheduler_side import SchedulerQueue
from services.queue.worker_side import WorkerQueue
from services.wire import WIRE

if TYPE_CHECKING:
    from testkit.gpu.workers import GpuPool


class Bench:
    """One gateway ``g1``, one leading scheduler and any workers over one Redis, with shortcuts for tests. Each role is
    the user that it would be; ``redis`` is the test's own connection, which may do anything."""

    def __init__(self, redis: Redis, limits: QueueLimits, namespace: str = NAMESPACE) -> None:
        self.redis = redis
        self.limits = limits
        self.keys = Keys(namespace)
        self._clients: dict[str, Redis] = {}
        self.gateway = self.new_gateway("g1")
        self.scheduler = SchedulerQueue(self.user("scheduler"), self.keys, limits)
        self.worker = WorkerQueue(self.user("attention"), self.keys, limits)
        self.dead = DeadLetters(self.user("scheduler"), self.keys, limits)
        self.epoch = 0
        self._ids = itertools.count()
        self._read: dict[str, str] = {}

    def user(self, role: str) -> Redis:
        """The role's connection."""
        if role not in self._clients:
            path, name = self.redis.connection_pool.connection_kwargs["path"], role + LOADS
            self._clients[role] = connect(f"unix://{name}:{name}@{path}")
        return self._clients[role]

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()

    def new_gateway(self, incarnation: str) -> GatewayQueue:
        return GatewayQueue(self.user("gateway"), self.keys, incarnation, self.limits)

    async def lead(self) -> None:
        epoch = await self.scheduler.campaign("leader", 60)
        assert epoch is not None
        self.epoch = epoch

    async def add_worker(
        self, worker_id: str, *, tokens: int = 100_000, requests: int = 100, lease_s: float = 60
    ) -> None:
        info = self.worker_info(worker_id)
        await self.worker.register(info, lease_s, credit_tokens=tokens, credit_requests=requests)

    def request(
        self,
        request_id: str | None = None,
        *,
        tenant: str = "t",
        priority: int = 5,
        prompt: int = 4,
        max_tokens: int = 8,
        reply_to: str = "g1",
    ) -> GenerateRequest:
        return GenerateRequest(
            id=request_id or f"r{next(self._ids)}",
            attempt=0,
            token_ids=list(range(prompt)),
            prompt_len=prompt,
            sampling=SamplingParams(max_tokens=max_tokens),
            deadline_ms=0,
            priority=priority,
            tenant=tenant,
            reply_to=reply_to,
        )

    async def admit(self, *requests: GenerateRequest, timeout_s: float = 600) -> list[GenerateRequest]:
        return await self.gateway.admit(requests, timeout_s=timeout_s)

    async def claim(self, count: int = 100) -> list[GenerateRequest]:
        """Claimed requests, each with its prompt, as they were admitted."""
        return [await self.whole(claim.request) for claim in await self.scheduler.claim(self.epoch, count)]

    async def whole(self, request: GenerateRequest) -> GenerateRequest:
        """A claimed request with its prompt and without its time in the queue, as its gateway keeps it."""
        request = structs.replace(request, queued_ms=0)
        if not request.prompt:
            return request
        return whole(request, unpack_ids(await self.redis.get(self.keys.prompt(request.prompt))))

    async def depth(self) -> tuple[int, int]:
        """(requests, tokens) that wait in the queue."""
        depth = await self.scheduler.depth()
        return depth.requests, depth.tokens

    async def run_on(self, worker_id: str, *requests: GenerateRequest) -> list[GenerateRequest]:
        """Admits ``requests`` and assigns them to a worker."""
        await self.admit(*requests)
        claimed = [claim.request for claim in await self.scheduler.claim(self.epoch, 100)]
        found = [await self.whole(request) for request in claimed]
        assert all(await self.scheduler.assign(self.epoch, [(request, worker_id) for request in claimed]))
        return found

    async def events(self, incarnation: str = "g1") -> list[ResultEvent]:
        """What is new in a gateway's stream."""
        stream, found = self.new_gateway(incarnation), list[ResultEvent]()
        while True:
            last_id, events = await stream.follow(self._read.get(incarnation, FIRST_ID), 0)
            self._read[incarnation] = last_id
            found += events
            if not events:
                return found

    def read_to(self, incarnation: str) -> str:
        """The id of the last entry that :meth:`events` has read."""
        return self._read.get(incarnation, FIRST_ID)

    async def state(self, request_id: str) -> str:
        state = await self.redis.hget(self.keys.request(request_id), "state")
        return state.decode() if state else "missing"

    async def attempt(self, request_id: str) -> int:
        return int(await self.redis.hget(self.keys.request(request_id), "attempt") or 0)

    async def expire_lease(self, index: str, member: str) -> None:
        """Lets a lease end now: ``index`` is keys.leases, keys.workers or keys.gateways."""
        assert await self.redis.zscore(index, member) is not None
        await self.redis.zadd(index, {member: 1})

    @staticmethod
    def worker_info(worker_id: str, fingerprint: str = "f") -> WorkerInfo:
        return WorkerInfo(
            id=worker_id,
            model="m",
            fingerprint=fingerprint,
            kv_tokens=1,
            max_num_seqs=8,
            max_model_len=512,
            host="h",
            pid=1,
            version="0",
            wire=WIRE,
        )

    @staticmethod
    def token(
        request: GenerateRequest, index: int, *, finish: FinishReason | None = None, token_id: int | None = 7
    ) -> TokenEvent:
        return TokenEvent(request_id=request.id, attempt=request.attempt, index=index, token_id=token_id, finish=finish)

    @staticmethod
    def lost(events: list[ResultEvent]) -> list[tuple[str, int]]:
        return [(event.request_id, event.attempt) for event in events if isinstance(event, AttemptLost)]

    @staticmethod
    def ends(events: list[ResultEvent]) -> list[tuple[str, str | None]]:
        """(id, finish reason or error code) of the ends among ``events``."""
        return [
            (event.request_id, event.error.code if event.error else event.finish)
            for event in events
            if isinstance(event, TokenEvent) and event.finish
        ]

    async def outstanding(self, worker_id: str) -> tuple[int, int]:
        """(tokens, requests) that a worker has of its credit in use."""
        states = {state.info.id: state for state in await self.scheduler.workers()}
        return states[worker_id].outstanding_tokens, states[worker_id].outstanding_requests

    async def live(self, tenant: str = "t") -> int:
        return int(await self.redis.zcard(f"{self.keys.prefix}tenant:{tenant}"))

    async def order(self) -> list[str]:
        """Ids in the order in which they would be claimed; everything is put back."""
        claimed = await self.claim(10_000)
        await self.scheduler.release(self.epoch, claimed)
        return [request.id for request in claimed]


@pytest.fixture(
    scope="session",
    params=[
        CHARTED,
        *(pytest.param(each, marks=pytest.mark.night("services/queue")) for each in (OLDEST, EMBEDDED)),
    ],
)
def redis_server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    try:
        binary = binary_of(request.param)
    except Absent as absent:
        pytest.skip(f"Redis {request.param}: {absent}")
    with running_redis(binary, "--appendonly", "no") as server:
        yield server


@pytest.fixture
def new_redis_server() -> Iterator[Callable[..., RedisServer]]:
    """Makes servers (binary, *options) that the test starts and that end with it."""
    made: list[RedisServer] = []

    def make(binary: str, *options: str) -> RedisServer:
        made.append(RedisServer(binary, *options))
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator[Redis]:
    client = connect(redis_server.url)
    await client.flushall()
    yield client
    await client.aclose()
    await asyncio.sleep(0)


@pytest.fixture
def queue_limits() -> QueueLimits:
    return QueueLimits()


@pytest.fixture
async def new_bench(queue_limits: QueueLimits) -> AsyncIterator[Callable[[Redis], Awaitable[Bench]]]:
    benches: list[Bench] = []

    async def make(client: Redis) -> Bench:
        benches.append(Bench(client, queue_limits))
        await benches[-1].lead()
        await benches[-1].gateway.heartbeat(60)
        await benches[-1].gateway.look()
        return benches[-1]

    yield make
    for made in benches:
        await made.close()


@pytest.fixture
async def bench(redis: Redis, new_bench: Callable[[Redis], Awaitable[Bench]]) -> Bench:
    return await new_bench(redis)


@pytest.fixture
def floor(bench: Bench) -> Floor:
    return Floor(bench)


@pytest.fixture
async def durable_floor(
    redis_server: RedisServer,
    new_redis_server: Callable[..., RedisServer],
    new_bench: Callable[[Redis], Awaitable[Bench]],
) -> AsyncIterator[tuple[RedisServer, Floor]]:
    """A server that may be killed and started again with its data, and what is over it."""
    server = new_redis_server(redis_server.binary, *APPEND_ONLY)
    server.start()
    client = connect(server.url)
    yield server, Floor(await new_bench(client))
    await client.aclose()


@pytest.fixture
async def stepping(
    redis_server: RedisServer,
    new_redis_server: Callable[..., RedisServer],
    new_bench: Callable[[Redis], Awaitable[Bench]],
) -> AsyncIterator[tuple[RedisServer, Bench]]:
    """A server whose clock the test sets, and a bench over it."""
    try:
        server = new_redis_server(redis_server.binary).with_clock()
    except Absent as absent:
        pytest.skip(f"a clock that steps: {absent}")
    server.start()
    client = connect(server.url)
    yield server, await new_bench(client)
    await client.aclose()


@pytest.fixture(scope="session")
def gpu_pools() -> Iterator[Callable[[int], GpuPool]]:
    """Expert workers on so many GPUs, for all tests; skips where there are fewer."""
    from testkit.gpu.workers import GpuPool, why_not  # torch, which the queue needs not

    pools: dict[int, GpuPool] = {}

    def pool(gpus: int) -> GpuPool:
        if reason := why_not(gpus):
            pytest.skip(f"between GPUs: {reason}")
        return pools.setdefault(gpus, GpuPool(gpus))

    yield pool
    for one in pools.values():
        one.close()
