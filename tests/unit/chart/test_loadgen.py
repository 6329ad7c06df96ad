"""The Job that sends load: none unless asked for, several pods that share a schedule, and what it may reach."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from testkit.kube.chart import Objects, Render, container, named, pod

LOAD = ("loadgen.enabled=true",)
KEPT = (*LOAD, "loadgen.results.enabled=true")


def job(objects: Objects) -> dict[str, Any]:
    return named(objects, "Job", "loadgen")


def args(objects: Objects) -> list[str]:
    found: list[str] = container(objects, "loadgen")["args"]
    return found


def test_there_is_none_unless_it_is_asked_for(render: Render) -> None:
    assert not [name for name in render() if "loadgen" in name[1]]
    kinds = {kind for kind, name in render(*KEPT) if "loadgen" in name}
    assert kinds == {"Job", "PersistentVolumeClaim", "ServiceAccount", "NetworkPolicy"}


def test_it_sends_to_the_gateways_of_its_release_with_their_key(render: Render) -> None:
    objects = render(*LOAD, "gateway.service.port=8080")
    its = container(objects, "loadgen")
    assert its["command"] == ["expertmesh-load"]
    given = ["--rate", "2", "--duration", "60"]
    assert its["args"] == ["run", "http://mesh-expertmesh-gateway:8080", "--wait", "600", *given]
    [key] = [each for each in its["env"] if each["name"] == "OPENAI_API_KEY"]
    assert key["valueFrom"]["secretKeyRef"] == {"name": "mesh-expertmesh-api-keys", "key": "api-key", "optional": True}
    open_to_all = container(render(*LOAD, "auth.enabled=false"), "loadgen")
    assert "OPENAI_API_KEY" not in {each["name"] for each in open_to_all["env"]}


def test_its_image_has_no_torch(render: Render) -> None:
    objects = render(*LOAD)
    assert container(objects, "loadgen")["image"] == container(objects, "gateway")["image"]


def test_options_are_passed_as_they_are(render: Render, tmp_path: Path) -> None:
    """Numbers of a file of values, too, which Helm has as floats."""
    words = ["--slo", "ttft:p99<500ms", "--label", 'a b "c"', "--requests", 1000000, "--rate", 2.5]
    (tmp_path / "values.json").write_text(json.dumps({"loadgen": {"args": words}}))
    objects = render(*LOAD, f"--values {tmp_path / 'values.json'}")
    assert args(objects)[-8:] == [str(word) for word in words]


def test_several_pods_share_one_schedule(render: Render) -> None:
    assert "--shard" not in args(render(*LOAD))
    objects = render(*LOAD, "loadgen.shards=3", "loadgen.startEverySeconds=120")
    spec = job(objects)["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (3, 3, "Indexed")
    assert spec["backoffLimit"] == 0, "a run that is repeated is another run"
    text = " ".join(args(objects))
    assert "--shard $(JOB_COMPLETION_INDEX)/3 --start-at next:120" in text


def test_another_load_is_another_job(render: Render) -> None:
    names = [
        job(render(*LOAD, *more))["metadata"]["name"]
        for more in ((), (), ("loadgen.args={--rate,3}",), ("loadgen.shards=2",), ("loadgen.nodeSelector.pool=load",))
    ]
    assert names[0] == names[1]
    assert len(set(names)) == 4


@pytest.mark.parametrize("settings", [("loadgen.onTest=true",), (*LOAD, "loadgen.onTest=true")])
def test_it_may_wait_for_helm_test(render: Render, settings: tuple[str, ...]) -> None:
    assert "annotations" not in job(render(*LOAD))["metadata"]
    objects = render(*settings)
    annotations = job(objects)["metadata"]["annotations"]
    assert annotations == {"helm.sh/hook": "test", "helm.sh/hook-delete-policy": "before-hook-creation"}
    others = [each for (kind, name), each in objects.items() if "loadgen" in name and kind != "Job"]
    assert not [each for each in others if "helm.sh/hook" in each["metadata"].get("annotations", {})]


def test_results_are_kept_where_they_are_asked_for(render: Render) -> None:
    assert "--out" not in args(render(*LOAD))
    objects = render(*KEPT, "loadgen.results.size=5Gi", "loadgen.results.storageClassName=fast")
    words = args(objects)
    assert words[words.index("--out") + 1] == "/results/$(POD).json"
    [pod_name] = [each for each in container(objects, "loadgen")["env"] if each["name"] == "POD"]
    assert pod_name["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    claim = named(objects, "PersistentVolumeClaim", "loadgen")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert claim["spec"]["resources"]["requests"]["storage"] == "5Gi"
    assert claim["spec"]["storageClassName"] == "fast"
    [volume] = [each for each in pod(objects, "loadgen")["volumes"] if each["name"] == "results"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    mine = render(*KEPT, "loadgen.results.existingClaim=mine")
    assert not [name for kind, name in mine if kind == "PersistentVolumeClaim" and "loadgen" in name]
    [volume] = [each for each in pod(mine, "loadgen")["volumes"] if each["name"] == "results"]
    assert volume["persistentVolumeClaim"]["claimName"] == "mine"


def test_it_reaches_the_gateways_and_nothing_else(render: Render) -> None:
    more = "loadgen.extraEgress[0].ports[0].port=9090"
    objects = render(*LOAD, "networkPolicy.gatewayFrom[0].ipBlock.cidr=10.0.0.0/8", more)
    policy = objects["NetworkPolicy", "mesh-expertmesh-loadgen"]["spec"]
    labels = job(objects)["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    to_gateway, to_prometheus = policy["egress"]
    gateway = named(objects, "Deployment", "gateway")["spec"]["template"]["metadata"]["labels"]
    [peer] = to_gateway["to"]
    assert peer["podSelector"]["matchLabels"].items() <= gateway.items()
    assert (to_gateway["ports"], to_prometheus) == ([{"port": 8000}], {"ports": [{"port": 9090}]})
    [rule, *_] = objects["NetworkPolicy", "mesh-expertmesh-gateway"]["spec"]["ingress"]
    allowed = [each["podSelector"]["matchLabels"] for each in rule["from"] if "podSelector" in each]
    assert any(each.items() <= labels.items() for each in allowed)
    assert not [name for kind, name in render(*LOAD, "networkPolicy.enabled=false") if kind == "NetworkPolicy"]


def test_it_is_restricted_placed_and_labelled_as_other_pods_are(render: Render) -> None:
    placed = ("nodeSelector.pool=load", "priorityClassName=low", "podLabels.team=a", "podAnnotations.x=y")
    account = "serviceAccount.annotations.cloud/role=load"
    objects = render(*KEPT, *(f"loadgen.{each}" for each in (*placed, account)), "loadgen.resources.limits.cpu=2")
    spec, meta = pod(objects, "loadgen"), job(objects)["spec"]["template"]["metadata"]
    assert (spec["nodeSelector"], spec["priorityClassName"], spec["restartPolicy"]) == (
        {"pool": "load"},
        "low",
        "Never",
    )
    assert (meta["labels"]["team"], meta["annotations"]) == ("a", {"x": "y"})
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    [its] = spec["containers"]
    plain = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    assert (its["securityContext"], its["terminationMessagePolicy"]) == (plain, "FallbackToLogsOnError")
    assert its["resources"]["limits"] == {"cpu": 2}
    made = named(objects, "ServiceAccount", "loadgen")
    assert made["metadata"]["name"] == spec["serviceAccountName"]
    assert made["metadata"]["annotations"] == {"cloud/role": "load"}
