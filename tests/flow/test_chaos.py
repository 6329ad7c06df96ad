"""Roles as separate processes over one Redis; each is killed with -9 while 80 requests stream.

None is lost, no token is doubled, and every text equals the undisturbed run's. One deployment goes through it all.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis
from chaos.load import TRY_AGAIN
from testkit.models.checkpoints import VOCAB, save_checkpoint
from testkit.processes.cluster import Cluster, Here, Shape
from testkit.processes.servers import bench
from testkit.waiting import eventually, until

from loadgen.client import StreamResult, stream_completion
from loadgen.connections import Broken, Session

REQUESTS, CONCURRENT = 80, 16
TRIES = 240
"""Half a second apart."""
SHAPE = Shape(attention=2, experts=0, schedulers=2, lease_s=3.0)
OWN: dict[str, dict[str, object]] = {
    "attention": {"layout": "local", "kv_blocks": 256, "max_num_seqs": 8},
    "gateway": {"served_model_name": "tiny", "max_queued_requests": 1000},
}

pytestmark = pytest.mark.alone


def own_options(name: str) -> dict[str, object]:
    return OWN.get(name.partition("-")[0], {})


def wait_whole(cluster: Cluster) -> None:
    """Until nobody waits for the dead any more, and all who were started again are there."""
    cluster.wait_whole()
    with redis.Redis.from_url(cluster.redis_url) as client:
        until(lambda: client.zcard("{expertmesh}:leases") == 0, "no lease left behind")


def bodies() -> list[dict[str, Any]]:
    rng = random.Random(4)
    return [
        {
            "model": "tiny",
            "prompt": [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 120))],
            "max_tokens": rng.randint(60, 200),
            "temperature": rng.choice([0.0, 0.8]),
            "seed": i,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        for i in range(REQUESTS)
    ]


@dataclass(kw_only=True, slots=True)
class Trouble:
    """What clients saw: new requests refused with 503, and connections that broke."""

    refused: int = 0
    broken: int = 0
    tokens: int = field(default=0, compare=False)
    """The most that one of them has."""

    def note(self, result: StreamResult) -> None:
        self.tokens = max(self.tokens, len(result.token_ids))


async def one_request(session: Session, url: str, body: dict[str, Any], trouble: Trouble) -> list[int]:
    """The request's tokens; a client that loses its gateway retries with the same Idempotency-Key."""
    headers = {"Idempotency-Key": str(uuid.uuid4())}
    for _ in range(TRIES):
        try:
            result = await stream_completion(session, url, body, headers=headers, on_progress=trouble.note)
        except Broken:
            trouble.broken += 1
        else:
            if result.status in TRY_AGAIN:
                trouble.refused += 1
            else:
                assert (result.status, result.error) == (200, None)
                if result.whole and result.finish_reason == "length":
                    return result.token_ids
                trouble.broken += 1
        await asyncio.sleep(0.5)
    raise AssertionError(f"a request was lost: {TRIES} tries in vain")


async def run_loads(url: str, disturb: Callable[[], Awaitable[None]] | None = None) -> tuple[list[list[int]], Trouble]:
    trouble = Trouble()
    gate = asyncio.Semaphore(CONCURRENT)

    async def guarded(session: Session, body: dict[str, Any]) -> list[int]:
        async with gate:
            return await one_request(session, url, body, trouble)

    async with Session() as session:
        tasks = [asyncio.create_task(guarded(session, body)) for body in bodies()]
        if disturb:
            await eventually(lambda: trouble.tokens >= 10, "the first ten tokens")
            await disturb()
            assert not all(task.done() for task in tasks), "the disturbance came after the load"
        return list(await asyncio.gather(*tasks)), trouble


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = save_checkpoint(tmp_path_factory.mktemp("chaos"), "qwen3_moe", seed=3, num_hidden_layers=4)
    with bench(tmp_path_factory.mktemp("cluster")) as stage:
        started = Cluster(stage, lambda name: Here(name=name), model, SHAPE, own_options)
        started.start()
        yield started


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[list[int]]:
    answers, trouble = asyncio.run(run_loads(cluster.server.url))
    assert trouble == Trouble()
    assert [len(tokens) for tokens in answers] == [body["max_tokens"] for body in bodies()]
    return answers


@pytest.mark.parametrize("victim", ["attention-0", "leader", "gateway", "redis"])
def test_no_request_lost_no_token_doubled(victim: str, cluster: Cluster, undisturbed: list[list[int]]) -> None:
    async def kill() -> None:
        name = cluster.leader() if victim == "leader" else victim
        assert name is not None
        cluster.kill9(name)
        await asyncio.sleep(0.5)
        cluster.start_one(name)

    lost_before = cluster.server.metric("expertmesh_lost_attempts_total")
    answers, trouble = asyncio.run(run_loads(cluster.server.url, kill))
    assert answers == undisturbed
    if victim == "attention-0":
        assert cluster.server.metric("expertmesh_lost_attempts_total") > lost_before
    assert (trouble.broken > 0) == (victim == "gateway"), "no other death breaks a stream"
    assert trouble.refused == 0 or victim in ("redis", "gateway")
    wait_whole(cluster)
