"""Pods that run several attention workers, each with a seat for experts: for GPUs of one node that share memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from testkit.kube.chart import CHART, Objects, Render, named

from services.config import ATTENTION, COLOCATED, EXPERTS, Settings, concerned, load_settings

SEATS = ("layout=colocated", "attention.workers=4")
GPUS = "attention.resources.limits.nvidia\\.com/gpu"
KEDA = ("keda.sh/v1alpha1",)
SCALED = (
    *("autoscaling.enabled=true", "metrics.podMonitor.enabled=true"),
    "autoscaling.prometheus.serverAddress=http://prometheus:9090",
)


def config(objects: Objects, role: str = "attention") -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(named(objects, "ConfigMap", role)["data"]["config.yaml"])
    return found


@pytest.fixture
def refused(helm: Callable[..., Any]) -> Callable[..., str]:
    """What helm says of ``settings``, which it must not render."""

    def run(*settings: str) -> str:
        words = [word for setting in (*SEATS, *settings) for word in ("--set", setting)]
        done = helm("template", "mesh", str(CHART), *words)
        assert done.returncode != 0
        said: str = done.stderr
        return said

    return run


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Objects], Settings]:
    """What each worker of the pod makes of its file."""
    monkeypatch.setenv("EXPERTMESH_REDIS_URL", "redis://:x@host:6379/0")

    def run(objects: Objects) -> Settings:
        file = tmp_path / "config.yaml"
        file.write_text(named(objects, "ConfigMap", "attention")["data"]["config.yaml"])
        return load_settings(["--config", str(file)], role=COLOCATED)

    return run


def test_one_container_runs_the_workers_of_a_node(render: Render) -> None:
    objects = render(*SEATS, f"{GPUS}=4", "attention.replicas=3", "attention.drainSeconds=20")
    spec = named(objects, "Deployment", "attention")["spec"]
    assert spec["replicas"] == 3
    pod = spec["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 3 * 20 + 15, "attention drains, then the seat in twice that time"
    [container] = pod["containers"]
    assert container["args"] == ["workers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {"metrics": 9100} | {f"fabric-{seat}": 7100 + seat for seat in range(4)}
    assert {probe["httpGet"]["port"] for name, probe in container.items() if name.endswith("Probe")} == {"metrics"}
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert (mounts["shm"], mounts["fabric"]) == ("/dev/shm", "/etc/expertmesh/fabric")
    assert {"name": "EXPERTMESH_ADVERTISE", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}} in container[
        "env"
    ]


def test_there_are_no_expert_workers(render: Render) -> None:
    objects = render(*SEATS, *SCALED, "experts.groups=3", "metrics.prometheusRule.enabled=true", apis=KEDA)
    assert not [name for _, name in objects if "experts" in name]
    assert ("Secret", "mesh-expertmesh-fabric") in objects


@pytest.mark.parametrize(("groups", "found"), [(0, 4), (1, 1), (4, 4)])
def test_workers_and_scheduler_are_configured_alike(
    render: Render, read: Callable[[Objects], Settings], groups: int, found: int
) -> None:
    objects = render(
        *SEATS, f"attention.colocated.groups={groups}", "attention.colocated.shared=host", "experts.groups=3"
    )
    settings = read(objects)
    assert (settings.layout, settings.workers, settings.expert_groups) == ("colocated", 4, found)
    assert (settings.fabric_port, settings.metrics_port, settings.fabric_shared) == (7100, 9100, "host")
    assert settings.fabric_secret_file == Path("/etc/expertmesh/fabric/secret")
    assert (settings.drain_timeout, settings.host) == (60, "0.0.0.0")
    assert not {"fabric_lane", "expert_group"} & config(objects).keys(), "they follow from the layout"
    assert config(objects, "scheduler")["expert_groups"] == found


def test_memory_is_shared_unless_values_say_otherwise(render: Render, read: Callable[[Objects], Settings]) -> None:
    assert read(render(*SEATS)).fabric_shared == "auto"
    assert read(render(*SEATS, "attention.colocated.shared=off")).fabric_shared == "off"


def test_settings_of_both_roles_reach_the_workers_and_those_of_attention_count_most(
    render: Render, read: Callable[[Objects], Settings]
) -> None:
    given = (
        "config.lease=3",
        "experts.config.lease=4",
        "attention.config.lease=5",
        "experts.config.expert_capacity=9",
    )
    settings = read(render(*SEATS, *given, "config.dtype=float16", "experts.config.dtype=bfloat16"))
    assert (settings.lease, settings.expert_capacity, settings.dtype) == (5, 9, "bfloat16")
    separate = config(render(*given))
    assert (separate["lease"], "expert_capacity" in separate) == (5, False), (
        "expert workers elsewhere have a file of their own"
    )


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
    scaled = {name for kind, name in objects if kind == "ScaledObject"}
    assert scaled == {"mesh-expertmesh-gateway", "mesh-expertmesh-attention"}
    target = named(objects, "ScaledObject", "attention")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) in objects
    found = config(objects, "scheduler")
    assert (found["workers"], found["layout"], found["max_attention"], found["expert_groups"]) == (4, "colocated", 3, 4)
    assert [rule["apiGroups"] for rule in named(objects, "Role", "scheduler")["rules"]] == [["apps"]]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            ["attention.colocated.groups=5"],
            "attention.colocated.groups is 5, but attention.workers is 4, of which each",
        ),
        ([f"{GPUS}=1"], "attention.resources.limits has nvidia.com/gpu: 1, but attention.workers is 4, of which"),
        (
            ["attention.resources.limits.nvidia\\.com/mig-3g\\.40gb=1"],
            "attention.resources.limits has nvidia.com/mig-3g.40gb: 1, but attention.workers is 4, of which",
        ),
        (
            ["attention.config.device=cuda:0"],
            "attention.config.device is cuda:0, one device for all 4 workers of a pod.",
        ),
        (
            ["config.device=cuda:1"],
            "config.device is cuda:1, one device for all 4 workers of a pod. Set it to auto, cuda",
        ),
        (["fabric.lane=nccl"], "fabric.lane is nccl, but layout=colocated passes rows by shared memory and"),
        (["fabric.lane=gloo"], "fabric.lane must be one of the following"),
        (["attention.workers=0"], "attention.workers: Must be greater than or equal to 1"),
        (["attention.colocated.groups=-1"], "attention.colocated.groups: Must be greater than or equal to 0"),
        (["attention.colocated.shared=on"], "attention.colocated.shared must be one of the following"),
        (["attention.config.fabric_shared=auto"], "attention.config: Additional property fabric_shared is not allowed"),
        (
            ["attention.config.expert_capacity=9"],
            "attention.config: Additional property expert_capacity is not allowed",
        ),
        (["experts.config.expert_group=1"], "experts.config: Additional property expert_group is not allowed"),
    ],
)
def test_what_workers_of_a_pod_could_not_be_is_refused(
    refused: Callable[..., str], settings: list[str], says: str
) -> None:
    assert says in refused(*settings)


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
    said = refused(*(f"{where}.{name}={good.get(name, 1)}" for name in names))
    refused = [line.split()[0] for line in said.splitlines() if "have no choice about it" in line]
    assert set(refused) == {f"{where}.{name}" for name in names}


@pytest.mark.parametrize(
    "settings",
    [
        ["attention.colocated.groups=5", "fabric.lane=nccl", "attention.config.overlap=on", f"{GPUS}=1"],
        ["layout=local", "attention.colocated.groups=5"],
        [*SEATS, "attention.colocated.groups=2", "fabric.lane=tcp", f"{GPUS}=4"],
        [*SEATS, "attention.resources.limits.nvidia\\.com/mig-3g\\.40gb=4", "experts.perGroup.7.replicas=2"],
        [*SEATS, "config.device=cuda", "attention.config.device=cpu"],
        [*SEATS, *SCALED, "autoscaling.experts.minReplicas=9", "attention.workers=3"],
    ],
)
def test_what_can_be_meant_is_taken(render: Render, settings: list[str]) -> None:
    assert render(*settings)


def test_workers_that_end_inside_a_pod_that_runs_on_are_alerted_on(render: Render) -> None:
    alerts = ("ExpertmeshWorkerStartsAgain", "ExpertmeshWorkerAway")
    rules = "metrics.prometheusRule.enabled=true"
    groups = named(render(*SEATS, rules), "PrometheusRule", "alerts")["spec"]["groups"]
    found = {rule["alert"]: rule for rule in groups[0]["rules"] if rule["alert"] in alerts}
    assert set(found) == {*alerts}
    series = 'namespace="there",app_kubernetes_io_instance="mesh"'
    assert found[alerts[0]]["expr"] == f"increase(expertmesh_worker_starts_total{{{series}}}[15m]) > 2"
    assert series in found[alerts[1]]["expr"]
    others = named(render(rules), "PrometheusRule", "alerts")["spec"]["groups"][0]["rules"]
    assert not {rule["alert"] for rule in others} & {*alerts}


def test_the_notes_say_what_a_pod_runs(notes: Callable[..., str]) -> None:
    says = "mesh-expertmesh-attention runs 4 attention worker(s), which hold 2 shard group(s) of the experts"
    assert says in notes(*SEATS, "attention.colocated.groups=2")
    assert "gateways and of pods of attention workers:" in notes(*SEATS, *SCALED, apis=KEDA)
    assert "attention worker(s)" not in notes()
