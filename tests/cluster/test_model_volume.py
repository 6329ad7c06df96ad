"""The checkpoint on a claim that a Job fills and checks, and that gateways and workers wait for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest
from testkit.kube.cluster import Cluster, until
from testkit.kube.release import NAME, PREFIX, WAIT, Release
from testkit.pocket.answers import POCKET

FILE = POCKET / "model/model.safetensors"
DIGEST = hashlib.sha256(FILE.read_bytes()).hexdigest()
SETTINGS = (
    *("model.source=pvc", "model.subPath=pocket", "model.pvc.size=1Gi", "model.pvc.accessModes={ReadWriteOnce}"),
    *("model.pvc.prefetch.enabled=true", "model.pvc.prefetch.source=/source"),
    *("model.pvc.prefetch.extraVolumes[0].name=source", "model.pvc.prefetch.extraVolumeMounts[0].name=source"),
    f"model.pvc.prefetch.extraVolumes[0].hostPath.path={FILE.parent}",
    "model.pvc.prefetch.extraVolumeMounts[0].mountPath=/source",
)


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """`privileged`, for the Job's source is a folder of the node."""
    with cluster.namespace("t-model", level="privileged") as name:
        yield name
        cluster.helm("uninstall", NAME, "--namespace", name, "--wait", check=False)


def _gateways_wait(release: Release) -> dict[str, object]:
    state: dict[str, object] = release.pods("gateway")[0]["status"]["initContainerStatuses"][0]["state"]
    return state


def test_it_serves_what_the_job_fetched_and_keeps_it(cluster: Cluster, namespace: str) -> None:
    release = Release(cluster=cluster, namespace=namespace)
    wrong = f"model.pvc.prefetch.sha256.model\\.safetensors={'0' * 64}"
    release.apply("install", *SETTINGS, wrong, words=())
    folder = cluster.opened(namespace, f"{PREFIX}-model")

    def refused() -> bool:
        ends = [each["state"] for pod in release.pods("fetch") for each in pod["status"].get("containerStatuses", [])]
        return any("has SHA-256" in end["terminated"]["message"] for end in ends if "terminated" in end)

    until(refused, 120, "the Job says that the file is another")
    until(lambda: "running" in _gateways_wait(release), 60, "the gateway waits for the model")
    right = f"model.pvc.prefetch.sha256.model\\.safetensors={DIGEST}"
    release.apply("upgrade", *SETTINGS, right, words=("--wait-for-jobs", *WAIT))
    release.answers_as_recorded(1)
    release.helm("uninstall", NAME, *WAIT)
    assert len(list(folder.glob("*/pocket/model.safetensors"))) == 2  # that of the refused digest is another
    assert cluster.get(namespace, "pvc", f"{PREFIX}-model")["status"]["phase"] == "Bound"
