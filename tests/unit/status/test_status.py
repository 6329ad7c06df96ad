"""`expertmesh status` against an API server's lists over HTTP and a real Redis: what it says, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from testkit.kube.api_server import ApiServer, Object, labels, pod, workload

from services.status.kube import ClusterReader, connected
from services.status.queue import Group, Queue
from services.status.release import Release, Workload
from services.status.verdict import judge
from services.status.view import as_json, as_text

Status = Callable[..., Any]
NEEDED = ("gateway", "scheduler", "attention")
GPU = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu. preemption: 0/1 nodes are available: 1 No victims"


def test_a_model_that_sleeps_is_not_missed_by_an_account_that_may_not_see_what_wakes_it() -> None:
    awake = {role: Workload(name=role, role=role, group=None, wanted=1, ready=1, updated=1) for role in NEEDED}
    workloads = tuple((awake | {"attention": replace(awake["attention"], wanted=0, ready=0)}).values())
    for scaled, missing in ((None, 0), (True, 0), (False, 1)):
        found = Release(name="mesh", namespace="n", workloads=workloads, pods=(), scaled=scaled)
        assert len(judge(found, None).missing) == missing


def test_a_model_that_an_operator_sent_to_sleep_misses_nothing() -> None:
    asleep = Queue(leader="s", gateways=1, workers=("a",), blocked=("a",), groups={0: Group(seats=0)}, sleep=2)
    said = as_text(judge(None, asleep))
    assert "sleeps at level 2; POST /wake_up wakes it" in said
    assert "1 sleep" in said
    assert judge(None, asleep).servable
    assert json.loads(as_json(judge(None, asleep)))["sleep_level"] == 2
    assert not judge(None, replace(asleep, sleep=0)).servable


def warning(uid: str, reason: str, message: str, kind: str = "Pod", name: str = "") -> Object:
    about = {"kind": kind, "uid": uid, "name": name}
    return {"metadata": {}, "involvedObject": about, "reason": reason, "message": message}


def unready(api: ApiServer, name: str, **status: Any) -> None:
    """A pod that is not ready after all, and its workload with it."""
    [found] = [each for each in api.lists["pods"] if each["metadata"]["name"] == name]
    its = found["metadata"]["labels"]
    role, group = its["app.kubernetes.io/component"], its.get("expertmesh.io/shard-group")
    api.lists["pods"].remove(found)
    api.lists["pods"].append(pod(name, role, group, ready=False, **status))
    for each in [*api.lists["deployments"], *api.lists["statefulsets"]]:
        if each["metadata"]["labels"] == its:
            each["status"]["readyReplicas"] = 0


def without(api: ApiServer, *names: str) -> None:
    """The release without those pods."""
    api.lists["pods"] = [each for each in api.lists["pods"] if not each["metadata"]["name"].startswith(names)]


def shared(api: ApiServer, wanted: int = 2, ready: int = 2, **status: Any) -> Object:
    """Attention workers in groups of two pods instead of a Deployment."""
    groups = workload("attention", wanted, ready, **status)
    groups["spec"]["leaderWorkerTemplate"] = {"size": 2}
    api.lists["leaderworkersets"] = [groups]
    del api.lists["deployments"][2]
    without(api, "mesh-attention")
    names = [name for group in range(ready) for name in (f"mesh-attention-{group}", f"mesh-attention-{group}-1")]
    api.lists["pods"] += [pod(name, "attention") for name in names]
    return groups


@pytest.mark.usefixtures("api")
def test_a_release_that_is_whole_serves(status: Status) -> None:
    said = status(0).out
    assert "mesh in namespace default serves its model." in said
    assert "experts 1  1/1" in said
    assert "missing" not in said


def test_a_gpu_that_no_node_has_is_named(api: ApiServer, status: Status) -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": GPU}
    unready(api, "mesh-experts-1-0", phase="Pending", conditions=[condition])
    said = status(1).out
    assert "missing: experts 1: 0 of 1 ready" in said
    assert "mesh-experts-1-0: Pending: 0/1 nodes are available: 1 Insufficient nvidia.com/gpu.\n" in said


def waits(reason: str, **more: str) -> Object:
    return {"waiting": {"reason": reason} | more}


def ended(code: int, reason: str, **more: str) -> Object:
    return {"terminated": {"exitCode": code, "reason": reason} | more}


CRASHES = waits("CrashLoopBackOff", message="back-off 5m0s")
MOUNT = 'MountVolume.SetUp failed for volume "keys" : secret "mine" not found'


@pytest.mark.parametrize(
    ("state", "last", "warned", "says"),
    [
        (
            CRASHES,
            ended(2, "Error", message="Redis rejects the credentials: WRONGPASS.\n"),
            "",
            "CrashLoopBackOff: Error, code 2: Redis rejects the credentials: WRONGPASS.",
        ),
        (waits("ImagePullBackOff", message="not found"), {}, "", "ImagePullBackOff: not found"),
        (waits("ContainerCreating"), {}, MOUNT, f"ContainerCreating: FailedMount: {MOUNT}"),
        (ended(137, "OOMKilled"), {}, "", "ended: OOMKilled, code 137"),
        (
            {"running": {}},
            ended(70, "Error", message="crashed"),
            "",
            "runs, but is not ready, after 3 restarts; it ended with: Error, code 70: crashed: waiting for weights",
        ),
    ],
)
def test_a_pod_says_why_it_is_not_ready(
    api: ApiServer, status: Status, state: Object, last: Object, warned: str, says: str
) -> None:
    name, container = "mesh-attention-0", {"state": state, "lastState": last, "restartCount": 3, "ready": False}
    unready(api, name, containerStatuses=[container])
    page = f"/api/v1/namespaces/default/pods/{name}:9100/proxy/ready"
    api.pages[page] = (503, "waiting for weights\n")
    api.lists["events"] = [warning(f"p-{name}", "FailedMount", warned)] if warned else []
    assert f"{name}: {says}\n" in status(1).out


@pytest.mark.parametrize(
    ("state", "last", "says"),
    [
        ({"running": {}}, {}, "wait-for-model has not ended yet"),
        (
            {"running": {}},
            ended(1, "Error", message="one\ntwo\nno mount\nof it\nthere"),
            "wait-for-model has not ended yet, after 2 restarts; it ended with: Error, code 1: no mount of it there",
        ),
        (CRASHES, ended(137, "OOMKilled"), "wait-for-model: CrashLoopBackOff: OOMKilled, code 137"),
    ],
)
def test_a_pod_that_waits_for_the_model_says_so(
    api: ApiServer, status: Status, state: Object, last: Object, says: str
) -> None:
    first = {"name": "wait-for-model", "state": state, "lastState": last, "restartCount": 2, "ready": False}
    after = {"name": "gateway", "state": waits("PodInitializing"), "ready": False, "started": False}
    unready(api, "mesh-gateway-0", phase="Pending", initContainerStatuses=[first], containerStatuses=[after])
    assert f"mesh-gateway-0: {says}\n" in status(1).out


def test_an_init_container_that_has_ended_or_is_a_ready_sidecar_is_not_waited_for(
    api: ApiServer, status: Status
) -> None:
    done = {"name": "wait-for-model", "state": ended(0, "Completed"), "ready": True}
    sidecar = {"name": "proxy", "state": {"running": {}}, "ready": True, "started": True}
    runs = {"name": "gateway", "state": {"running": {}}, "ready": False, "started": True}
    unready(api, "mesh-gateway-0", initContainerStatuses=[done, sidecar], containerStatuses=[runs])
    assert "mesh-gateway-0: runs, but is not ready\n" in status(1).out


def test_pods_that_are_refused_before_they_exist_are_explained(api: ApiServer, status: Status) -> None:
    refused = 'pods "mesh-experts-1-0" is forbidden: violates PodSecurity "restricted:latest": hostPath'
    api.lists["statefulsets"][2] = workload("experts", 1, 0, 1, replicas=0)
    api.lists["deployments"][2] = workload("attention", 1, 0, replicas=0)
    without(api, "mesh-experts", "mesh-attention")
    api.lists["events"] = [
        warning("w-mesh-experts-1", "FailedCreate", refused, "StatefulSet", "mesh-experts-1"),
        warning("rs", "FailedCreate", "exceeded quota", "ReplicaSet", "mesh-attention-7f9c"),
    ]
    missing = json.loads(status(1, "--json").out)["missing"]
    assert f"experts 1: 0 of 1 ready; FailedCreate: {refused}" in missing
    assert "attention: 0 of 1 ready; FailedCreate: exceeded quota" in missing


def test_groups_of_attention_workers_are_shown(api: ApiServer, status: Status) -> None:
    """And not a second time as the StatefulSets that their controller makes, which may carry their labels."""
    shared(api)
    made = workload("attention", 1, 0)
    made["metadata"]["labels"]["leaderworkerset.sigs.k8s.io/name"] = "mesh-attention"
    api.lists["statefulsets"].append(made)
    said = status(0).out
    assert "attention, groups of 2  2/2    0" in said
    assert said.count("attention") == 1


def test_a_group_whose_pods_are_not_ready_or_not_made_says_why(api: ApiServer, status: Status) -> None:
    shared(api, ready=1)
    crashes = [{"state": waits("CrashLoopBackOff", message="no rank 0")}]
    api.lists["pods"].append(pod("mesh-attention-1", "attention", ready=False, containerStatuses=crashes))
    said = status(0).out
    assert "troubles: attention, groups of 2: 1 of 2 ready\n" in said
    assert "mesh-attention-1: CrashLoopBackOff: no rank 0\n" in said
    for makers in ("mesh-attention", "mesh-attention-1"):
        api.lists["events"] = [warning("s", "FailedCreate", f"{makers} exceeds quota", "StatefulSet", makers)]
        assert f"FailedCreate: {makers} exceeds quota\n" in status(0).out
    api.lists["pods"].append(pod("mesh-attention-1-1", "attention", ready=False))
    assert "quota" not in status(0).out, "its pods are there by now"


def test_groups_for_which_no_controller_runs_say_so(api: ApiServer, status: Status) -> None:
    shared(api, ready=0).pop("status")
    said = status(1).out
    assert "missing: attention, groups of 2: 0 of 2 ready\n    nothing makes its pods: does the LeaderWorkerSet" in said


def test_a_release_without_attention_workers_cannot_serve(api: ApiServer, status: Status) -> None:
    del api.lists["deployments"][2]
    said = status(1).out
    assert "missing: attention: the release has no Deployment or LeaderWorkerSet of it." in said
    api.forbidden = {"leaderworkersets"}
    said = status(1).out
    assert "missing: attention: the release has no Deployment of it, and others may not be listed here." in said
    assert "Leaderworkersets are not shown: The API server refuses leaderworkersets: leaderworkersets is forbid" in said
    del api.lists["deployments"][0]
    assert "missing: gateway: the release has no Deployment of it." in status(1).out


def test_a_rollout_that_waits_is_a_trouble_while_others_serve(api: ApiServer, status: Status) -> None:
    pulls = {"state": waits("ErrImagePull", message="no such tag"), "ready": False}
    api.lists["pods"].append(pod("mesh-gateway-new", "gateway", ready=False, containerStatuses=[pulls]))
    said = status(0).out
    assert "troubles: gateway: its rollout waits\n    mesh-gateway-new: ErrImagePull: no such tag" in said


@pytest.mark.parametrize("counted", [True, False])
def test_a_model_that_sleeps_can_be_served_where_something_wakes_it(
    api: ApiServer, status: Status, counted: bool
) -> None:
    api.lists["statefulsets"][1:] = [workload("experts", 0, 0, group) for group in range(2)]
    api.lists["deployments"][2] = workload("attention", 0, 0)
    without(api, "mesh-experts", "mesh-attention")
    if counted:
        api.lists["scaledobjects"] = [{"metadata": {"labels": labels("experts")}}]
    said = status(0 if counted else 1).out
    assert ("is asleep; a request wakes it" if counted else "nothing wakes it") in said


def test_one_release_of_several_is_chosen(api: ApiServer, status: Status) -> None:
    other = workload("gateway", 1, 1)
    other["metadata"]["labels"] = labels("gateway", release="other")
    api.lists["deployments"].append(other)
    assert "has the releases mesh, other. Choose one with --release." in status(1).err
    status(0, "--release", "mesh")
    client, namespace = connected(None)
    assert ClusterReader(client, namespace, pod="mesh-scheduler-7f9c-x2").read().name == "mesh"  # as in its own pod
    assert "has no release third of expertmesh. It has mesh, other." in status(1, "--release", "third").err
    assert "Namespace elsewhere has no release of expertmesh." in status(1, "-n", "elsewhere").err


def test_an_api_server_that_is_away_or_refuses_says_so(
    api: ApiServer, status: Status, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    api.forbidden = {"leaderworkersets"}  # as for a scheduler's account, which may only list what is scaled
    assert "eaderworkersets" not in status(0).out
    api.forbidden = {"pods"}
    said = status(0).out
    assert "experts 1  1/1" in said
    assert "Pods are not shown: The API server refuses pods: pods is forbidden" in said
    api.forbidden = {"pods", "jobs"}
    assert "Pods, jobs are not shown: The API server refuses pods: pods is forbidden" in status(0).out
    api.forbidden = {"deployments"}
    assert "The API server refuses deployments: deployments is forbidden" in status(1).err
    api.forbidden = set()
    api.pages["/apis/leaderworkerset.x-k8s.io/v1/namespaces/default/leaderworkersets"] = (500, "etcd is away")
    assert "The API server refuses leaderworkersets: 500 etcd is away" in status(1).err
    monkeypatch.setenv("KUBECONFIG", str(replace(api, url=api.url.replace("http:", "https:")).kubeconfig(tmp_path)))
    assert "The API server does not answer: (0) Reason: SSLError" in status(1).err
    assert "The kubeconfig is unusable" in status(1, "--context", "nowhere").err


def test_nothing_to_ask_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: Status) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert "Which deployment?" in status(2).err
    said = status(1, "--redis-url", "redis://127.0.0.1:1/0").out
    assert "missing: The queue is unavailable: Redis does not answer" in said
