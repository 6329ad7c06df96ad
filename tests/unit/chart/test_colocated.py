"""Pods that run several attention workers, each with a seat for experts: for GPUs of one node that share memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from testkit.kube.chart import CHART, KEDA, SCALED, Objects, Render, config, container, named, pod

from services.config import ATTENTION, COLOCATED, EXPERTS, Settings, concerned

SEATS = ("layout=colocated", "attention.workers=4")


@pytest.fixture
def worker(read: Callable[..., Settings]) -> Callable[[Objects], Settings]:
    """What each worker of the pod makes of its file."""
    return lambda objects: read(objects, ATTENTION, COLOCATED)


def test_one_container_runs_the_workers_of_a_node(render: Render) -> None:
    gpus = "attention.resources.limits.nvidia\\.com/gpu=4"
    objects = render(*SEATS, gpus, "attention.replicas=3", "attention.drainSeconds=20")
    assert named(objects, "Deployment", "attention")["spec"]["replicas"] == 3
    grace = pod(objects, "attention")["terminationGracePeriodSeconds"]
    assert grace == 3 * 20 + 15, "attention drains, then the seat in twice that time"
    found = container(objects, "attention")
    assert found["args"] == ["workers"]
    assert found["resources"]["limits"]["nvidia.com/gpu"] == 4
    ports = {each["name"]: each["containerPort"] for each in found["ports"]}
    assert ports == {"metrics": 9100} | {f"fabric-{seat}": 7100 + seat for seat in range(4)}
    assert {probe["httpGet"]["port"] for name, probe in found.items() if name.endswith("Probe")} == {"metrics"}
    mounts = {each["name"]: each["mountPath"] for each in found["volumeMounts"]}
    assert (mounts["shm"], mounts["fabric"]) == ("/dev/shm", "/etc/expertmesh/fabric")
    advertised = {"fieldRef": {"fieldPath": "status.podIP"}}
    assert {"name": "EXPERTMESH_ADVERTISE", "valueFrom": advertised} in found["env"]


def test_there_are_no_expert_workers(render: Render) -> None:
    objects = render(*SEATS, *SCALED, "experts.groups=3", "metrics.prometheusRule.enabled=true", apis=KEDA)
    assert not [name for _, name in objects if "experts" in name]
    assert ("Secret", "mesh-expertmesh-fabric") in objects


@pytest.mark.parametrize(("groups", "found"), [(0, 4), (1, 1), (4, 4)])
def test_workers_and_scheduler_are_configured_alike(
    render: Render, worker: Callable[[Objects], Settings], groups: int, found: int
) -> None:
    chosen = (f"attention.colocated.groups={groups}", "attention.colocated.shared=host", "experts.groups=3")
    objects = render(*SEATS, *chosen)
    settings = worker(objects)
    assert (settings.layout, settings.workers, settings.expert_groups) == ("colocated", 4, found)
    assert (settings.fabric_port, settings.metrics_port, settings.fabric_shared) == (7100, 9100, "host")
    assert settings.fabric_secret_file == Path("/etc/expertmesh/fabric/secret")
    assert (settings.drain_timeout, settings.host) == (60, "0.0.0.0")
    assert not {"fabric_lane", "expert_group"} & config(objects, "attention").keys(), "they follow from the layout"
    assert config(objects, "scheduler")["expert_groups"] == found


def test_memory_is_shared_unless_values_say_otherwise(render: Render, worker: Callable[[Objects], Settings]) -> None:
    assert worker(render(*SEATS)).fabric_shared == "auto"
    assert worker(render(*SEATS, "attention.colocated.shared=off")).fabric_shared == "off"


def test_settings_of_both_roles_reach_the_workers_and_those_of_attention_count_most(
    render: Render, worker: Callable[[Objects], Settings]
) -> None:
    leases = ("config.lease=3", "experts.config.lease=4", "attention.config.lease=5")
    given = (*leases, "experts.config.expert_capacity=9")
    settings = worker(render(*SEATS, *given, "config.dtype=float16", "experts.config.dtype=bfloat16"))
    assert (settings.lease, settings.expert_capacity, settings.dtype) == (5, 9, "bfloat16")
    separate = config(render(*given), "attention")
    assert separate["lease"] == 5
    assert "expert_capacity" not in separate, "expert workers elsewhere have a file of their own"


def test_seats_reach_one_another_on_their_ports_alone(render: Render) -> None:
    policy = named(render(*SEATS), "NetworkPolicy", "attention")["spec"]
    component = "app.kubernetes.io/component"

    def opened(rules: list[dict[str, Any]], way: str) -> dict[str, Any]:
        """Role -> ports; metrics are asked for by another namespace."""
        return {
            peer.get("podSelector", {}).get("matchLabels", {}).get(component): rule.get("ports")
            for rule in rules
            for peer in rule[way]
        }

    seats = [{"port": 7100, "endPort": 7103}]
    assert opened(policy["ingress"], "from") == {"attention": seats, None: [{"port": 9100}]}
    assert opened(policy["egress"], "to") == {"attention": seats, "redis": [{"port": 6379}]}
    [_, one] = named(render(*SEATS[:1]), "NetworkPolicy", "attention")["spec"]["ingress"]
    assert one["ports"] == [{"port": 7100, "endPort": 7101}], "a pod has two by itself"


def test_a_pod_counts_as_one_replica_where_keda_counts(render: Render) -> None:
    objects = render(*SEATS, *SCALED, "autoscaling.attention.maxReplicas=3", apis=KEDA)
    target = named(objects, "ScaledObject", "attention")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) in objects
    found = config(objects, "scheduler")
    assert (found["workers"], found["layout"], found["max_attention"], found["expert_groups"]) == (4, "colocated", 3, 4)
    assert [rule["apiGroups"] for rule in named(objects, "Role", "scheduler")["rules"]] == [["apps"]]


def fixed() -> set[str]:
    """What the chart lets a user say to attention workers, and one with a seat has no choice about."""
    schema = json.loads((CHART / "values.schema.json").read_text())["definitions"]
    known = {name for role in (ATTENTION, EXPERTS) for name in schema[f"{role}Settings"]["properties"]}
    return known & {*Settings.model_fields} - {*concerned(COLOCATED)}


@pytest.mark.parametrize("where", ["config", "attention.config"])
def test_what_a_worker_with_a_seat_has_no_choice_about_is_refused(refused: Callable[..., str], where: str) -> None:
    names = fixed()
    assert names >= {"overlap", "expert_slots", "lockstep_exchange"}
    good = {"overlap": "off", "lockstep_exchange": "flat"}
    said = refused(*SEATS, *(f"{where}.{name}={good.get(name, 1)}" for name in names))
    found = {line.split()[0] for line in said.splitlines() if "have no choice about it" in line}
    assert found == {f"{where}.{name}" for name in names}


def test_the_notes_say_what_a_pod_runs(notes: Callable[..., str]) -> None:
    says = "mesh-expertmesh-attention runs 4 attention worker(s), which hold 2 shard group(s) of the experts"
    assert says in notes(*SEATS, "attention.colocated.groups=2")
    assert "gateways and of pods of attention workers:" in notes(*SEATS, *SCALED, apis=KEDA)
    assert "attention worker(s)" not in notes()
