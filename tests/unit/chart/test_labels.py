"""Names, labels and selectors, with values and releases that make them meet."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
from testkit.kube.chart import CHART, WORKLOADS, Render, config, named, pods

ROLE = "app.kubernetes.io/component"
SELECTING = {"Service": "selector", "PodDisruptionBudget": "selector", "NetworkPolicy": "podSelector"}
SELECTING |= dict.fromkeys(WORKLOADS, "selector")


def selector(kind: str, each: dict[str, Any]) -> set[tuple[str, str]]:
    found = each["spec"][SELECTING[kind]]
    return set((found if kind == "Service" else found["matchLabels"]).items())


def test_no_selector_finds_pods_of_another_release_or_role(render: Render) -> None:
    one, two = (render("experts.groups=3", release=name) for name in ("mesh", "mesh-two"))
    labels = {
        (release, name): pod["metadata"]["labels"]
        for release, objects in (("mesh", one), ("mesh-two", two))
        for name, pod in pods(objects)
    }
    mine = {key for key in labels if key[0] == "mesh"}
    seen = 0
    for (kind, name), each in one.items():
        if kind not in SELECTING or name == "mesh-expertmesh-default":
            continue
        found = {key for key, has in labels.items() if selector(kind, each) <= has.items()}
        role = each["metadata"]["labels"][ROLE]
        assert found <= {key for key in mine if labels[key][ROLE] == role}, (kind, name)
        assert found or role == "test"
        if kind == "PodDisruptionBudget" or kind in WORKLOADS:
            assert found == {("mesh", name)}
        seen += 1
    assert len(mine) == 7
    assert seen > 12 + len(mine)
    everyone = selector("NetworkPolicy", one["NetworkPolicy", "mesh-expertmesh-default"])
    assert {key for key, has in labels.items() if everyone <= has.items()} == mine


def test_another_version_of_the_chart_restarts_nothing(render: Render, tmp_path: Path) -> None:
    settings = [f"{name}.existingSecret=mine" for name in ("redis.auth", "fabric", "auth")]
    before = render(*settings)
    file = shutil.copytree(CHART, tmp_path / "chart") / "Chart.yaml"
    file.write_text(file.read_text().replace("version: 0.1.0", "version: 0.1.1+build.7"))
    after = render(*settings, chart=file.parent)
    assert list(pods(before)) == list(pods(after))
    assert named(after, "Deployment", "gateway")["metadata"]["labels"]["helm.sh/chart"] == "expertmesh-0.1.1_build.7"


def test_labels_and_annotations_that_meet_are_written_once(render: Render) -> None:
    """conftest refuses a key that stands twice."""
    objects = render(
        *("commonLabels.team=a", "commonLabels.app\\.kubernetes\\.io/instance=stolen", "gateway.podLabels.team=b"),
        *("commonAnnotations.note=a", "gateway.podAnnotations.note=b", "gateway.podAnnotations.checksum/config=x"),
        *("redis.podLabels.app\\.kubernetes\\.io/name=stolen", "redis.podAnnotations.checksum/config=x"),
    )
    gateway = named(objects, "Deployment", "gateway")["spec"]["template"]["metadata"]
    assert (gateway["labels"]["team"], gateway["annotations"]["note"]) == ("b", "b")
    assert len(gateway["annotations"]["checksum/config"]) == 64
    for each in objects.values():
        assert each["metadata"]["labels"]["app.kubernetes.io/instance"] == "mesh"
        if each["kind"] in WORKLOADS:
            wanted = each["spec"]["selector"]["matchLabels"].items()
            assert wanted <= each["spec"]["template"]["metadata"]["labels"].items()


def test_a_release_may_have_a_number_for_its_name(render: Render) -> None:
    objects = render("redis.auth.existingSecret=1e3", release="123", namespace="456")
    assert {each["metadata"]["namespace"] for each in objects.values()} == {"456"}
    assert {each["metadata"]["labels"]["app.kubernetes.io/instance"] for each in objects.values()} == {"123"}
    for _, template in pods(objects):
        for env in template["spec"]["containers"][0].get("env", []):
            for reference in env.get("valueFrom", {}).values():
                assert all(isinstance(value, str) for value in reference.values())


def test_a_podmonitors_labels_are_labels(render: Render) -> None:
    objects = render("metrics.podMonitor.enabled=true", "metrics.podMonitor.labels.stack=main", "commonAnnotations.a=b")
    found = named(objects, "PodMonitor", "roles")["metadata"]
    assert (found["labels"]["stack"], found["annotations"]) == ("main", {"a": "b"})


def test_long_names_make_no_object_of_the_same_name(render: Render) -> None:
    stem = "a-team-with-a-long-name-serves-its-model-in"
    one, two = (set(render(release=f"{stem}-{end}", profile=None)) for end in ("zone1", "zone2"))
    assert not one & two
    longest = max((name for kind, name in one), key=len)
    assert len(longest) <= 63
    hashed = hashlib.sha256(f"{stem}-zone1-expertmesh".encode()).hexdigest()[:8]
    assert ("Deployment", f"{stem[:31]}-{hashed}-gateway") in one


@pytest.mark.parametrize(
    ("release", "settings", "name"),
    [
        ("mesh", [], "mesh-expertmesh"),
        ("r" * 29, [], "r" * 29 + "-expertmesh"),  # 40 letters
        ("my-expertmesh", [], "my-expertmesh"),
        ("mesh", ["nameOverride=moe"], "mesh-moe"),
        ("mesh", ["fullnameOverride=" + "f" * 40], "f" * 40),
    ],
)
def test_a_short_name_is_what_it_was(render: Render, release: str, settings: list[str], name: str) -> None:
    assert ("Deployment", f"{name}-gateway") in render(*settings, release=release, profile=None)


def test_long_names_share_no_keys_in_redis(render: Render) -> None:
    def prefix(release: str) -> str:
        return str(config(render(release=release, namespace="n" * 40), "scheduler")["namespace"])

    long = [prefix("r" * 40 + end) for end in ("1", "2")]
    assert len(set(long)) == 2
    assert max(map(len, long)) <= 64
    assert prefix("short") == "n" * 40 + ".short"
