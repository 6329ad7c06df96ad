"""What an operator gets wrong, and where the answer stands: in the pod's status, without reading logs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from testkit.kube.cluster import Cluster, until
from testkit.kube.release import NAME, PREFIX, Release

from services.cli.main import main


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    with cluster.namespace("t-mistakes", level="privileged") as name:
        yield name
        cluster.helm("uninstall", NAME, "--namespace", name, check=False)


def _install(cluster: Cluster, namespace: str, *settings: str) -> Release:
    release = Release(cluster=cluster, namespace=namespace)
    release.apply("install", *settings, words=())
    return release


def _statuses(release: Release, role: str) -> list[dict[str, Any]]:
    """Statuses of all containers of ``role`` that Kubernetes knows yet."""
    return [each for pod in release.pods(role) for each in pod["status"].get("containerStatuses", [])]


def _last_words(release: Release, role: str) -> str:
    """What the container of ``role`` said as it ended, from the pod's status."""
    status = _statuses(release, role)
    ends = [
        state["terminated"] for each in status for state in (each["state"], each["lastState"]) if "terminated" in state
    ]
    return " ".join(str(end.get("message", "")) for end in ends)


@pytest.fixture
def missing(
    cluster: Cluster, namespace: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[], str]:
    """What `expertmesh status` says is missing, here with nothing but a kubeconfig."""
    monkeypatch.setenv("KUBECONFIG", cluster.environment["KUBECONFIG"])

    def look() -> str:
        capsys.readouterr()
        assert main(["status", "--kube-namespace", namespace, "--json"]) == 1
        found = json.loads(capsys.readouterr().out)
        return "\n".join(found["missing"])

    return look


def test_a_model_that_is_not_there_is_named(cluster: Cluster, namespace: str, missing: Callable[[], str]) -> None:
    release = _install(
        *(cluster, namespace, "model.source=hostPath", "model.hostPath.path=/tmp/no-models", "model.subPath=olmoe"),
    )
    for role in ("gateway", "attention"):
        until(lambda role=role: "/model/olmoe" in _last_words(release, role), 180, f"the {role} says what is missing")
    assert missing().count("/model/olmoe") >= 2


def test_a_wrong_password_is_named_by_every_role(cluster: Cluster, namespace: str, missing: Callable[[], str]) -> None:
    release = _install(cluster, namespace, "redis.enabled=true")
    until(lambda: any(each["ready"] for each in _statuses(release, "redis")), 120, "Redis is ready")
    wrong = {"stringData": dict.fromkeys(("gateway", "scheduler", "attention", "experts"), "another")}
    release.kubectl("patch", "secret", f"{PREFIX}-redis-users", "--patch", json.dumps(wrong))
    release.kubectl("delete", "pods", "-l", "app.kubernetes.io/component!=redis", "--wait=false")
    for role in ("gateway", "scheduler", "attention", "experts"):
        until(
            lambda role=role: "Redis rejects the credentials" in _last_words(release, role),
            240,
            f"the {role} says that its password is wrong",
        )
    until(lambda: missing().count("Redis rejects the credentials") >= 5, 120, "all of its pods are listed with that")


def test_a_gpu_that_no_node_has_leaves_the_pod_pending_with_a_reason(
    cluster: Cluster, namespace: str, missing: Callable[[], str]
) -> None:
    release = _install(cluster, namespace, "attention.resources.limits.nvidia\\.com/gpu=64")

    def reason() -> str:
        conditions = [each for pod in release.pods("attention") for each in pod["status"].get("conditions", [])]
        return " ".join(str(each.get("message")) for each in conditions if each["type"] == "PodScheduled")

    until(lambda: "Insufficient nvidia.com/gpu" in reason(), 60, "the pod says which resource is missing")
    notes = release.helm("get", "notes", NAME)
    said = release.kubectl("get", "events", "--field-selector", "type=Warning")
    assert "get events --field-selector type=Warning" in notes
    assert "Insufficient nvidia.com/gpu" in said
    assert f"expertmesh status --kube-namespace {namespace} --release {NAME}" in notes
    assert "Pending: 0/1 nodes are available: 1 Insufficient nvidia.com/gpu." in missing()


def test_a_group_beyond_the_experts_and_a_pod_that_is_refused_are_explained(
    cluster: Cluster, namespace: str, missing: Callable[[], str]
) -> None:
    """The pocket model has 16 experts: a 17th group can hold none."""
    settings = ("experts.groups=17", "experts.replicas=0", "experts.perGroup.16.replicas=1", "attention.replicas=0")
    cluster.kubectl("label", "namespace", namespace, "--overwrite", "pod-security.kubernetes.io/enforce=baseline")
    _install(
        cluster, namespace, *settings, "gateway.extraVolumes[0].name=host", "gateway.extraVolumes[0].hostPath.path=/"
    )
    until(lambda: "there is none, for the model has 16 experts" in missing(), 120, "the surplus worker says so")
    assert 'is forbidden: violates PodSecurity "baseline' in missing()


def test_a_wrong_value_makes_nothing(cluster: Cluster, namespace: str) -> None:
    release = Release(cluster=cluster, namespace=namespace)
    said = release.apply("install", "gateway.replicas=many", "experts.shards=3", words=(), check=False)
    assert "gateway.replicas: Invalid type. Expected: [integer,null], given: string" in said
    assert "Additional property shards is not allowed" in said
    assert release.kubectl("get", "pods", "-o", "name") == ""
