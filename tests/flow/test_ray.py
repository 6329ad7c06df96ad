"""A Ray cluster of three nodes serves the pocket model: kills lose nothing, the scheduler's numbers are followed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from testkit.pocket.answers import POCKET, assert_recorded, complete_all, recorded
from testkit.processes.servers import free_port, metric_sum
from testkit.waiting import LIMIT_S, until

ray = pytest.importorskip("ray", reason="Ray has no wheel for this Python")

pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]

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
    """Three nodes on this machine, each with a raylet of its own, and the application on them."""

    def __init__(self, folder: Path) -> None:
        from ray import serve
        from ray.cluster_utils import Cluster

        self._serve = serve
        self.cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False, "num_gpus": 0}
        )
        self.others = [self.cluster.add_node(num_cpus=4, num_gpus=0) for _ in range(2)]
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level="ERROR")
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        self.url = f"http://127.0.0.1:{port}"
        self.folder = folder

    def deploy(self, **settings: object) -> None:
        from services.ray import app

        worker = {"cpus": 0.5}
        arguments = {"settings": _SETTINGS | settings, "attention": worker, "experts": worker}
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
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayServer]:
    running = RayServer(tmp_path_factory.mktemp("ray"))
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
    """Ask for all recorded answers, 64 at once, and ``act`` once they have begun."""
    wanted, before = recorded(), _decoded(url)
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
    actors = ray._private.state.actors().values()
    return any(each["ActorClassName"].endswith(":Gateway") and each["Address"]["NodeID"] == node for each in actors)


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
    server.deploy(max_num_seqs=16, sleep_after=4.0)
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
