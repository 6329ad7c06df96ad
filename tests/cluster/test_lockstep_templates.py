"""Attention workers that share the experts, as LeaderWorkerSets: what is rendered is what the API server takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from testkit.kube.chart import chart_words
from testkit.kube.cluster import Cluster
from testkit.kube.leader_worker_sets import defined
from testkit.kube.release import NAME

PROFILES = ("dev", "single-node", "multi-node")
LOCKSTEP = {
    "plain": ["attention.workers=4"],
    "sliced, over nodes": [
        *("attention.workers=8", "attention.replicas=2", "attention.config.expert_slices=2"),
        *("attention.lockstep.annotations.place=rack", "attention.rollingUpdate.maxSurge=1"),
    ],
}

SCALED = {
    "fixed": ["autoscaling.enabled=false"],
    "scaled": [
        *("autoscaling.enabled=true", "metrics.podMonitor.enabled=true"),
        "autoscaling.prometheus.serverAddress=http://prometheus:9090",
    ],
}


@pytest.fixture(scope="module")
def namespace(bare_cluster: Cluster) -> Iterator[str]:
    """A namespace, in a cluster with the controller's definition of LeaderWorkerSets or, without that, with ours."""
    with defined(bare_cluster), bare_cluster.namespace("t-lockstep-templates", level="privileged") as name:
        yield name


def test_a_cluster_without_groups_says_so(bare_cluster: Cluster) -> None:
    """The chart fails before anything is made, with and without autoscaling."""
    if "leaderworkersets" in bare_cluster.kubectl("get", "crd", "-o", "name"):
        pytest.skip("this cluster knows LeaderWorkerSets")
    for option in SCALED.values():
        chart = chart_words("dev", "layout=lockstep", "attention.workers=2", *option)
        said = bare_cluster.helm("install", NAME, *chart, "--dry-run=server", check=False)
        assert "makes a LeaderWorkerSet, which this cluster does not know" in said


@pytest.mark.parametrize("scaled", SCALED)
@pytest.mark.parametrize("option", LOCKSTEP)
@pytest.mark.parametrize("profile", PROFILES)
def test_groups_of_ranks_are_accepted(
    bare_cluster: Cluster, namespace: str, profile: str, option: str, scaled: str
) -> None:
    model = ["model.hostPath.path=/models"] if profile == "single-node" else []
    chosen = ["layout=lockstep", *SCALED[scaled], *model, *LOCKSTEP[option]]
    text = bare_cluster.rendered(namespace, profile, *chosen, words=("--api-versions", "keda.sh/v1alpha1"))
    assert _dry_run(bare_cluster, namespace, text).count("server dry run") == text.count("\nkind: ")
    [ranks] = [each for each in yaml.safe_load_all(text) if each and each["kind"] == "LeaderWorkerSet"]
    pods = ranks["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    assert "server dry run" in _dry_run(bare_cluster, namespace, json.dumps(_deployment(pods)))


def _dry_run(cluster: Cluster, namespace: str, text: str) -> str:
    """Strict: a field that the API does not know is an error, too."""
    return cluster.dry_run(namespace, text, "--validate=strict")


def _deployment(pods: dict[str, Any]) -> dict[str, Any]:
    """A workload that the API server knows by heart, of the same pods."""
    spec = {"selector": {"matchLabels": pods["metadata"]["labels"]}, "template": pods}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "ranks"}, "spec": spec}
