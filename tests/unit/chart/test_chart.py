"""The chart without a cluster: what follows from it is up to date, and its objects fit together."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from testkit.kube.chart import CHART, ROLES, ROOT, WORKLOADS, Render, config, container, pods

PROFILES = {"dev": [], "single-node": ["model.hostPath.path=/models"], "multi-node": []}
"""With what each asks for."""


@pytest.mark.parametrize("script", ["generate.py", "render.py"])
def test_what_follows_from_the_chart_is_up_to_date(script: str) -> None:
    command = [sys.executable, str(ROOT / "helm" / script), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("profile", PROFILES)
def test_lint_finds_nothing(helm: Callable[..., Any], profile: str) -> None:
    options = ("--strict", "--values", str(CHART / f"values-{profile}.yaml"))
    done = helm(*PROFILES[profile], command=("lint",), options=options)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("profile", PROFILES)
def test_every_pod_is_what_the_restricted_level_asks_for(render: Render, profile: str) -> None:
    """But for the volume of hostPath, which single-node is about."""
    seen = 0
    for _, template in pods(render(*PROFILES[profile], profile=profile)):
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for each in spec["containers"] + spec.get("initContainers", []):
            seen += 1
            context = each["securityContext"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert (context["allowPrivilegeEscalation"], context["readOnlyRootFilesystem"]) == (False, True)
            assert each["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert seen >= 5


@pytest.mark.parametrize("role", ROLES)
def test_each_role_reads_the_file_that_the_chart_writes(render: Render, read: Callable[..., Any], role: str) -> None:
    settings = read(render("config.max_attempts=5", "config.lease=3", f"{role}.config.max_attempts=6"), role)
    assert (settings.max_attempts, settings.lease, settings.host) == (6, 3.0, "0.0.0.0")
    assert settings.namespace == "there.mesh"


def test_there_is_a_set_for_each_group_with_values_of_its_own(render: Render) -> None:
    objects = render("experts.groups=3", "experts.replicas=2", "experts.perGroup.1.replicas=5")
    sets = {name: each["spec"] for (kind, name), each in objects.items() if kind == "StatefulSet" and "experts" in name}
    names = [f"mesh-expertmesh-experts-{group}" for group in range(3)]
    assert {name: spec["replicas"] for name, spec in sets.items()} == dict(zip(names, (2, 5, 2), strict=True))
    for number, name in enumerate(names):
        env = {each["name"]: each.get("value") for each in container(objects, name)["env"]}
        assert env["EXPERTMESH_EXPERT_GROUP"] == str(number)
    assert config(objects, "scheduler")["expert_groups"] == 3


def test_what_an_autoscaler_counts_is_left_to_it(render: Render) -> None:
    objects = render(*(f"{role}.replicas=null" for role in ("gateway", "attention", "experts")))
    counted = {name: each["spec"].get("replicas") for (kind, name), each in objects.items() if kind in WORKLOADS}
    left = {name.removeprefix("mesh-expertmesh-") for name, replicas in counted.items() if replicas is None}
    assert left == {"gateway", "attention", "experts-0", "experts-1"}


def test_experts_may_stay_with_the_attention_workers(render: Render) -> None:
    objects = render("layout=local")
    assert not [name for _, name in objects if "experts" in name.removeprefix("mesh-expertmesh")]
    assert ("Secret", "mesh-expertmesh-fabric") not in objects


def test_the_hash_in_the_key_file_is_that_of_the_key(render: Render) -> None:
    data = render()["Secret", "mesh-expertmesh-api-keys"]["data"]
    key, file = (base64.b64decode(data[name]) for name in ("api-key", "keys.yaml"))
    assert yaml.safe_load(file)["keys"][0]["sha256"] == hashlib.sha256(key).hexdigest()


def test_of_given_secrets_none_is_made(render: Render) -> None:
    objects = render(*(f"{name}.existingSecret=mine" for name in ("redis.auth", "redis.acl", "fabric", "auth")))
    assert not [name for kind, name in objects if kind == "Secret"]


def test_a_pod_gets_the_time_that_its_drain_takes(render: Render) -> None:
    objects = render("gateway.drainSeconds=100", "gateway.drainDelaySeconds=7", "experts.drainSeconds=40")
    grace = {name: template["spec"]["terminationGracePeriodSeconds"] for name, template in pods(objects)}
    assert grace["mesh-expertmesh-gateway"] > 100 + 3 * 7
    assert grace["mesh-expertmesh-experts-0"] > 80
