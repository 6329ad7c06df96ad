"""The Job that fetches the model: another pod is another Job, another source another folder."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from testkit.kube.chart import PREFETCH, Objects, Render, config, container, named, pod


def job(objects: Objects) -> dict[str, Any]:
    return named(objects, "Job", "fetch")


@pytest.mark.parametrize(
    "setting",
    [
        *("podSecurityContext.runAsUser=5", "imagePullSecrets[0].name=mine", "images.control.pullPolicy=Always"),
        *("model.pvc.prefetch.nodeSelector.disk=ssd", "model.pvc.prefetch.priorityClassName=low"),
        *("containerSecurityContext.runAsUser=5", "model.pvc.existingClaim=another", "nameOverride=other"),
    ],
)
def test_another_pod_is_another_job(render: Render, setting: str) -> None:
    before, after = job(render(*PREFETCH)), job(render(*PREFETCH, setting))
    assert before["spec"]["template"] != after["spec"]["template"]
    assert before["metadata"]["name"] != after["metadata"]["name"]


def test_the_same_pod_is_the_same_job(render: Render) -> None:
    before, after = job(render(*PREFETCH)), job(render(*PREFETCH, "commonLabels.team=a", "commonAnnotations.x=y"))
    assert (before["metadata"]["name"], before["spec"]) == (after["metadata"]["name"], after["spec"])
    assert before["spec"]["template"]["spec"]["restartPolicy"] == "Never", "a failed pod keeps its last words"
    assert job(render(*PREFETCH, "model.pvc.prefetch.tolerations[0].key=x"))["spec"]["template"]["spec"]["tolerations"]


def test_each_source_is_fetched_into_a_folder_of_its_own(render: Render) -> None:
    digest = f"model.pvc.prefetch.sha256.a={'0' * 64}"
    paths: list[str] = [
        config(render(*PREFETCH, *more), "attention")["model"]
        for more in ([], ["model.pvc.prefetch.source=hf://org/model@two"], [digest], ["model.subPath=x"])
    ]
    assert len(set(paths)) == 4
    assert [path.rsplit("/", 1)[1] for path in paths] == ["model", "model", "model", "x"]
    objects = render(*PREFETCH, digest)
    [waits] = pod(objects, "gateway")["initContainers"]
    assert paths[2] == container(objects, "fetch")["args"][1] == waits["args"][2]


def test_the_notes_have_a_command_that_shows_what_a_fetch_failed_of(render: Render, notes: Callable[..., str]) -> None:
    [command] = [line for line in notes(*PREFETCH).splitlines() if "component=fetch" in line]
    [(namespace, selector)] = re.findall(r"^  kubectl -n (\S+) get pods -l (\S+) ", command)
    its = job(render(*PREFETCH))["spec"]["template"]
    assert namespace == "there"
    assert dict(word.split("=") for word in selector.split(",")).items() <= its["metadata"]["labels"].items()
    ends = ".status.containerStatuses[*].state.terminated"
    assert [f"{ends}.{word}" in command for word in ("exitCode", "reason", "message")] == [True] * 3
    assert its["spec"]["containers"][0]["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert "component=fetch" not in notes()
