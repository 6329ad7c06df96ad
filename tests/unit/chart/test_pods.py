"""What an operator's values make of pods: where they run and for how long, what they may, and for whom they stand."""

from __future__ import annotations

from typing import Any

import pytest
from testkit.kube.chart import PREFETCH, Render, named, pod, pods

LOST = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
DEPLOYED = ("gateway", "scheduler", "attention")


def borne(seconds: int) -> list[dict[str, Any]]:
    """Tolerations of a lost node."""
    rest = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds}
    return [{"key": key} | rest for key in LOST]


def test_a_lost_node_is_left_by_what_gets_a_successor(render: Render) -> None:
    objects = render()
    found = {name: template["spec"].get("tolerations") for name, template in pods(objects)}
    assert found.pop("mesh-expertmesh-redis") is None
    assert {found.pop(f"mesh-expertmesh-experts-{group}") for group in range(2)} == {None}
    assert found == {f"mesh-expertmesh-{role}": borne(30) for role in DEPLOYED}


def test_how_long_a_lost_node_is_borne_may_be_the_clusters_own(render: Render) -> None:
    assert pod(render("nodeLostSeconds=0"), "gateway")["tolerations"] == borne(0)
    assert "tolerations" not in pod(render("nodeLostSeconds=null"), "gateway")


@pytest.mark.parametrize(
    ("given", "more"),
    [
        ({"key": "gpu", "operator": "Exists"}, borne(30)),
        ({"key": LOST[0], "operator": "Exists", "effect": "NoSchedule"}, borne(30)),
        ({"key": LOST[0], "operator": "Exists"}, borne(30)[1:]),
        ({"key": LOST[1], "operator": "Exists", "effect": "NoExecute"}, borne(30)[:1]),
        ({"operator": "Exists"}, []),
    ],
)
def test_a_roles_own_toleration_of_a_lost_node_counts(
    render: Render, given: dict[str, str], more: list[dict[str, Any]]
) -> None:
    objects = render(*(f"gateway.tolerations[0].{key}={value}" for key, value in given.items()))
    assert pod(objects, "gateway")["tolerations"] == [given, *more]
    assert pod(objects, "scheduler")["tolerations"] == borne(30)


def test_a_role_may_have_a_security_context_of_its_own(render: Render) -> None:
    lock = [
        f"{role}.containerSecurityContext.{rest}"
        for role in ("attention", "experts")
        for rest in ("capabilities.add[0]=IPC_LOCK", "runAsUser=0", "runAsNonRoot=false")
    ]
    objects = render(*lock, "scheduler.podSecurityContext.runAsUser=7", "redis.podSecurityContext.runAsGroup=8")
    specs = {name.removeprefix("mesh-expertmesh-"): template["spec"] for name, template in pods(objects)}
    may = {name: spec["containers"][0]["securityContext"] for name, spec in specs.items()}
    plain = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    locks = {"capabilities": {"add": ["IPC_LOCK"], "drop": ["ALL"]}, "runAsUser": 0, "runAsNonRoot": False}
    workers = ("attention", "experts-0", "experts-1")
    assert may == dict.fromkeys(("gateway", "scheduler", "redis"), plain) | dict.fromkeys(workers, plain | locks)
    contexts = {name: spec["securityContext"] for name, spec in specs.items()}
    users = {name: (context["runAsUser"], context["runAsGroup"]) for name, context in contexts.items()}
    assert users == dict.fromkeys(specs, (10001, 10001)) | {"scheduler": (7, 10001), "redis": (999, 8)}
    assert all(context["runAsNonRoot"] for context in contexts.values())


def test_all_contexts_are_changed_in_one_place(render: Render) -> None:
    objects = render(
        *("podSecurityContext.runAsUser=null", "containerSecurityContext.capabilities.drop[0]=NET_RAW"),
        "experts.perGroup.1.containerSecurityContext.capabilities.drop[0]=ALL",
        "gateway.podSecurityContext.runAsUser=5",
    )
    specs = {name.removeprefix("mesh-expertmesh-"): template["spec"] for name, template in pods(objects)}
    users = {name: spec["securityContext"].get("runAsUser") for name, spec in specs.items()}
    assert users == dict.fromkeys(specs) | {"gateway": 5, "redis": 999}
    may = {name: spec["containers"][0]["securityContext"]["capabilities"] for name, spec in specs.items()}
    assert may.pop("experts-1") == {"drop": ["ALL"]}
    assert [each["drop"] for each in may.values()] == [["NET_RAW"]] * 5


PLACED = {
    "nodeSelector.pool": ("cpu", {"nodeSelector": {"pool": "cpu"}}),
    "tolerations[0].key": ("pool", {"tolerations": [{"key": "pool"}]}),
    "affinity.nodeAffinity.a": ("b", {"affinity": {"nodeAffinity": {"a": "b"}}}),
    "priorityClassName": ("low", {"priorityClassName": "low"}),
}


@pytest.mark.parametrize("value", PLACED)
def test_what_runs_once_is_placed_as_well(render: Render, value: str) -> None:
    (given, wanted), where = PLACED[value], ("test", "model.pvc.prefetch")
    objects = render(*PREFETCH, *(f"{prefix}.{value}={given}" for prefix in where))
    assert wanted.items() <= named(objects, "Pod", "test")["spec"].items()
    assert wanted.items() <= pod(objects, "fetch").items()
    assert not wanted.items() <= pod(objects, "redis").items()


def test_the_smallest_containers_have_their_resources_from_values(render: Render) -> None:
    """A namespace may demand limits of every container."""
    wait = "model.pvc.prefetch.waitResources.limits.memory=1Gi"
    objects = render(*PREFETCH, "test.resources.limits.cpu=2", wait)
    [test] = named(objects, "Pod", "test")["spec"]["containers"]
    assert test["resources"] == {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"cpu": 2}}
    waiting = {name: template["spec"].get("initContainers", []) for name, template in pods(objects)}
    found = {name: containers[0]["resources"] for name, containers in waiting.items() if containers}
    expected = {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "1Gi"}}
    roles = ("gateway", "attention", "experts-0", "experts-1")
    assert found == {f"mesh-expertmesh-{role}": expected for role in roles}


def test_every_pod_of_a_role_may_have_a_clouds_identity(render: Render) -> None:
    values = {role: f"{role}.serviceAccount" for role in (*DEPLOYED, "experts", "redis")}
    values |= {"fetch": "model.pvc.prefetch.serviceAccount"}
    objects = render(*PREFETCH, *(f"{path}.annotations.cloud/role={role}" for role, path in values.items()))
    accounts = {name: each for (kind, name), each in objects.items() if kind == "ServiceAccount"}
    identity = {name: each["metadata"]["annotations"]["cloud/role"] for name, each in accounts.items()}
    assert identity == {f"mesh-expertmesh-{role}": role for role in values}
    assert not any(each["automountServiceAccountToken"] for each in accounts.values())
    roles = {name: template["metadata"]["labels"]["app.kubernetes.io/component"] for name, template in pods(objects)}
    runs_as = {roles[name]: template["spec"]["serviceAccountName"] for name, template in pods(objects)}
    assert runs_as == {role: f"mesh-expertmesh-{role}" for role in values}


def test_the_fetching_pod_is_labelled_for_what_gives_it_an_identity(render: Render) -> None:
    labels = ("podLabels.azure/use=yes", "podLabels.app\\.kubernetes\\.io/name=stolen", "podAnnotations.fuse=mount")
    job = named(render(*PREFETCH, *(f"model.pvc.prefetch.{each}" for each in labels)), "Job", "fetch")
    found = job["spec"]["template"]["metadata"]
    assert (found["labels"]["azure/use"], found["annotations"]) == ("yes", {"fuse": "mount"})
    assert found["labels"]["app.kubernetes.io/name"] == "expertmesh"
