"""`expertmesh status` against an API server's lists over HTTP and a real Redis: what it says, and how it ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from testkit.api_server import ApiServer, running_api_server

from services.cli.main import main
from services.messages import ExpertInfo, SeatReport, WorkerInfo
from services.queue.expert_side import ExpertQueue
from services.queue.gateway_side import GatewayQueue
from services.queue.keys import Keys
from services.queue.limits import QueueLimits
from services.queue.scheduler_side import SchedulerQueue
from services.queue.seats import SeatRegistry
from services.queue.worker_side import WorkerQueue
from services.routing import RoutingTable, even_groups

Object = dict[str, Any]
GPU = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu. preemption: 0/1 nodes are available: 1 No victims"


def labels(role: str, group: int | None = None, release: str = "mesh") -> dict[str, str]:
    found = {"app.kubernetes.io/name": "expertmesh", "app.kubernetes.io/instance": release}
    found["app.kubernetes.io/component"] = role
    return found | ({} if group is None else {"expertmesh.io/shard-group": str(group)})


def workload(role: str, wanted: int, ready: int, group: int | None = None, **more: Any) -> Object:
    name = f"mesh-{role}" if group is None else f"mesh-{role}-{group}"
    status = {"replicas": wanted, "readyReplicas": ready, "updatedReplicas": wanted} | more
    meta = {"name": name, "uid": f"w-{name}", "labels": labels(role, group)}
    return {"metadata": meta, "spec": {"replicas": wanted}, "status": status}


def pod(name: str, role: str, group: int | None = None, ready: bool = True, **status: Any) -> Object:
    meta = {"name": name, "uid": f"p-{name}", "labels": labels(role, group)}
    conditions = [{"type": "Ready", "status": str(ready)}, *status.pop("conditions", [])]
    return {"metadata": meta, "status": {"phase": "Running", "conditions": conditions} | status}


def warning(uid: str, reason: str, message: str, kind: str = "Pod", name: str = "") -> Object:
    about = {"kind": kind, "uid": uid, "name": name}
    return {"metadata": {}, "involvedObject": about, "reason": reason, "message": message}


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ApiServer]:
    """A release with two shard groups, all well, as the kubeconfig's context has it."""
    with running_api_server() as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
        server.lists = {
            "deployments": [workload(role, 1, 1) for role in ("gateway", "scheduler", "attention")],
            "statefulsets": [workload("redis", 1, 1), *(workload("experts", 1, 1, group) for group in range(2))],
            "pods": [pod(f"mesh-{role}-0", role) for role in ("redis", "gateway", "scheduler", "attention")]
            + [pod(f"mesh-experts-{group}-0", "experts", group) for group in range(2)],
            "events": [],
        }
        yield server


def unready(api: ApiServer, name: str, **status: Any) -> None:
    """A pod that is not ready after all, and its workload with it."""
    [found] = [each for each in api.lists["pods"] if each["metadata"]["name"] == name]
    role, group = (
        found["metadata"]["labels"].get(key) for key in ("app.kubernetes.io/component", "expertmesh.io/shard-group")
    )
    api.lists["pods"].remove(found)
    api.lists["pods"].append(pod(name, role, group, ready=False, **status))
    for each in [*api.lists["deployments"], *api.lists["statefulsets"]]:
        its = each["metadata"]["labels"]
        if (its["app.kubernetes.io/component"], its.get("expertmesh.io/shard-group")) == (role, group):
            each["status"]["readyReplicas"] = 0


@pytest.mark.usefixtures("api")
def test_a_release_that_is_whole_serves(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 0
    said = capsys.readouterr().out
    assert "mesh in namespace default serves its model." in said
    assert "experts 1  1/1" in said
    assert "missing" not in said


def test_a_gpu_that_no_node_has_is_named(api: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": GPU}
    unready(api, "mesh-experts-1-0", phase="Pending", conditions=[condition])
    assert main(["status"]) == 1
    said = capsys.readouterr().out
    assert "missing: experts 1: 0 of 1 ready" in said
    assert "mesh-experts-1-0: Pending: 0/1 nodes are available: 1 Insufficient nvidia.com/gpu.\n" in said


@pytest.mark.parametrize(
    ("state", "last", "warned", "says"),
    [
        (
            {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}},
            {"terminated": {"exitCode": 2, "message": "Redis refuses the credentials: WRONGPASS.\n"}},
            "",
            "CrashLoopBackOff: Redis refuses the credentials: WRONGPASS.",
        ),
        (
            {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}},
            {},
            "",
            "ImagePullBackOff: not found",
        ),
        (
            {"waiting": {"reason": "ContainerCreating"}},
            {},
            'MountVolume.SetUp failed for volume "keys" : secret "mine" not found',
            'ContainerCreating: FailedMount: MountVolume.SetUp failed for volume "keys" : secret "mine" not found',
        ),
        ({"terminated": {"exitCode": 137, "reason": "OOMKilled"}}, {}, "", "ended with 137: OOMKilled, code 137"),
        (
            {"running": {}},
            {"terminated": {"exitCode": 70, "message": "crashed"}},
            "",
            "runs, but is not ready, after 3 restarts; it ended with: crashed: waiting for weights",
        ),
    ],
)
def test_a_pod_says_why_it_is_not_ready(
    api: ApiServer, capsys: pytest.CaptureFixture[str], state: Object, last: Object, warned: str, says: str
) -> None:
    name, container = "mesh-attention-0", {"state": state, "lastState": last, "restartCount": 3, "ready": False}
    unready(api, name, containerStatuses=[container])
    page = f"/api/v1/namespaces/default/pods/{name}:9100/proxy/ready"
    api.pages[page] = (503, "waiting for weights\n")
    api.lists["events"] = [warning(f"p-{name}", "FailedMount", warned)] if warned else []
    assert main(["status"]) == 1
    assert f"{name}: {says}\n" in capsys.readouterr().out


def test_pods_that_are_refused_before_they_exist_are_explained(
    api: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = 'pods "mesh-experts-1-0" is forbidden: violates PodSecurity "restricted:latest": hostPath'
    api.lists["statefulsets"][2] = workload("experts", 1, 0, 1, replicas=0)
    api.lists["deployments"][2] = workload("attention", 1, 0, replicas=0)
    api.lists["pods"] = [each for each in api.lists["pods"] if each["metadata"]["name"][5:7] not in ("ex", "at")]
    api.lists["events"] = [
        warning("w-mesh-experts-1", "FailedCreate", refused, "StatefulSet", "mesh-experts-1"),
        warning("rs", "FailedCreate", "exceeded quota", "ReplicaSet", "mesh-attention-7f9c"),
    ]
    assert main(["status", "--json"]) == 1
    missing = json.loads(capsys.readouterr().out)["missing"]
    assert f"experts 1: 0 of 1 ready; FailedCreate: {refused}" in missing
    assert "attention: 0 of 1 ready; FailedCreate: exceeded quota" in missing


def test_a_rollout_that_waits_is_a_trouble_while_others_serve(
    api: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    waits = {"state": {"waiting": {"reason": "ErrImagePull", "message": "no such tag"}}, "ready": False}
    api.lists["pods"].append(pod("mesh-gateway-new", "gateway", ready=False, containerStatuses=[waits]))
    assert main(["status"]) == 0
    said = capsys.readouterr().out
    assert "troubles: gateway: its rollout waits\n    mesh-gateway-new: ErrImagePull: no such tag" in said


@pytest.mark.parametrize("counted", [True, False])
def test_a_model_that_sleeps_can_be_served_where_something_wakes_it(
    api: ApiServer, capsys: pytest.CaptureFixture[str], counted: bool
) -> None:
    api.lists["statefulsets"][1:] = [workload("experts", 0, 0, group) for group in range(2)]
    api.lists["deployments"][2] = workload("attention", 0, 0)
    api.lists["pods"] = [each for each in api.lists["pods"] if each["metadata"]["name"][5:7] not in ("ex", "at")]
    if counted:
        api.lists["scaledobjects"] = [{"metadata": {"labels": labels("experts")}}]
    assert main(["status"]) == (0 if counted else 1)
    said = capsys.readouterr().out
    assert ("is asleep; a request wakes it" if counted else "nothing wakes it") in said


def test_one_release_of_several_is_chosen(api: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    other = workload("gateway", 1, 1)
    other["metadata"]["labels"] = labels("gateway", release="other")
    api.lists["deployments"].append(other)
    assert main(["status"]) == 1
    assert "has the releases mesh, other. Choose one with --release." in capsys.readouterr().err
    assert main(["status", "--release", "mesh"]) == 0
    assert main(["status", "--release", "third"]) == 1
    assert "has no release third of expertmesh. It has mesh, other." in capsys.readouterr().err
    assert main(["status", "-n", "elsewhere"]) == 1
    assert "Namespace elsewhere has no release of expertmesh." in capsys.readouterr().err


def test_an_api_server_that_is_away_or_refuses_says_so(api: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    api.forbidden = {"pods"}
    assert main(["status"]) == 1
    assert "The API server refuses pods: pods is forbidden" in capsys.readouterr().err
    assert main(["status", "--context", "nowhere"]) == 1
    assert "The kubeconfig is unusable" in capsys.readouterr().err


def test_nothing_to_ask_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert main(["status"]) == 2
    assert "Which deployment?" in capsys.readouterr().err
    assert main(["status", "--redis-url", "redis://127.0.0.1:1/0"]) == 1
    assert "missing: The queue is unavailable: Redis does not answer" in capsys.readouterr().out


class Mesh:
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
            *(),
            id="w",
            model="m",
            fingerprint="f",
            kv_tokens=9,
            max_num_seqs=4,
            max_model_len=9,
            host="h",
            pid=1,
            version="0",
        )
        await self.worker.register(info, lease_s=60, credit_tokens=9 * credit, credit_requests=credit)

    async def seat(self, name: str, group: int) -> None:
        info = ExpertInfo(
            id=name, fingerprint="f", host="10.0.0.1", port=7100, memory_bytes=1, pid=1, version="0", group=group
        )
        queue = ExpertQueue(self._redis, self._keys, self._limits)
        await queue.join(info, 60)
        await queue.heartbeat(name, SeatReport(status="ready", group=group))

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


async def status(url: str, *argv: str) -> int:
    return await asyncio.to_thread(main, ["status", "--kubernetes", "off", "--redis-url", url, *argv])


async def test_redis_alone_says_what_is_there(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    redis = Redis.from_url(redis_url)
    mesh = Mesh(redis)
    assert await status(redis_url) == 1
    said = capsys.readouterr().out
    for words in ("No scheduler leads", "No gateway is registered", "No attention worker is registered"):
        assert words in said
    await mesh.up()
    assert await status(redis_url, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["servable"], found["redis"]["leader"], found["redis"]["gateways"]) == (True, "scheduler-1", 1)
    assert found["redis"]["groups"] == {"0": {"seats": 1, "coming": {}}, "1": {"seats": 1, "coming": {}}}
    await mesh.attend(credit=0)
    assert await status(redis_url) == 1
    assert "No attention worker takes requests" in capsys.readouterr().out
    await redis.aclose()


async def test_a_group_without_workers_is_missing(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    redis = Redis.from_url(redis_url)
    mesh = Mesh(redis)
    await mesh.up()
    await redis.delete(Keys("expertmesh").seat("e1"))
    await mesh.seat("e2", 1)
    assert await status(redis_url) == 1
    said = capsys.readouterr().out
    assert "Shard group 1 has no expert worker in the routing table: 1 not in the table yet." in said
    assert "shard group 0      1 seats" in said
    await redis.aclose()


async def test_both_are_asked_and_both_must_agree(
    api: ApiServer, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    redis = Redis.from_url(redis_url)
    await Mesh(redis).up()
    asked = ["status", "--redis-url", redis_url]
    assert await asyncio.to_thread(main, asked) == 0
    assert "leading scheduler  scheduler-1" in capsys.readouterr().out
    api.forbidden = {"deployments"}
    assert await asyncio.to_thread(main, asked) == 0
    assert "Pods are not shown: The API server refuses deployments" in capsys.readouterr().out
    await redis.delete(Keys("expertmesh").leader)
    assert await asyncio.to_thread(main, asked) == 1
    await redis.aclose()
