"""Autoscaling by KEDA: what the chart makes of it, where there is KEDA and where there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from testkit.kube.chart import KEDA, SCALED, Objects, Render, config, container, named, pods

ON = SCALED
NAMES = {"gateway", "attention", "experts-0", "experts-1"}


def scaled(objects: Objects) -> dict[str, Any]:
    """What each ScaledObject says, by the end of its name."""
    found = {name: each["spec"] for (kind, name), each in objects.items() if kind == "ScaledObject"}
    return {name.removeprefix("mesh-expertmesh-"): spec for name, spec in found.items()}


@pytest.fixture
def rendered(render: Render) -> Objects:
    return render(*ON, apis=KEDA)


def test_gateways_attention_workers_and_each_group_are_scaled_by_what_the_scheduler_wants(rendered: Objects) -> None:
    objects = scaled(rendered)
    assert objects.keys() == NAMES
    for name, spec in objects.items():
        target = spec["scaleTargetRef"]
        assert (target["kind"], target["name"]) in rendered, "it is there"
        [trigger] = spec["triggers"]
        role, _, shard = name.partition("-")
        assert trigger["metadata"] == {
            "serverAddress": "http://prometheus:9090",
            "query": 'max(expertmesh_wanted_replicas{namespace="there",app_kubernetes_io_instance="mesh",'
            f'role="{role}",shard="{shard}"}})',
            "threshold": "1",
            "activationThreshold": "0",
            "ignoreNullValues": "false",  # no leader, no series: that is not zero
        }
        assert trigger["metricType"] == "AverageValue"
        assert "fallback" not in spec, "what cannot be asked holds"


def test_groups_of_ranks_are_scaled_as_groups(render: Render) -> None:
    lockstep = ("layout=lockstep", "attention.workers=4", "autoscaling.attention.maxReplicas=3")
    rendered = render(*ON, *lockstep, apis=KEDA)
    objects = scaled(rendered)
    target, bounds = objects["attention"]["scaleTargetRef"], ("minReplicaCount", "maxReplicaCount")
    assert (target["kind"], target["name"]) in rendered
    assert target["apiVersion"] == named(rendered, "LeaderWorkerSet", "attention")["apiVersion"]
    assert [objects["attention"][name] for name in bounds] == [1, 3]
    assert "replicas" not in named(rendered, "LeaderWorkerSet", "attention")["spec"]
    settings = config(rendered, "scheduler")
    found = tuple(settings[name] for name in ("layout", "workers", "max_attention"))
    assert found == ("lockstep", 4, 3), "the scheduler counts groups"
    [apps, groups] = named(rendered, "Role", "scheduler")["rules"]
    assert apps["verbs"] == groups["verbs"] == ["get", "list", "watch"]
    assert (groups["apiGroups"], groups["resources"]) == (["leaderworkerset.x-k8s.io"], ["leaderworkersets"])


@pytest.mark.parametrize("where", ["lockstep", "local", "colocated"])
def test_expert_workers_that_there_are_not_have_no_scale_and_no_bounds(render: Render, where: str) -> None:
    """The scheduler would refuse these bounds."""
    odd = ("autoscaling.experts.minReplicas=5", "experts.perGroup.0.minReplicas=9")
    rendered = render(*ON, f"layout={where}", *odd, apis=KEDA)
    assert scaled(rendered).keys() == {"gateway", "attention"}
    assert not {"min_replicas", "max_replicas", "shard_replicas"} & config(rendered, "scheduler").keys()


def test_what_keda_counts_is_given_no_number(rendered: Objects) -> None:
    counted = {name for name, each in [(n, e) for (_, n), e in rendered.items()] if "replicas" in each.get("spec", {})}
    assert counted == {"mesh-expertmesh-scheduler", "mesh-expertmesh-redis"}


@pytest.mark.parametrize(("after", "least"), [("0", 1), ("600", 0)])
def test_only_a_model_that_may_sleep_goes_to_zero_and_gateways_never(render: Render, after: str, least: int) -> None:
    objects = scaled(render(*ON, f"autoscaling.sleepAfterSeconds={after}", apis=KEDA))
    found = {name: spec["minReplicaCount"] for name, spec in objects.items()}
    assert found == dict.fromkeys(NAMES, least) | {"gateway": 1}


def test_bounds_are_those_of_the_role_or_of_the_group(render: Render) -> None:
    bounds = ("experts.minReplicas=2", "experts.maxReplicas=6", "attention.maxReplicas=9", "gateway.minReplicas=3")
    settings = [f"autoscaling.{bound}" for bound in bounds]
    rendered = render(*ON, *settings, "experts.perGroup.1.maxReplicas=8", "experts.perGroup.0.minReplicas=1", apis=KEDA)
    objects = scaled(rendered)
    found = {name: (spec["minReplicaCount"], spec["maxReplicaCount"]) for name, spec in objects.items()}
    assert found == {"gateway": (3, 4), "attention": (1, 9), "experts-0": (1, 6), "experts-1": (2, 8)}
    settings = config(rendered, "scheduler")
    assert (settings["min_replicas"], settings["max_replicas"], settings["max_attention"]) == (2, 6, 9)
    assert settings["shard_replicas"] == "0=1:6,1=2:8"


def test_the_scheduler_reads_its_configuration(render: Render, read: Callable[..., Any]) -> None:
    seconds = {"sleepAfter": 900, "scaleDownAfter": 60, "targetTtft": 3}
    objects = render(*ON, *(f"autoscaling.{name}Seconds={value}" for name, value in seconds.items()), apis=KEDA)
    settings = read(objects, "scheduler")
    assert (settings.autoscale, settings.sleep_after, settings.scale_down_after) == ("on", 900.0, 60.0)
    pairs = dict(pair.split("=") for pair in settings.kubernetes_selector.split(","))
    assert pairs.items() <= named(objects, "StatefulSet", "experts-0")["metadata"]["labels"].items()
    assert read(objects, "gateway").target_ttft == 3.0


def test_the_scheduler_alone_may_look_at_replicas_and_nothing_more(rendered: Objects) -> None:
    roles = [each for (kind, _), each in rendered.items() if kind == "Role"]
    assert [role["rules"] for role in roles] == [
        [{"apiGroups": ["apps"], "resources": ["statefulsets", "deployments"], "verbs": ["get", "list", "watch"]}]
    ]
    binding = named(rendered, "RoleBinding", "scheduler")
    assert [each["name"] for each in binding["subjects"]] == ["mesh-expertmesh-scheduler"]
    for name, template in pods(rendered):
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False
        tokens = [each["name"] for each in spec["volumes"] if "projected" in each]
        assert tokens == (["api-token"] if name == "mesh-expertmesh-scheduler" else [])
    rules = named(rendered, "NetworkPolicy", "scheduler")["spec"]["egress"]
    assert {"ports": [{"port": 443}, {"port": 6443}]} in rules
    others = [named(rendered, "NetworkPolicy", role)["spec"]["egress"] for role in ("gateway", "attention", "experts")]
    assert "443" not in str(others)


def test_the_way_to_the_api_server_may_be_narrowed(render: Render) -> None:
    narrow = ("networkPolicy.apiServerTo[0].ipBlock.cidr=10.0.0.1/32", "networkPolicy.apiServerPorts={6443}")
    rules = named(render(*ON, *narrow, apis=KEDA), "NetworkPolicy", "scheduler")["spec"]["egress"]
    assert {"ports": [{"port": 6443}], "to": [{"ipBlock": {"cidr": "10.0.0.1/32"}}]} in rules


def test_expert_workers_know_their_pods_name(rendered: Objects) -> None:
    its = {"name": "EXPERTMESH_POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    assert its in container(rendered, "experts-1")["env"]


def test_without_keda_replicas_are_fixed(render: Render) -> None:
    off, on = render(*ON[1:]), render(*ON)
    drawn = {("Secret", f"mesh-expertmesh-{name}") for name in ("redis", "redis-users", "fabric", "api-keys")}
    assert {key: on[key] for key in on.keys() - drawn} == {key: off[key] for key in off.keys() - drawn}


def test_the_notes_say_who_sets_the_replicas(notes: Callable[..., str]) -> None:
    fixed, missing = "Replicas are fixed, by experts.replicas", "this cluster has no KEDA (keda.sh/v1alpha1)"
    said = notes(*ON)
    assert missing in said
    assert "Replicas are FIXED" in said
    assert fixed in said
    assert (missing in notes(), fixed in notes()) == (False, True)
    said = notes(*ON, apis=KEDA)
    assert "get scaledobjects,hpa" in said
    assert missing not in said
    assert fixed not in said


def test_keda_may_have_to_say_who_it_is(render: Render) -> None:
    secret = ("autoscaling.prometheus.authModes=bearer", "autoscaling.prometheus.existingSecret=token")
    objects = render(*ON, *secret, apis=KEDA)
    [trigger] = scaled(objects)["gateway"]["triggers"]
    assert trigger["metadata"]["authModes"] == "bearer"
    made = named(objects, "TriggerAuthentication", "prometheus")
    assert trigger["authenticationRef"] == {"name": made["metadata"]["name"]}
    assert made["spec"]["secretTargetRef"] == [{"parameter": "bearerToken", "name": "token", "key": "bearerToken"}]
    given = ("autoscaling.prometheus.authenticationRef.name=a", "autoscaling.prometheus.authModes=basic")
    objects = render(*ON, *given, apis=KEDA)
    assert scaled(objects)["gateway"]["triggers"][0]["authenticationRef"] == {"name": "a"}
    assert not [kind for kind, _ in objects if kind == "TriggerAuthentication"]


def test_what_is_scraped_otherwise_is_found_by_its_labels(render: Render) -> None:
    settings = (SCALED[0], SCALED[2], 'autoscaling.prometheus.matchers=job="mesh"')
    for spec in scaled(render(*settings, apis=KEDA)).values():
        assert '{job="mesh",role=' in spec["triggers"][0]["metadata"]["query"]
