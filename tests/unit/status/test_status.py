"""`expertmesh status` against an API server's lists over HTTP and a real Redis: what it says, and how it ends."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from testkit.kube.api_server import ApiServer, Object, labels, pod, workload

from services.cli.main import main
from services.status.kube import ClusterReader, connected
from services.status.release import Release, Workload
from services.status.verdict import judge

NEEDED = ("gateway", "scheduler", "attention")
GPU = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu. preemption: 0/1 nodes are available: 1 No victims"


def test_a_model_that_sleeps_is_not_missed_by_an_account_that_may_not_see_what_wakes_it() -> None:
    awake = {role: Workload(name=role, role=role, group=None, wanted=1, ready=1, updated=1) for role in NEEDED}
    workloads = tuple((awake | {"attention": replace(awake["attention"], wanted=0, ready=0)}).values())
    for scaled, missing in ((None, 0), (True, 0), (False, 1)):
        found = Release(name="mesh", namespace="n", workloads=workloads, pods=(), scaled=scaled)
        assert len(judge(found, None).missing) == missing


def warning(uid: str, reason: str, message: str, kind: str = "Pod", name: str = "") -> Object:
    about = {"kind": kind, "uid": uid, "name": name}
    return {"metadata": {}, "involvedObject": about, "reason": reason, "message": message}


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


def shared(api: ApiServer, wanted: int = 2, ready: int = 2, **status: Any) -> Object:
    """Attention workers in groups of two pods instead of a Deployment."""
    groups = workload("attention", wanted, ready, **status)
    groups["spec"]["leaderWorkerTemplate"] = {"size": 2}
    api.lists["leaderworkersets"] = [groups]
    del api.lists["deployments"][2]
    api.lists["pods"] = [each for each in api.lists["pods"] if each["metadata"]["name"] != "mesh-attention-0"]
    names = [name for group in range(ready) for name in (f"mesh-attention-{group}", f"mesh-attention-{group}-1")]
    api.lists["pods"] += [pod(name, "attention") for name in names]
    return groups


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
            {
                "terminated": {
                    "exitCode": 2,
                    "reason": "Error",
                    "message": "Redis refuses the credentials: WRONGPASS.\n",
                }
            },
            "",
            "CrashLoopBackOff: Error, code 2: Redis refuses the credentials: WRONGPASS.",
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
        ({"terminated": {"exitCode": 137, "reason": "OOMKilled"}}, {}, "", "ended: OOMKilled, code 137"),
        (
            {"running": {}},
            {"terminated": {"exitCode": 70, "reason": "Error", "message": "crashed"}},
            "",
            "runs, but is not ready, after 3 restarts; it ended with: Error, code 70: crashed: waiting for weights",
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


@pytest.mark.parametrize(
    ("state", "last", "says"),
    [
        ({"running": {}}, {}, "wait-for-model has not ended yet"),
        (
            {"running": {}},
            {"terminated": {"exitCode": 1, "reason": "Error", "message": "one\ntwo\nno mount\nof it\nthere"}},
            "wait-for-model has not ended yet, after 2 restarts; it ended with: Error, code 1: no mount of it there",
        ),
        (
            {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}},
            {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
            "wait-for-model: CrashLoopBackOff: OOMKilled, code 137",
        ),
    ],
)
def test_a_pod_that_waits_for_the_model_says_so(
    api: ApiServer, capsys: pytest.CaptureFixture[str], state: Object, last: Object, says: str
) -> None:
    waits = {"name": "wait-for-model", "state": state, "lastState": last, "restartCount": 2, "ready": False}
    after = {"name": "gateway", "state": {"waiting": {"reason": "PodInitializing"}}, "ready": False, "started": False}
    unready(api, "mesh-gateway-0", phase="Pending", initContainerStatuses=[waits], containerStatuses=[after])
    assert main(["status"]) == 1
    assert f"mesh-gateway-0: {says}\n" in capsys.readouterr().out


def test_an_init_container_that_has_ended_or_is_a_ready_sidecar_is_not_waited_for(
    api: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = {"name": "wait-for-model", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}, "ready": True}
    sidecar = {"name": "proxy", "state": {"running": {}}, "ready": True, "started": True}
    runs = {"name": "gateway", "state": {"running": {}}, "ready": False, "started": True}
    unready(api, "mesh-gateway-0", initContainerStatuses=[ended, sidecar], containerStatuses=[runs])
    assert main(["status"]) == 1
    assert "mesh-gateway-0: runs, but is not ready\n" in capsys.readouterr().out


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


def test_groups_of_attention_workers_are_shown(api: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    """And not a second time as the StatefulSets that their controller makes, which may carry their labels."""
    shared(api)
    made = workload("attention", 1, 0)
    made["metadata"]["labels"]["leaderworkerset.sigs.k8s.io/name"] = "mesh-attention"
    api.lists["statefulsets"].append(made)
    assert main(["status"]) == 0
    said = capsys.readouterr().out
    assert "attention, groups of 2  2/2    0" in said
    assert said.count("attention") == 1


def test_a_group_whose_pods_are_not_ready_or_not_made_says_why(
    api: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    shared(api, ready=1)
    crashed = {"waiting": {"reason": "CrashLoopBackOff", "message": "no rank 0"}}
    api.lists["pods"].append(pod("mesh-attention-1", "attention", ready=False, containerStatuses=[{"state": crashed}]))
    assert main(["status"]) == 0
    said = capsys.readouterr().out
    assert "troubles: attention, groups of 2: 1 of 2 ready\n" in said
    assert "mesh-attention-1: CrashLoopBackOff: no rank 0\n" in said
    for makers in ("mesh-attention", "mesh-attention-1"):
        api.lists["events"] = [warning("s", "FailedCreate", f"{makers} exceeds quota", "StatefulSet", makers)]
        assert main(["status"]) == 0
        assert f"FailedCreate: {makers} exceeds quota\n" in capsys.readouterr().out
    api.lists["pods"].append(pod("mesh-attention-1-1", "attention", ready=False))
    assert main(["status"]) == 0
    assert "quota" not in capsys.readouterr().out, "its pods are there by now"


def test_groups_for_which_no_controller_runs_say_so(api: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    shared(api, ready=0).pop("status")
    assert main(["status"]) == 1
    said = capsys.readouterr().out
    assert "missing: attention, groups of 2: 0 of 2 ready\n    nothing makes its pods: does the LeaderWorkerSet" in said


def test_a_release_without_attention_workers_cannot_serve(api: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    del api.lists["deployments"][2]
    assert main(["status"]) == 1
    said = capsys.readouterr().out
    assert "missing: attention: the release has no Deployment or LeaderWorkerSet of it." in said
    api.forbidden = {"leaderworkersets"}
    assert main(["status"]) == 1
    said = capsys.readouterr().out
    assert "missing: attention: the release has no Deployment of it, and others may not be listed here." in said
    assert "Leaderworkersets are not shown: The API server refuses leaderworkersets: leaderworkersets is forbid" in said
    del api.lists["deployments"][0]
    assert main(["status"]) == 1
    assert "missing: gateway: the release has no Deployment of it." in capsys.readouterr().out


def test_groups_that_cannot_be_there_are_not_missed(api: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    """The account of a scheduler may only list what is scaled."""
    api.forbidden = {"leaderworkersets"}
    assert main(["status"]) == 0
    assert "eaderworkersets" not in capsys.readouterr().out


def test_an_api_server_that_fails_to_list_groups_is_an_error(
    api: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    path = "/apis/leaderworkerset.x-k8s.io/v1/namespaces/default/leaderworkersets"
    api.pages[path] = (500, "etcd is away")
    assert main(["status"]) == 1
    assert "The API server refuses leaderworkersets: 500 etcd is away" in capsys.readouterr().err


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
    client, namespace = connected(None)
    assert ClusterReader(client, namespace, pod="mesh-scheduler-7f9c-x2").read().name == "mesh"  # as in its own pod
    assert main(["status", "--release", "third"]) == 1
    assert "has no release third of expertmesh. It has mesh, other." in capsys.readouterr().err
    assert main(["status", "-n", "elsewhere"]) == 1
    assert "Namespace elsewhere has no release of expertmesh." in capsys.readouterr().err


def test_an_api_server_that_is_away_or_refuses_says_so(
    api: ApiServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    api.forbidden = {"pods"}
    assert main(["status"]) == 0
    said = capsys.readouterr().out
    assert "experts 1  1/1" in said
    assert "Pods are not shown: The API server refuses pods: pods is forbidden" in said
    api.forbidden = {"pods", "jobs"}
    assert main(["status"]) == 0
    assert "Pods, jobs are not shown: The API server refuses pods: pods is forbidden" in capsys.readouterr().out
    api.forbidden = {"deployments"}
    assert main(["status"]) == 1
    assert "The API server refuses deployments: deployments is forbidden" in capsys.readouterr().err
    monkeypatch.setenv("KUBECONFIG", str(replace(api, url=api.url.replace("http:", "https:")).kubeconfig(tmp_path)))
    assert main(["status"]) == 1
    assert "The API server does not answer: (0) Reason: SSLError" in capsys.readouterr().err
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
