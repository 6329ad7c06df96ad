"""Disaggregated experts: the recorded answers while attention workers die, all experts go, or Redis does."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import redis
from testkit.pocket.answers import POCKET, answers_while, recorded
from testkit.processes.servers import Bench, Proc, Server, bench, free_port
from testkit.waiting import until

from services.routing import decode_table

LEASE_S = 2.0
LONG_LEASE_S = 8.0
"""Where one heartbeat that comes late, with more processes than cores, must cost nobody its lease."""
AWAY_S = 12.0
EXPERTS, ATTENTION = 3, 2
LONG_TOKENS = 200

pytestmark = pytest.mark.alone


def start(stage: Bench, **options: object) -> Server:
    """Two attention workers, three expert workers in two groups, the pocket model."""
    server = stage.serve(
        POCKET / "model",
        **{
            "served_model_name": "pocket",
            "dtype": "float32",
            "threads": 1,
            "lease": LEASE_S,
            "layout": "disaggregated",
            "expert_workers": EXPERTS,
            "expert_groups": 2,
            "workers": ATTENTION,
        }
        | options,
    )
    until(lambda: server.metric("expertmesh_expert_seats") == EXPERTS, "all seats are listed")
    until(lambda: server.metric("expertmesh_workers") == ATTENTION, "all attention workers are there")
    return server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with bench(tmp_path_factory.mktemp("disaggregated")) as stage:
        yield start(stage, experts_timeout=0.5)


def test_an_attention_worker_killed_with_disaggregated_experts_loses_nothing(server: Server) -> None:
    victim = server.of_role("attention")[0]
    asyncio.run(answers_while(server, victim.kill))
    assert server.metric("expertmesh_lost_attempts_total") > 0
    until(lambda: server.metric("expertmesh_workers") == ATTENTION, "another one was started")


def test_experts_that_are_all_gone_for_longer_than_the_timeout_cost_no_request(server: Server) -> None:
    def kill_experts() -> None:
        """Those that the supervisor starts meanwhile, too: three lives of each are short enough to be forgiven."""
        for _ in range(3):
            for worker in server.of_role("experts"):
                worker.kill()
            time.sleep(0.5)

    asyncio.run(answers_while(server, kill_experts))
    assert server.metric("expertmesh_given_up_attempts_total") > 0
    assert server.metric("expertmesh_request_errors_total") == 0


@pytest.fixture
def with_redis(tmp_path: Path) -> Iterator[tuple[Bench, int, Proc]]:
    with bench(tmp_path) as stage:
        port = free_port()
        yield stage, port, stage.redis(port=port)
        for proc in stage.procs:
            if proc.name == "serve":  # before its Redis
                proc.stop()


def test_a_redis_that_is_emptied_while_answers_stream_costs_nothing(with_redis: tuple[Bench, int, Proc]) -> None:
    stage, port, _ = with_redis
    server = start(stage, redis_url=f"redis://127.0.0.1:{port}/0", lease=LONG_LEASE_S)
    seats: set[int] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            seats.update(_seats_of_the_table(port))

    def flush() -> None:
        with redis.Redis(port=port) as client:
            client.flushall()

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            asyncio.run(answers_while(server, flush))
            until(lambda: bool(_seats_of_the_table(port)), "the table is back")
        finally:
            done.set()
    watching.result()
    assert seats == {EXPERTS}, "no table was smaller"


def _seats_of_the_table(port: int) -> list[int]:
    """How many seats the published table lists; [] without a table."""
    with redis.Redis(port=port) as client:
        return [len(decode_table(fields[b"t"]).seats) for _, fields in client.xrange("{expertmesh}:table")]


def test_while_redis_is_away_engines_go_on_over_the_experts_and_nothing_new_is_admitted(
    with_redis: tuple[Bench, int, Proc],
) -> None:
    stage, port, server_of_redis = with_redis
    server = start(stage, redis_url=f"redis://127.0.0.1:{port}/0", lease=LONG_LEASE_S)
    tokens: list[float] = []

    def outage() -> None:
        server_of_redis.kill9()
        began = time.monotonic()
        tokens.append(server.metric("expertmesh_decode_tokens_total"))
        until(lambda: not server.ready(), "the gateway noticed")
        time.sleep(max(0.0, began + AWAY_S - time.monotonic()))
        tokens.append(server.metric("expertmesh_decode_tokens_total"))
        body = {"model": "pocket", "prompt": "x", "max_tokens": 1}
        refused = httpx.post(f"{server.url}/v1/completions", json=body, timeout=10)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        stage.redis(port=port)

    asyncio.run(answers_of_one_batch(server, outage))
    assert tokens[1] > tokens[0], "the experts were asked without Redis"
    assert server.metric("expertmesh_lost_attempts_total") == 0
    until(lambda: server.metric("expertmesh_expert_seats") == EXPERTS, "all seats are listed")


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
