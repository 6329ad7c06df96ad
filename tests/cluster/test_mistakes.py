"""What an operator gets wrong, and where the answer stands: in the pod's status, without reading logs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from testkit.kube import Cluster, until
from testkit.release import NAME, PREFIX, Release


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    with cluster.namespace("t-mistakes", level="privileged") as name:
        yield name
        cluster.helm("uninstall", NAME, "--namespace", name, check=False)


def _install(cluster: Cluster, namespace: str, *settings: str) -> Release:
    cluster.helm("install", NAME, *cluster.chart("dev", *settings), "--namespace", namespace)
    return Release(cluster=cluster, namespace=namespace)


def _statuses(release: Release, role: str) -> list[dict[str, Any]]:
    """Of all containers of ``role``, as far as Kubernetes knows them yet."""
    return [each for pod in release.pods(role) for each in pod["status"].get("containerStatuses", [])]


def _last_words(release: Release, role: str) -> str:
    """What the container of ``role`` said as it ended, from the pod's status."""
    status = _statuses(release, role)
    ends = [
        state["terminated"] for each in status for state in (each["state"], each["lastState"]) if "terminated" in state
    ]
    return " ".join(str(end.get("message", "")) for end in ends)


def test_a_model_that_is_not_there_is_named(cluster: Cluster, namespace: str) -> None:
    release = _install(
        *(cluster, namespace, "model.source=hostPath", "model.hostPath.path=/tmp/no-models", "model.subPath=olmoe"),
    )
    for role in ("gateway", "attention"):
        until(lambda role=role: "/model/olmoe" in _last_words(release, role), 180, f"the {role} says what is missing")


def test_a_wrong_password_is_named_by_every_role(cluster: Cluster, namespace: str) -> None:
    release = _install(cluster, namespace, "redis.enabled=true")
    until(lambda: any(each["ready"] for each in _statuses(release, "redis")), 120, "Redis is ready")
    wrong = {"stringData": {"redis-password": "another"}}
    cluster.kubectl("-n", namespace, "patch", "secret", f"{PREFIX}-redis", "--patch", json.dumps(wrong))
    cluster.kubectl("-n", namespace, "delete", "pods", "-l", "app.kubernetes.io/component!=redis", "--wait=false")
    for role in ("gateway", "scheduler", "attention", "experts"):
        until(
            lambda role=role: "Redis refuses the credentials" in _last_words(release, role),
            240,
            f"the {role} says that its password is wrong",
        )


def test_a_gpu_that_no_node_has_leaves_the_pod_pending_with_a_reason(cluster: Cluster, namespace: str) -> None:
    release = _install(cluster, namespace, "attention.resources.limits.nvidia\\.com/gpu=64")

    def reason() -> str:
        conditions = [each for pod in release.pods("attention") for each in pod["status"].get("conditions", [])]
        return " ".join(str(each.get("message")) for each in conditions if each["type"] == "PodScheduled")

    until(lambda: "Insufficient nvidia.com/gpu" in reason(), 60, "the pod says which resource is missing")
    notes = cluster.helm("get", "notes", NAME, "--namespace", namespace)
    said = cluster.kubectl("-n", namespace, "get", "events", "--field-selector", "type=Warning")
    assert "get events --field-selector type=Warning" in notes
    assert "Insufficient nvidia.com/gpu" in said


def test_a_wrong_value_makes_nothing(cluster: Cluster, namespace: str) -> None:
    chart = cluster.chart("dev", "gateway.replicas=many", "experts.shards=3")
    said = cluster.helm("install", NAME, *chart, "--namespace", namespace, check=False)
    assert "gateway.replicas: Invalid type. Expected: [integer,null], given: string" in said
    assert "Additional property shards is not allowed" in said
    assert cluster.kubectl("-n", namespace, "get", "pods", "-o", "name") == ""
