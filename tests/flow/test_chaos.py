"""Roles as separate processes over one Redis; each is killed with -9 while 80 requests stream.

None is lost, no token is doubled, and every text equals the undisturbed run's. One deployment goes through it all.
"""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from testkit.models.checkpoints import VOCAB, save_checkpoint
from testkit.processes.servers import Bench, Proc, Server, bench, free_port
from testkit.waiting import eventually, until

REQUESTS = 80
CONCURRENT = 16
LEASE_S = 3.0
TRIES = 240
"""Half a second apart."""
WORKERS = 2

pytestmark = pytest.mark.alone


@dataclass(kw_only=True)
class Cluster:
    """gateway, two schedulers, two attention workers and Redis, each a process of its own."""

    stage: Bench
    model: Path
    redis_port: int
    gateway_port: int
    redis: Proc
    schedulers: list[Proc] = field(default_factory=list)
    workers: list[Proc] = field(default_factory=list)
    gateway: Proc

    @property
    def common(self) -> dict[str, object]:
        return {"redis_url": f"redis://127.0.0.1:{self.redis_port}/0", "lease": LEASE_S}

    @property
    def server(self) -> Server:
        return Server(url=f"http://127.0.0.1:{self.gateway_port}", proc=self.gateway)

    def start_worker(self) -> None:
        options = {"dtype": "float32", "kv_blocks": 256, "max_num_seqs": 8}
        self.workers.append(self.stage.role("attention", model=self.model, **options, **self.common))

    def start_scheduler(self) -> None:
        self.schedulers.append(self.stage.role("scheduler", **self.common))

    def start_gateway(self) -> None:
        options = {"port": self.gateway_port, "served_model_name": "tiny", "max_queued_requests": 1000}
        self.gateway = self.stage.role("gateway", model=self.model, **options, **self.common)

    def start_redis(self) -> None:
        self.redis = self.stage.redis(port=self.redis_port)

    def leader(self) -> Proc:
        """The scheduler that leads, by its own metrics line in Redis: the lock's holder names its pid."""
        with redis.Redis(port=self.redis_port, decode_responses=True) as client:
            holder = str(client.get("{expertmesh}:leader"))
        return next(proc for proc in self.schedulers if f"-{proc.pid}-" in f"-{holder}-")

    def wait_whole(self) -> None:
        """Until nobody waits for the dead any more, and all who were started again are there."""
        self.server.wait_ready()
        with redis.Redis(port=self.redis_port) as client:
            until(lambda: client.zcard("{expertmesh}:workers") == WORKERS, "both workers, and no dead one")
            until(lambda: client.zcard("{expertmesh}:leases") == 0, "no lease left behind")


def start_cluster(stage: Bench, model: Path) -> Cluster:
    redis_port, gateway_port = free_port(), free_port()
    placeholder = stage.redis(port=redis_port)
    cluster = Cluster(
        stage=stage,
        model=model,
        redis_port=redis_port,
        gateway_port=gateway_port,
        redis=placeholder,
        gateway=placeholder,
    )
    cluster.start_gateway()
    for _ in range(WORKERS):
        cluster.start_scheduler()
        cluster.start_worker()
    cluster.wait_whole()
    return cluster


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    prompt: list[int]
    max_tokens: int
    temperature: float
    seed: int


def loads() -> list[Load]:
    rng = random.Random(4)
    return [
        Load(
            prompt=[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 120))],
            max_tokens=rng.randint(60, 200),
            temperature=rng.choice([0.0, 0.8]),
            seed=i,
        )
        for i in range(REQUESTS)
    ]


class Refused(httpx.TransportError):
    """The gateway takes no new request for now."""


@dataclass(kw_only=True, slots=True)
class Trouble:
    """What clients saw: new requests refused with 503, and connections that broke."""

    refused: int = 0
    broken: int = 0
    tokens: int = field(default=0, compare=False)


async def stream_tokens(client: httpx.AsyncClient, load: Load, key: str) -> AsyncIterator[list[int]]:
    body = {
        "model": "tiny",
        "prompt": load.prompt,
        "max_tokens": load.max_tokens,
        "temperature": load.temperature,
        "seed": load.seed,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    async with client.stream("POST", "/v1/completions", json=body, headers={"Idempotency-Key": key}) as response:
        if response.status_code in (429, 503):
            raise Refused(f"{response.status_code}: try again")
        assert response.status_code == 200, await response.aread()
        finished = False
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                assert finished
                return
            if line.startswith("data: "):
                chunk: dict[str, Any] = json.loads(line[6:])
                assert "error" not in chunk, chunk
                for choice in chunk["choices"]:
                    finished = finished or choice["finish_reason"] == "length"
                    yield choice["token_ids"]
        raise httpx.ReadError("the stream ended without [DONE]")


async def one_request(client: httpx.AsyncClient, load: Load, trouble: Trouble) -> list[int]:
    """The request's tokens; a client that loses its gateway retries with the same Idempotency-Key."""
    key = str(uuid.uuid4())
    for _ in range(TRIES):
        tokens: list[int] = []
        try:
            async for piece in stream_tokens(client, load, key):
                tokens += piece
                trouble.tokens += len(piece)
            return tokens
        except Refused:
            trouble.refused += 1
        except httpx.TransportError:
            trouble.broken += 1
        await asyncio.sleep(0.5)
    raise AssertionError(f"a request was lost: {TRIES} tries in vain")


async def run_loads(url: str, disturb: Callable[[], Awaitable[None]] | None = None) -> tuple[list[list[int]], Trouble]:
    trouble = Trouble()
    gate = asyncio.Semaphore(CONCURRENT)

    async def guarded(client: httpx.AsyncClient, load: Load) -> list[int]:
        async with gate:
            return await one_request(client, load, trouble)

    async with httpx.AsyncClient(base_url=url, timeout=300, limits=httpx.Limits(max_connections=None)) as client:
        tasks = [asyncio.create_task(guarded(client, load)) for load in loads()]
        if disturb:
            await eventually(lambda: trouble.tokens >= 10, "the first ten tokens")
            await disturb()
            assert not all(task.done() for task in tasks), "the disturbance came after the load"
        return list(await asyncio.gather(*tasks)), trouble


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("chaos"), "qwen3_moe", seed=3, num_hidden_layers=4)


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with bench(tmp_path_factory.mktemp("cluster")) as stage:
        yield start_cluster(stage, model)


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[list[int]]:
    answers, trouble = asyncio.run(run_loads(cluster.server.url))
    assert trouble == Trouble()
    assert [len(tokens) for tokens in answers] == [load.max_tokens for load in loads()]
    return answers


async def kill_worker(cluster: Cluster) -> None:
    cluster.workers.pop(0).kill9()
    cluster.start_worker()
    await asyncio.sleep(0.5)


async def kill_leader(cluster: Cluster) -> None:
    leader = cluster.leader()
    leader.kill9()
    cluster.schedulers.remove(leader)
    await asyncio.sleep(0.5)
    cluster.start_scheduler()


async def restart_gateway(cluster: Cluster) -> None:
    cluster.gateway.kill9()
    await asyncio.sleep(0.5)
    cluster.start_gateway()


async def kill_redis(cluster: Cluster) -> None:
    cluster.redis.kill9()
    await asyncio.sleep(1.0)
    cluster.start_redis()


@pytest.mark.parametrize("fault", [kill_worker, kill_leader, restart_gateway, kill_redis])
def test_no_request_lost_no_token_doubled(
    fault: Callable[[Cluster], Awaitable[None]], cluster: Cluster, undisturbed: list[list[int]]
) -> None:
    lost_before = cluster.server.metric("expertmesh_lost_attempts_total")
    answers, trouble = asyncio.run(run_loads(cluster.server.url, lambda: fault(cluster)))
    assert answers == undisturbed
    if fault is kill_worker:
        assert cluster.server.metric("expertmesh_lost_attempts_total") > lost_before
    assert (trouble.broken > 0) == (fault is restart_gateway), "no other death breaks a stream"
    assert trouble.refused == 0 or fault in (kill_redis, restart_gateway)
    cluster.wait_whole()
