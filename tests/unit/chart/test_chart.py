"""The chart without a cluster: what follows from it is up to date, bad values are refused, the objects fit together."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from testkit.kube.chart import CHART, ROOT, WORKLOADS, Render, pods

from services.config import load_settings

PROFILES = ("dev", "single-node", "multi-node")
MODEL = {"single-node": ["model.hostPath.path=/models"]}
"""What a profile asks for."""


@pytest.mark.parametrize("script", ["generate.py", "render.py"])
def test_what_follows_from_the_chart_is_up_to_date(script: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "helm" / script), "--check"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("profile", PROFILES)
def test_lint_finds_nothing(helm: Callable[..., Any], profile: str) -> None:
    model = [word for setting in MODEL.get(profile, []) for word in ("--set", setting)]
    done = helm("lint", "--strict", str(CHART), "--values", str(CHART / f"values-{profile}.yaml"), *model)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("gateway.replicas=many", "gateway.replicas: Invalid type. Expected: [integer,null], given: string"),
        ("gateway.replica=2", "gateway: Additional property replica is not allowed"),
        ("config.max_num_seq=2", "config: Additional property max_num_seq is not allowed"),
        ("config.max_num_seqs=0", "config.max_num_seqs: Must be greater than or equal to 1"),
        ("config.redis_url=redis://x", "config: Additional property redis_url is not allowed"),
        ("experts.groups=0", "experts.groups: Must be greater than or equal to 1"),
        ("experts.perGroup.first.replicas=2", "experts.perGroup: Additional property first is not allowed"),
        ("gateway.config.block_size=9", "gateway.config: Additional property block_size is not allowed"),
        ("config.fabric_shared=auto", "config: Additional property fabric_shared is not allowed"),
        ("gateway.drainSeconds=3601", "gateway.drainSeconds: Must be less than or equal to 3600"),
        ("gateway.drainDelaySeconds=601", "gateway.drainDelaySeconds: Must be less than or equal to 600"),
        ("redis.keyPrefix=a b", "redis.keyPrefix: Does not match pattern"),
        ("scheduler.replicas=0", "scheduler.replicas: Must be greater than or equal to 1"),
        ("nameOverride=Mesh", "nameOverride: Does not match pattern"),
        ("model.source=s3", "model.source must be one of the following"),
        ("images.worker.digest=abc", "images.worker.digest: Does not match pattern"),
        ("gateway.probes.startup.path=/x", "gateway.probes.startup: Additional property path is not allowed"),
    ],
)
def test_bad_values_are_refused_before_anything_is_made(helm: Callable[..., Any], setting: str, says: str) -> None:
    done = helm("template", "mesh", str(CHART), "--set", setting)
    assert done.returncode != 0
    assert says in done.stderr


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["model.source=hostPath"], "Give model.hostPath.path."),
        (["redis.enabled=false"], "Give redis.external.url"),
        (["model.source=pvc", "model.pvc.prefetch.enabled=true"], "Give model.pvc.prefetch.source."),
    ],
)
def test_what_is_missing_is_asked_for(helm: Callable[..., Any], settings: list[str], says: str) -> None:
    done = helm("template", "mesh", str(CHART), *(word for setting in settings for word in ("--set", setting)))
    assert done.returncode != 0
    assert says in done.stderr


@pytest.mark.parametrize("profile", PROFILES)
def test_every_pod_is_what_the_restricted_level_asks_for(render: Render, profile: str) -> None:
    """But for the volume of hostPath, which single-node is about."""
    seen = 0
    for _, template in pods(render(*MODEL.get(profile, []), profile=profile)):
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"] + spec.get("initContainers", []):
            seen += 1
            context = container["securityContext"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert (context["allowPrivilegeEscalation"], context["readOnlyRootFilesystem"]) == (False, True)
            assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert seen >= 5


@pytest.mark.parametrize("role", ["gateway", "scheduler", "attention", "experts"])
def test_each_role_reads_the_file_that_the_chart_writes(
    render: Render, role: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["config.max_attempts=5", "config.lease=3", f"{role}.config.max_attempts=6"]
    objects = render(*settings)
    file = tmp_path / "config.yaml"
    file.write_text(objects["ConfigMap", f"mesh-expertmesh-{role}"]["data"]["config.yaml"])
    monkeypatch.setenv("EXPERTMESH_REDIS_URL", "redis://:x@host:6379/0")
    read = load_settings(["--config", str(file)], role=role)
    assert (read.max_attempts, read.lease, read.host) == (6, 3.0, "0.0.0.0")
    assert read.namespace == "there.mesh"


def test_every_selector_finds_its_pods_and_no_others(render: Render) -> None:
    objects = render("experts.groups=3")
    labels = {name: template["metadata"]["labels"] for name, template in pods(objects)}
    assert len(labels) == 7
    for name, each in ((name, each) for (kind, name), each in objects.items() if kind in WORKLOADS):
        wanted = each["spec"]["selector"]["matchLabels"].items()
        assert [pod for pod, has in labels.items() if wanted <= has.items()] == [name]


def test_there_is_a_set_for_each_group_with_values_of_its_own(render: Render) -> None:
    objects = render("experts.groups=3", "experts.replicas=2", "experts.perGroup.1.replicas=5")
    sets = {name: each["spec"] for (kind, name), each in objects.items() if kind == "StatefulSet" and "experts" in name}
    assert {name: spec["replicas"] for name, spec in sets.items()} == {
        "mesh-expertmesh-experts-0": 2,
        "mesh-expertmesh-experts-1": 5,
        "mesh-expertmesh-experts-2": 2,
    }
    for number, name in enumerate(sorted(sets)):
        env = {each["name"]: each.get("value") for each in sets[name]["template"]["spec"]["containers"][0]["env"]}
        assert env["EXPERTMESH_EXPERT_GROUP"] == str(number)
    scheduler = yaml.safe_load(objects["ConfigMap", "mesh-expertmesh-scheduler"]["data"]["config.yaml"])
    assert scheduler["expert_groups"] == 3


def test_what_an_autoscaler_counts_is_left_to_it(render: Render) -> None:
    objects = render(*(f"{role}.replicas=null" for role in ("gateway", "attention", "experts")))
    counted = {name: each["spec"].get("replicas") for (kind, name), each in objects.items() if kind in WORKLOADS}
    assert {name for name, replicas in counted.items() if replicas is None} == {
        *("mesh-expertmesh-gateway", "mesh-expertmesh-attention"),
        *("mesh-expertmesh-experts-0", "mesh-expertmesh-experts-1"),
    }


def test_experts_may_stay_with_the_attention_workers(render: Render) -> None:
    objects = render("layout=local")
    assert not [name for _, name in objects if "experts" in name.removeprefix("mesh-expertmesh")]
    assert ("Secret", "mesh-expertmesh-fabric") not in objects


def test_the_hash_in_the_key_file_is_that_of_the_key(render: Render) -> None:
    data = render()["Secret", "mesh-expertmesh-api-keys"]["data"]
    key, file = (base64.b64decode(data[name]) for name in ("api-key", "keys.yaml"))
    assert yaml.safe_load(file)["keys"][0]["sha256"] == hashlib.sha256(key).hexdigest()


def test_of_given_secrets_none_is_made(render: Render) -> None:
    given = [f"{name}.existingSecret=mine" for name in ("redis.auth", "redis.acl", "fabric", "auth")]
    objects = render(*given)
    assert not [name for kind, name in objects if kind == "Secret"]


def test_a_pod_gets_the_time_that_its_drain_takes(render: Render) -> None:
    objects = render("gateway.drainSeconds=100", "gateway.drainDelaySeconds=7", "experts.drainSeconds=40")
    grace = {name: template["spec"]["terminationGracePeriodSeconds"] for name, template in pods(objects)}
    assert grace["mesh-expertmesh-gateway"] > 100 + 3 * 7
    assert grace["mesh-expertmesh-experts-0"] > 80
