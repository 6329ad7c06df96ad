"""Who may do what: pod security `restricted`, network policies for real, and service accounts without rights."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from testkit.kube.cluster import RESTRICTED, TAG, Cluster, until
from testkit.kube.release import PREFIX, PYTHON, Release

ROLES = ("gateway", "scheduler", "attention", "experts", "redis")
PORTS = {"gateway": 8000, "scheduler": 9100, "attention": 9100, "experts": 9100, "redis": 6379}
HOPS = {
    ("gateway", "redis", 6379),
    ("scheduler", "redis", 6379),
    ("attention", "redis", 6379),
    ("experts", "redis", 6379),
    ("attention", "experts", 7100),
}
"""What one role's pods open to another's; the gateways' port is open to all."""
AUTOSCALED = (
    *("autoscaling.enabled=true", "metrics.podMonitor.enabled=true"),
    "autoscaling.prometheus.serverAddress=http://prometheus.monitoring:9090",
)
PAGE = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9100/metrics').read().decode())"
SEES = ("deployments.apps", "statefulsets.apps")
"""What the scheduler may get, list and watch."""


@pytest.fixture(scope="module")
def release(cluster: Cluster) -> Iterator[Release]:
    """A release in a namespace that enforces `restricted`, with a pod of somebody else. It has autoscaling, as the
    scheduler asks the API server then."""
    with cluster.namespace("t-security") as namespace:
        _foreign_pod(cluster, namespace, "foreign", {})
        found = Release(cluster=cluster, namespace=namespace)
        found.apply("install", *AUTOSCALED)
        found.kubectl("wait", "pod/foreign", "--for=condition=Ready", "--timeout=120s")
        yield found


def _foreign_pod(cluster: Cluster, namespace: str, name: str, context: dict[str, object], **spec: object) -> str:
    container = {
        "name": "main",
        "image": f"expertmesh-control:{TAG}",
        "command": [PYTHON, "-c", "import time; time.sleep(3600)"],
        "securityContext": RESTRICTED | context,
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 0} | spec,
    }
    return cluster.kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(pod), check=False)


def _labelled(release: Release, name: str, role: str) -> None:
    """A pod of somebody else with the labels of ``role``, running."""
    labels = release.pods(role)[0]["metadata"]["labels"]
    wanted = {key: value for key, value in labels.items() if key.startswith("app.kubernetes.io/")}
    _foreign_pod(release.cluster, release.namespace, name, {})
    release.kubectl("label", "pod", name, *(f"{key}={value}" for key, value in wanted.items()))
    release.kubectl("wait", f"pod/{name}", "--for=condition=Ready", "--timeout=120s")


def _of(release: Release, role: str) -> tuple[str, str]:
    """A pod of ``role``, and its address."""
    pod = release.pods(role)[0]
    return pod["metadata"]["name"], pod["status"]["podIP"]


def test_the_namespace_would_refuse_another_pod(release: Release) -> None:
    said = _foreign_pod(release.cluster, release.namespace, "capable", {"capabilities": {}})
    assert 'violates PodSecurity "restricted' in said


def test_a_pod_of_somebody_else_reaches_the_gateway_alone(release: Release) -> None:
    reached = {role for role in ROLES if release.reaches("foreign", _of(release, role)[1], PORTS[role])}
    assert reached == {"gateway"}
    assert not release.reaches("foreign", _of(release, "experts")[1], 7100)


def test_the_same_pod_with_the_label_of_a_role_reaches_what_that_role_does(release: Release) -> None:
    """What was refused above was refused for the label, not for the address, the port or the program."""
    _labelled(release, "disguised", "attention")
    until(lambda: release.reaches("disguised", _of(release, "redis")[1], 6379), 60, "it reaches Redis")
    until(lambda: release.reaches("disguised", _of(release, "experts")[1], 7100), 60, "it reaches an expert worker")
    release.kubectl("delete", "pod", "disguised", "--wait=true")


def test_roles_reach_each_other_by_the_hops_alone(release: Release) -> None:
    """Every role with a Python tries each port of every other role."""
    places = [*PORTS.items(), ("experts", 7100)]
    open_ = set()
    for source in ("gateway", "scheduler", "attention", "experts"):
        pod, _ = _of(release, source)
        for target, port in places:
            if target != source and release.reaches(pod, _of(release, target)[1], port):
                open_.add((source, target, port))
    assert {hop for hop in open_ if hop[1] != "gateway"} == HOPS
    # a gateway takes requests from anywhere, but these pods have no business with it
    assert not {hop for hop in open_ if hop[1] == "gateway"}


def test_nothing_leaves_the_namespace_but_the_schedulers_question_to_the_api_server(release: Release) -> None:
    api = release.cluster.get("default", "service", "kubernetes")["spec"]["clusterIP"]
    roles = ("gateway", "scheduler", "attention", "experts")
    assert [role for role in roles if release.reaches(_of(release, role)[0], api, 443)] == ["scheduler"]


def test_the_scheduler_sees_how_many_replicas_there_are(release: Release) -> None:
    python = ("deploy/" + f"{PREFIX}-scheduler", "--", PYTHON, "-c", PAGE)

    def shown() -> set[str]:
        page = release.kubectl("exec", *python)
        return {line for line in page.splitlines() if line.startswith("expertmesh_told_replicas{")}

    groups = {f'expertmesh_told_replicas{{role="experts",shard="{group}"}} 1.0' for group in range(2)}
    others = {f'expertmesh_told_replicas{{role="{role}",shard=""}} 1.0' for role in ("attention", "gateway")}
    until(lambda: shown() == groups | others, 60, "it shows the replicas that are set")


@pytest.mark.parametrize("role", ROLES)
def test_a_service_account_may_do_nothing_that_others_may_not(release: Release, role: str) -> None:
    cluster, namespace = release.cluster, release.namespace
    cluster.kubectl("-n", namespace, "get", "serviceaccount", f"{PREFIX}-{role}")

    def rights(account: str) -> list[str]:
        who = f"--as=system:serviceaccount:{namespace}:{account}"
        groups = ("--as-group=system:serviceaccounts", "--as-group=system:authenticated")
        return sorted(cluster.kubectl("-n", namespace, "auth", "can-i", "--list", who, *groups).splitlines())

    mine, everybodys = rights(f"{PREFIX}-{role}"), rights("nobody")
    own = [line.split() for line in mine if line not in everybodys]
    assert own == ([[what, "[]", "[]", "[get", "list", "watch]"] for what in SEES] if role == "scheduler" else [])
    assert set(everybodys) <= set(mine)
    asked = [line.split()[0] for line in everybodys if not line.startswith(("Resources", " "))]
    assert {word for word in asked if "." in word} == {
        "selfsubjectreviews.authentication.k8s.io",
        "selfsubjectaccessreviews.authorization.k8s.io",
        "selfsubjectrulesreviews.authorization.k8s.io",
    }


def test_no_pod_but_the_schedulers_holds_a_token_and_none_runs_as_root(release: Release) -> None:
    for pod in release.pods():
        name = pod["metadata"]["name"]
        look = "id -u; ls /var/run/secrets/kubernetes.io 2>&1; touch /x 2>&1 || true"
        said = release.kubectl("exec", name, "--", "sh", "-c", look)
        uid, *rest = said.splitlines()
        assert uid != "0"
        assert ("No such file" in rest[0]) is ("scheduler" not in name)
        assert "Read-only file system" in rest[-1]
