"""Disaggregated experts: the recorded answers while attention workers die, all experts go, or Redis does.

One deployment goes through it all: two attention workers, three expert workers in two groups, a Redis of its own.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest
import redis
from testkit.pocket.answers import answers_while, recorded, serve_pocket
from testkit.processes.servers import Bench, Proc, Server, bench, free_port
from testkit.waiting import until

from services.routing import decode_table

LEASE_S = 8.0
"""One heartbeat that comes late, with more processes than cores, must cost nobody its lease."""
AWAY_S = 12.0
EXPERTS, ATTENTION = 3, 2
LONG_TOKENS = 200

pytestmark = pytest.mark.alone


@dataclass(kw_only=True)
class Deployment:
    stage: Bench
    redis_port: int
    redis: Proc
    server: Server

    def wait_whole(self) -> None:
        until(lambda: self.server.metric("expertmesh_expert_seats") == EXPERTS, "all seats are listed")
        until(lambda: self.server.metric("expertmesh_workers") == ATTENTION, "all attention workers are there")

    def seats_of_the_table(self) -> list[int]:
        """How many seats the published table lists; [] without a table."""
        with redis.Redis(port=self.redis_port) as client:
            return [len(decode_table(fields[b"t"]).seats) for _, fields in client.xrange("{expertmesh}:table")]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with bench(tmp_path_factory.mktemp("disaggregated")) as stage:
        port = free_port()
        proc = stage.redis(port=port)
        server = serve_pocket(
            stage,
            redis_url=f"redis://127.0.0.1:{port}/0",
            lease=LEASE_S,
            layout="disaggregated",
            expert_workers=EXPERTS,
            expert_groups=2,
            workers=ATTENTION,
            experts_timeout=0.5,
        )
        yield Deployment(stage=stage, redis_port=port, redis=proc, server=server)


@pytest.fixture
def deployment(started: Deployment) -> Deployment:
    started.wait_whole()
    return started


def test_an_attention_worker_killed_with_disaggregated_experts_loses_nothing(deployment: Deployment) -> None:
    server = deployment.server
    victim = server.of_role("attention")[0]
    asyncio.run(answers_while(server, victim.kill))
    assert server.metric("expertmesh_lost_attempts_total") > 0
    until(lambda: server.metric("expertmesh_workers") == ATTENTION, "another one was started")


def test_experts_that_are_all_gone_for_longer_than_the_timeout_cost_no_request(deployment: Deployment) -> None:
    server = deployment.server

    def kill_experts() -> None:
        """Those that the supervisor starts meanwhile, too: three lives of each are short enough to be forgiven."""
        for _ in range(3):
            for worker in server.of_role("experts"):
                worker.kill()
            time.sleep(0.5)

    asyncio.run(answers_while(server, kill_experts))
    assert server.metric("expertmesh_given_up_attempts_total") > 0
    assert server.metric("expertmesh_request_errors_total") == 0


def test_a_redis_that_is_emptied_while_answers_stream_costs_nothing(deployment: Deployment) -> None:
    seats: set[int] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            seats.update(deployment.seats_of_the_table())

    def flush() -> None:
        with redis.Redis(port=deployment.redis_port) as client:
            client.flushall()

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            asyncio.run(answers_while(deployment.server, flush))
            until(deployment.seats_of_the_table, "the table is back")
        finally:
            done.set()
    watching.result()
    assert seats == {EXPERTS}, "no table was smaller"


def test_while_redis_is_away_engines_go_on_over_the_experts_and_nothing_new_is_admitted(deployment: Deployment) -> None:
    server = deployment.server
    lost_before = server.metric("expertmesh_lost_attempts_total")
    tokens: list[float] = []

    def outage() -> None:
        deployment.redis.kill9()
        began = time.monotonic()
        tokens.append(server.metric("expertmesh_decode_tokens_total"))
        until(lambda: not server.ready(), "the gateway noticed")
        time.sleep(max(0.0, began + AWAY_S - time.monotonic()))
        tokens.append(server.metric("expertmesh_decode_tokens_total"))
        body = {"model": "pocket", "prompt": "x", "max_tokens": 1}
        refused = httpx.post(f"{server.url}/v1/completions", json=body, timeout=10)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        deployment.redis = deployment.stage.redis(port=deployment.redis_port)

    asyncio.run(answers_of_one_batch(server, outage))
    assert tokens[1] > tokens[0], "the experts were asked without Redis"
    assert server.metric("expertmesh_lost_attempts_total") == lost_before
    deployment.wait_whole()


async def answers_of_one_batch(server: Server, disturb: Callable[[], None]) -> None:
    """All at once, so that none is new while Redis is away; longer than the recorded ones, which they begin with."""
    wanted = recorded()[:64]
    asking = asyncio.create_task(long_answers(server.url, [record["prompt"] for record in wanted]))

    def with_workers() -> float:
        return server.metric("expertmesh_requests_running") + server.metric("expertmesh_requests_waiting")

    await asyncio.to_thread(until, lambda: with_workers() == len(wanted), "the workers have them all")
    await asyncio.to_thread(disturb)
    for record, found in zip(wanted, await asking, strict=True):
        assert len(found) == LONG_TOKENS
        assert found[: len(record["output_ids"])] == record["output_ids"]


async def long_answers(url: str, prompts: Sequence[str]) -> list[list[int]]:
    """The tokens of each."""
    body = {"model": "pocket", "max_tokens": LONG_TOKENS, "temperature": 0, "ignore_eos": True}
    limits = httpx.Limits(max_connections=len(prompts))
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        asked = (body | {"prompt": prompt, "return_token_ids": True} for prompt in prompts)
        answers = await asyncio.gather(*(client.post("/v1/completions", json=one) for one in asked))
    return [answer.raise_for_status().json()["choices"][0]["token_ids"] for answer in answers]
