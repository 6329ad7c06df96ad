"""`expertmesh queue` over a real queue: what an operator sees, and a retry that outlives a lost worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from testkit.waiting import LIMIT_S

from services.cli import queue as queue_cli
from services.config import Settings
from services.errors import UnreadableMessage
from services.messages import GenerateRequest, SamplingParams, TokenEvent, WorkerInfo
from services.queue.dead_letters import DeadLetters
from services.queue.gateway_side import GatewayQueue
from services.queue.keys import Keys
from services.queue.limits import QueueLimits
from services.queue.quarantine import Quarantine
from services.queue.scheduler_side import SchedulerQueue
from services.queue.scripts import Scripts
from services.queue.worker_side import WorkerQueue
from services.runtime.local_servers import announce
from services.runtime.run_folder import RunFolder


@dataclass
class Deployment:
    """A leading scheduler and one worker, moved by hand; the first lost attempt of a request is its last."""

    url: str
    redis: Redis
    scheduler: SchedulerQueue
    worker: WorkerQueue
    letters: DeadLetters
    keys: Keys
    epoch: int
    cli: Callable[..., Any]

    async def kill(self, request_id: str) -> None:
        """Admits a request and lets it fail until it is dead-lettered."""
        gateway = GatewayQueue(self.redis, self.keys, "g1", QueueLimits(max_attempts=1))
        await gateway.heartbeat(60)
        await gateway.admit([_request(request_id)], timeout_s=600)
        await self.assigned()
        await self.lose(request_id)
        assert [letter.request.id for letter in await self.letters.list()] == [request_id]

    async def assigned(self) -> GenerateRequest:
        """The next request, once there is one, in the hands of the worker."""
        async with asyncio.timeout(LIMIT_S):
            while not (claimed := await self.scheduler.claim(self.epoch, 1)):
                await asyncio.sleep(0.02)
        assert all(await self.scheduler.assign(self.epoch, [(claimed[0].request, "w")]))
        return claimed[0].request

    async def lose(self, request_id: str) -> None:
        await self.redis.zadd(self.keys.leases, {request_id: 1})
        await self.scheduler.reap(self.epoch)

    async def run(self, code: int, *argv: str) -> Any:
        return await asyncio.to_thread(self.cli, code, "queue", *argv, "--redis-url", self.url)


def _request(request_id: str) -> GenerateRequest:
    return GenerateRequest(
        id=request_id,
        attempt=0,
        token_ids=[11, 12],
        prompt_len=2,
        sampling=SamplingParams(max_tokens=3),
        deadline_ms=0,
        priority=5,
        tenant="alice",
        reply_to="g1",
    )


@pytest.fixture
async def deployment(redis_url: str, run: Callable[..., Any]) -> AsyncIterator[Deployment]:
    redis, keys, limits = Redis.from_url(redis_url), Keys("expertmesh"), QueueLimits(max_attempts=1)
    scheduler, worker = SchedulerQueue(redis, keys, limits), WorkerQueue(redis, keys, limits)
    epoch = await scheduler.campaign("leader", 60)
    assert epoch is not None
    info = WorkerInfo(
        id="w", model="m", fingerprint="f", kv_tokens=1, max_num_seqs=8, max_model_len=9, host="h", pid=1, version="0"
    )
    await worker.register(info, 60, credit_tokens=1000, credit_requests=10)
    yield Deployment(redis_url, redis, scheduler, worker, DeadLetters(redis, keys, limits), keys, epoch, run)
    await redis.aclose()


async def test_list_show_and_drop(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(queue_cli, "load_codec")  # a tokenizer is for what prints text of a model that is named
    assert (await deployment.run(0, "list")).out == "no dead letters\n"
    await deployment.kill("r1")
    assert (await deployment.run(0, "list")).out.startswith("r1  20")
    shown = (await deployment.run(0, "show", "r1")).out.splitlines()
    rows = {name.strip(): value.strip() for name, value in (line.split("  ", 1) for line in shown)}
    assert (rows["tenant"], rows["prompt"], rows["last worker"]) == ("alice", "11 12", "w")
    with RunFolder() as folder:
        announce(folder, Settings(model=Path("m")), url="http://here", redis_url=deployment.url)
        for options in ((), ("--url", "http://here")):
            assert (await asyncio.to_thread(deployment.cli, 0, "queue", "list", *options)).out.startswith("r1  20")
        said = await asyncio.to_thread(deployment.cli, 2, "queue", "list", "--namespace", "other")
        assert "No server on this machine matches the options" in said.err
    assert "No server runs on this machine" in (await asyncio.to_thread(deployment.cli, 2, "queue", "list")).err
    await deployment.run(0, "drop", "r1", "--model", "any")
    assert await deployment.letters.list() == []


async def test_a_prompt_does_not_steer_the_terminal(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    await deployment.kill("r1")
    monkeypatch.setattr(queue_cli, "load_codec", lambda *_: _Steering())
    monkeypatch.setattr(queue_cli, "read_tokenizer_config", lambda _: None)
    out = (await deployment.run(0, "show", "r1", "--model", "any")).out
    assert "\x1b" not in out
    assert len(out.splitlines()) == 10
    assert "prompt       \\x1b[31mred\\ntenant  mallory" in out


class _Steering:
    def decode(self, token_ids: Sequence[int]) -> str:
        return "\x1b[31mred\ntenant  mallory" if token_ids else ""


async def test_retry_follows_to_the_end(deployment: Deployment) -> None:
    deployment.scheduler = SchedulerQueue(deployment.redis, deployment.keys, QueueLimits(max_attempts=1))
    await deployment.kill("r1")
    deployment.scheduler = SchedulerQueue(deployment.redis, deployment.keys, QueueLimits(max_attempts=5))
    retry = asyncio.create_task(deployment.run(0, "retry", "r1"))
    first = await deployment.assigned()
    assert first.token_ids == [11, 12]
    await deployment.worker.publish("w", [_token(first, 0, 21)])
    await deployment.lose("r1")
    second = await deployment.assigned()
    assert second.attempt > first.attempt
    assert second.token_ids == [11, 12, 21], "what was delivered is not computed again"
    last = TokenEvent(request_id="r1", attempt=second.attempt, index=2, token_id=23, finish="length")
    await deployment.worker.publish("w", [_token(second, 1, 22), last])
    assert (await retry).out == "21 22 23\nfinished: length, 3 tokens\n"
    assert await deployment.letters.list() == []


def _token(request: GenerateRequest, index: int, token_id: int) -> TokenEvent:
    return TokenEvent(request_id=request.id, attempt=request.attempt, index=index, token_id=token_id)


async def test_a_retry_that_fails_again_says_so(deployment: Deployment) -> None:
    await deployment.kill("r1")
    retry = asyncio.create_task(deployment.run(1, "retry", "r1"))
    await deployment.assigned()
    await deployment.lose("r1")
    assert "failed: " in (await retry).out
    assert [letter.request.id for letter in await deployment.letters.list()] == ["r1"]


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["show", "none"], 1, "none"),
        (["retry", "none"], 1, "none"),
        (["show"], 2, "all other actions need one"),
        (["list", "r1"], 2, "`list` and `unreadable` take no id"),
        (["lst"], 2, "invalid choice: 'lst'"),
    ],
)
async def test_mistakes(deployment: Deployment, argv: list[str], code: int, message: str) -> None:
    assert message in (await deployment.run(code, *argv)).err


def test_without_redis_it_says_what_to_do(tmp_path: Path, run: Callable[..., Any]) -> None:
    assert "--redis-url" in run(2, "queue", "list").err
    assert "Traceback" not in run(1, "queue", "list", "--redis-url", f"unix://{tmp_path}/none.sock").err


async def test_what_could_not_be_read_is_listed(deployment: Deployment) -> None:
    assert (await deployment.run(0, "unreadable")).out == "nothing was unreadable\n"
    quarantine = Quarantine(Scripts(deployment.redis, deployment.keys, QueueLimits()), "gateway")
    why = UnreadableMessage("a list of events of 3 bytes: \x1b[31mno")
    await quarantine.put("event", "r1\x1b[2J", why, b"\xc1\x1b[")
    first, data = (await deployment.run(0, "unreadable")).out.splitlines()
    assert "event of r1\\x1b[2J  read by gateway  a list of events of 3 bytes: \\x1b[31mno" in first
    assert data == r"    b'\xc1\x1b['"
