"""The manifest for KubeRay: what the operator knows of its fields, and what Ray and the application make of them."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

ray = pytest.importorskip("ray", reason="Ray has no wheel for this Python")
jsonschema = pytest.importorskip("jsonschema")  # Ray needs it

ROOT = Path(__file__).resolve().parents[3]
SERVICE: dict[str, Any] = yaml.safe_load((ROOT / "manifests/ray/rayservice.yaml").read_text())
CLUSTER: dict[str, Any] = SERVICE["spec"]["rayClusterConfig"]
PODS = [group["template"]["spec"] for group in (CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"])]


def _strict(schema: Any) -> Any:
    """Return ``schema``, refusing fields that it does not list, as an API server does that is asked to."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {"additionalProperties": False} if isinstance(schema.get("properties"), dict) and "type" in schema else {}
    return closed | {name: _strict(each) for name, each in schema.items()}


def _faults(service: Any) -> list[str]:
    schema = _strict(yaml.safe_load(Path(__file__).with_name("rayservice-schema.yaml").read_text()))
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(service)]


def test_the_operator_knows_its_fields() -> None:
    assert _faults(SERVICE) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda spec: spec["rayClusterConfig"].update(gcsFaultToleranceOption={}),
        lambda spec: spec["rayClusterConfig"]["headGroupSpec"]["rayStartParams"].update({"num-gpus": 0}),
        lambda spec: spec["rayClusterConfig"]["headGroupSpec"]["template"].update(containers=[]),
        lambda spec: spec["rayClusterConfig"]["workerGroupSpecs"][0].pop("maxReplicas"),
        lambda spec: spec.update(serveConfigV2={"applications": []}),
    ],
    ids=["misspelt", "a number where text is wanted", "at the wrong place", "left out", "no text"],
)
def test_what_the_operator_would_refuse_is_seen(damage: Callable[[dict[str, Any]], object]) -> None:
    damaged = deepcopy(SERVICE)
    damage(damaged["spec"])
    assert len(_faults(damaged)) == 1


def test_each_volume_that_is_mounted_is_there_and_all_nodes_are_alike() -> None:
    for pod in PODS:
        (container,) = pod["containers"]
        assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    head, *others = (pod["containers"][0] for pod in PODS)
    for name in ("image", "env", "volumeMounts"):
        assert all(each[name] == head[name] for each in others), name


def test_one_version_of_ray_is_named_everywhere() -> None:
    version = CLUSTER["rayVersion"]
    assert f"rayproject/ray:{version}-" in (ROOT / "docs/ray.md").read_text()
    assert f"ray=={version}\n" in (ROOT / "constraints.txt").read_text()


def test_files_that_the_application_reads_are_mounted() -> None:
    (application,) = yaml.safe_load(SERVICE["spec"]["serveConfigV2"])["applications"]
    settings = application["args"]["settings"]
    mounted = [each["mountPath"] for each in PODS[0]["containers"][0]["volumeMounts"]]
    for name in ("model", "redis_url_file", "fabric_secret_file"):
        assert any(settings[name].startswith(f"{path}/") for path in mounted), name
