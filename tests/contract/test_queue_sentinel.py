"""Redis under Sentinel: the queue goes on at the new primary, and nothing that was replicated is lost."""

from __future__ import annotations

import asyncio
import time
from array import array
from functools import partial

import pytest
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis
from testkit.models.stepping import SteppingEngine, continuation
from testkit.processes.roles import KEYS, Deployment
from testkit.queue.client import check, finish
from testkit.queue.sentinels import PASSWORD, Watched, watched_redis
from testkit.waiting import LIMIT_S, eventually
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from services.config.redis_url import SentinelUrl
from services.errors import ConfigError, QueueUnavailable
from services.gateway.budget import Holdings
from services.gateway.job import Choice, Job, Rendering
from services.gateway.results import ResultFollower
from services.gateway.table import JobTable
from services.gateway.targets import LatencyTargets
from services.gateway.tokenizer import SpecialTokens, TextCodec
from services.messages import GenerateRequest, SamplingParams
from services.metrics import GatewayMetrics
from services.queue.connect import check_server, command, connect
from services.queue.embedded import find_redis_server
from services.queue.gateway_side import GatewayQueue
from services.queue.prompts import prompt_name
from services.runtime.tasks import end_tasks

PROMPTS = [[n, n + 1] for n in range(8)]


@pytest.fixture
def watched():
    with watched_redis(str(find_redis_server())) as found:
        yield found


async def test_requests_pause_at_a_failover_and_go_on_with_the_same_tokens(watched: Watched) -> None:
    async with Deployment(watched.url, max_attempts=8) as deployment:
        deployment.worker(engine=SteppingEngine(step_s=0.05))
        scheduler = deployment.scheduler()
        client = await deployment.client()
        streams = await client.submit(*PROMPTS, max_tokens=80, timeout_s=600)
        await streams[0].first_token.wait()
        await asyncio.to_thread(watched.kill_primary)
        await finish(streams, timeout_s=3 * LIMIT_S)
        check(streams, 80)
        later = await client.submit([99], max_tokens=3)
        await finish(later)
        check(later, 3)
        await eventually(lambda: scheduler.value("scheduler_leader") == 1)
        redis = deployment.connection()
        await eventually(partial(_answers, redis))
        assert (await redis.role())[0] == b"master"
        assert (await redis.info("server"))["tcp_port"] == watched.replica


class Gateway:
    """The gateway's own follower and table over its own queue client: a gateway without HTTP."""

    def __init__(self, deployment: Deployment) -> None:
        metrics = GatewayMetrics(CollectorRegistry())
        self.queue = GatewayQueue(deployment.connection(), KEYS, "gateway", deployment.limits)
        self.table = JobTable(metrics, LatencyTargets(metrics, ttft_s=2.0, tpot_s=0.1), Holdings(1 << 30))
        self.follower = ResultFollower(
            self.queue, self.table, metrics, lease_s=1.0, own_lease_s=30, request_timeout_s=60
        )
        self.codec = TextCodec(Tokenizer(WordLevel({"a": 0})), SpecialTokens(bos_token=None, eos_token=None))

    async def ask(self, prompt: list[int], max_tokens: int) -> Choice:
        ids = array("i", prompt)
        request = GenerateRequest(
            id=f"request-{prompt[0]}",
            attempt=1,
            token_ids=[],
            prompt_len=len(prompt),
            sampling=SamplingParams(max_tokens=max_tokens),
            deadline_ms=0,
            priority=5,
            tenant="tenant",
            reply_to="gateway",
            prompt=prompt_name("tenant", ids.tobytes()),
        )
        choice = Choice(0, request, ids, self.codec, Rendering())
        job = Job(job_id=request.id, choices=[choice], n=1, tenant="tenant", created=0, arrived=time.monotonic())
        self.table.add(job)
        [granted] = await self.queue.admit([request], timeout_s=60, prompts=job.prompts)
        choice.grant(granted)
        job.admitted = True
        return choice


async def test_what_a_failover_loses_though_it_was_acknowledged_is_made_good(watched: Watched) -> None:
    """The replica has neither the last tokens nor a whole request when it becomes the primary."""
    async with Deployment(watched.url, lease_s=2.0, max_attempts=8) as deployment:
        engine = SteppingEngine(step_s=0.05)
        deployment.worker(engine=engine)
        deployment.scheduler()
        gateway = Gateway(deployment)
        following = asyncio.create_task(gateway.follower.run())
        choices = [await gateway.ask(prompt, 80) for prompt in PROMPTS]
        await eventually(lambda: all(choice.generated for choice in choices))
        await asyncio.to_thread(watched.cut_replica)
        before = [len(choice.generated) for choice in choices]
        choices.append(await gateway.ask([99], 80))
        await eventually(lambda: choices[-1].generated and all(len(c.generated) > n for c, n in zip(choices, before)))  # noqa: B905
        assert not any(choice.finish for choice in choices)
        await asyncio.to_thread(watched.lose_primary)
        await eventually(lambda: following.done() or all(choice.finish for choice in choices))
        for choice in choices:
            assert (choice.finish, choice.error) == ("length", None)
            assert list(choice.generated) == continuation(list(choice.prompt), 80)
        redis = deployment.connection()
        await eventually(partial(_answers, redis))
        assert (await redis.info("server"))["tcp_port"] == watched.replica
        await end_tasks([following])


async def _answers(redis: Redis) -> bool:
    """For a moment Sentinels may know of no primary again: as workers do, a new connection asks again."""
    try:
        await check_server(redis)
    except QueueUnavailable:
        return False
    return True


async def test_without_a_sentinel_redis_is_away_and_a_wrong_name_is_too(watched: Watched) -> None:
    for url in (watched.url.replace("/mymaster/", "/other/"), "redis+sentinel://127.0.0.1:1/mymaster"):
        redis = connect(url)
        with pytest.raises(QueueUnavailable):
            await command(redis, "PING")
        await redis.aclose()


async def test_a_password_that_redis_refuses_is_said(watched: Watched) -> None:
    redis = connect(watched.url.replace(PASSWORD, "wrong"))
    with pytest.raises(ConfigError, match="rejects the credentials"):
        await check_server(redis)
    await redis.aclose()


def test_a_url_names_sentinels_the_primary_and_how_to_log_in() -> None:
    url = SentinelUrl.parse("rediss+sentinel://u:p%40@a:1,[::1]:2,c/my/3?sentinel_password=s&ssl_ca_certs=/ca.crt")
    assert url.sentinels == (("a", 1), ("::1", 2), ("c", 26379))
    assert (url.name, url.db, url.tls, url.username, url.password) == ("my", 3, True, "u", "p@")
    redis = connect("rediss+sentinel://u:p@a:1/my/3?sentinel_password=s&ssl_ca_certs=/ca.crt&ssl_check_hostname=false")
    pool = redis.connection_pool
    [sentinel] = pool.sentinel_manager.sentinels
    theirs, own = sentinel.connection_pool.connection_kwargs, pool.connection_kwargs
    assert (theirs["password"], theirs["host"], own["password"], own["username"]) == ("s", "a", "p", "u")
    for found in (theirs, own):
        assert (found["ssl_ca_certs"], found["ssl_check_hostname"]) == ("/ca.crt", False)
    assert "SSL" in pool.connection_class.__name__
    assert "SSL" in sentinel.connection_pool.connection_class.__name__


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("redis+sentinel://a:1", "lacks the primary's name"),
        ("redis+sentinel://a:1,:2/m", "lacks a Sentinel's host"),
        ("redis+sentinel://a:x/m", "Port could not be cast"),
        ("redis+sentinel://a/m/x", "invalid literal"),
        ("redis+sentinel://a/m?tls=1", "has an unknown option tls"),
    ],
)
def test_a_url_that_sentinels_cannot_be_found_by_is_refused(url: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        connect(url)
