"""What an upgrade may not change, because it stands in Redis. The installed ConfigMap is played by a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from testkit.kube.chart import ROLES, Render, named

PROBE = '{{ include "expertmesh.unchanged" (dict "root" $ "found" .Values.global.found) }}'


@pytest.fixture
def upgrade(probed: Callable[..., Any], render: Render) -> Callable[..., str]:
    """What helm says as ``after`` follows ``before``, both lists of settings; empty where it renders. ``lacks``: what
    the installed ConfigMap is without."""

    def run(before: list[str], after: list[str], lacks: tuple[str, ...] = ()) -> str:
        installed = named(render(*before, profile=None), "ConfigMap", "scheduler")
        for key in lacks:
            (installed["metadata"] if key == "annotations" else installed).pop(key)
        done = probed(PROBE, installed, *after)
        return "" if done.returncode == 0 else str(done.stderr)

    return run


def test_another_number_of_groups_is_refused(upgrade: Callable[..., str]) -> None:
    said = upgrade(["experts.groups=2"], ["experts.groups=4"])
    assert "experts.groups is 2 in the installed release, not 4" in said
    assert "Give another redis.keyPrefix with it" in said
    assert upgrade(["experts.groups=2"], ["experts.groups=2", "experts.replicas=3"]) == ""
    assert upgrade(["experts.groups=2"], ["experts.groups=4", "redis.keyPrefix=again"]) == ""
    assert upgrade(["layout=local"], ["experts.groups=4"]) == ""


def test_another_number_of_groups_in_a_pod_is_refused_by_the_value_that_says_it(upgrade: Callable[..., str]) -> None:
    two, four = (["layout=colocated", f"attention.workers={workers}"] for workers in (2, 4))
    said = upgrade(two, four)
    assert "attention.colocated.groups (0: as many as attention.workers) is 2 in the installed release, not 4" in said
    assert "attention.colocated.groups is 2 in the installed release, not 3" in upgrade(
        two, [*four, "attention.colocated.groups=3"]
    )
    assert upgrade(two, [*four, "attention.colocated.groups=2"]) == ""
    assert "experts.groups is 4 in the installed release, not 2" in upgrade(four, ["experts.groups=2"])
    assert "attention.colocated.groups" in upgrade(["experts.groups=3"], two)
    assert upgrade(["experts.groups=2"], two) == upgrade(two, ["layout=local"]) == ""
    assert upgrade(two, [*four, "redis.keyPrefix=again"]) == ""


def test_another_model_is_refused(upgrade: Callable[..., str]) -> None:
    one, two = (["model.source=hostPath", "model.hostPath.path=/models", f"model.subPath={name}"] for name in "ab")
    assert "serves the model /models/a, not /models/b. Give another redis.keyPrefix" in upgrade(one, two)
    assert upgrade(one, [*two, "redis.keyPrefix=again"]) == ""
    assert upgrade(one, one) == ""
    revision = ["model.source=pvc", "model.pvc.prefetch.enabled=true", "model.pvc.prefetch.source=hf://a/b@"]
    said = upgrade([*revision[:2], revision[2] + "c"], [*revision[:2], revision[2] + "d"])
    assert "serves the model hf://a/b@c, not hf://a/b@d" in said


def test_a_configmap_that_does_not_say_it_stops_nothing(upgrade: Callable[..., str]) -> None:
    assert upgrade(["experts.groups=2"], ["experts.groups=2", "model.source=image", "model.image.reference=a"]) != ""
    after = ["experts.groups=4", "model.source=image", "model.image.reference=a"]
    assert upgrade(["experts.groups=2"], after, lacks=("annotations", "data")) == ""


def test_a_long_name_that_was_cut_otherwise_is_kept_or_refused(probed: Callable[..., Any], render: Render) -> None:
    release, old = "r" * 45, "r" * 40
    installed = render(f"fullnameOverride={old}", release=release, profile=None)["ConfigMap", f"{old}-scheduler"]
    probe = '{{ include "expertmesh.sameName" (dict "root" $ "found" .Values.global.found) }}'
    done = probed(probe, installed, release=release)
    assert f"calls its objects {old}, not {'r' * 31}-" in done.stderr
    assert f"Set fullnameOverride={old} to keep them" in done.stderr
    assert probed(probe, installed, release="s" * 45).returncode == 0, "it is another release's"


OF_LATER = (
    *("test", "nodeLostSeconds", "tmpSize", "redis.acl", "redis.tls", "redis.external.keys", "fabric.tls", "layout"),
    *("attention.workers", "attention.colocated", "attention.lockstep"),
    *("model.pvc.prefetch.waitResources", "model.pvc.prefetch.serviceAccount"),
    *(f"{role}.serviceAccount" for role in (*ROLES, "redis")),
    *(f"{role}.{part}SecurityContext" for role in (*ROLES, "redis") for part in ("pod", "container")),
)


def test_values_of_an_earlier_chart_are_enough(render: Render) -> None:
    """``helm upgrade --reuse-values`` brings the values of the chart that was installed, and no others."""
    objects = render(*(f"{name}=null" for name in OF_LATER))
    assert {kind for kind, _ in objects} >= {"Deployment", "StatefulSet", "ServiceAccount"}
    assert named(objects, "Pod", "test")["spec"]["containers"][0]["resources"] == {}
