"""What the chart renders is what a real API server accepts: all profiles, and the options that change objects."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from testkit.chart import CHART, ROOT
from testkit.kube import Cluster
from testkit.release import NAME

PROFILES = ("dev", "single-node", "multi-node")
MODEL = "model.hostPath.path=/models"
OPTIONS = {
    "plain": [],
    "experts with attention": ["attention.experts=local"],
    "many groups": [
        *("experts.groups=4", "experts.replicas=3", "experts.perGroup.2.replicas=5"),
        *("experts.perGroup.1.nodeSelector.disk=ssd", "experts.perGroup.3.replicas=null"),
    ],
    "Redis elsewhere": [
        "redis.enabled=false",
        "redis.external.url=rediss://redis.db:6380/0",
        "redis.external.caSecret=redis-ca",
    ],
    "secrets of others": [f"{name}.existingSecret=mine" for name in ("redis.auth", "fabric", "auth")],
    "no keys, no policies": ["auth.enabled=false", "networkPolicy.enabled=false", "metrics.podMonitor.enabled=true"],
    "autoscaled": [
        *("autoscaling.enabled=true", "metrics.podMonitor.enabled=true", "metrics.prometheusRule.enabled=true"),
        *(
            "autoscaling.prometheus.serverAddress=http://prometheus.monitoring:9090",
            "autoscaling.sleepAfterSeconds=600",
        ),
        *("autoscaling.prometheus.authModes=bearer", "autoscaling.prometheus.existingSecret=token"),
        *("experts.perGroup.0.maxReplicas=8", "networkPolicy.apiServerTo[0].ipBlock.cidr=10.0.0.1/32"),
    ],
    "autoscaled without KEDA": [
        *("autoscaling.enabled=true", "metrics.podMonitor.enabled=true"),
        "autoscaling.prometheus.serverAddress=http://prometheus.monitoring:9090",
    ],
    "prefetched": [
        *("model.source=pvc", "model.pvc.prefetch.enabled=true", "model.pvc.prefetch.source=hf://a/b@c"),
        f"model.pvc.prefetch.sha256.model\\.safetensors={'0' * 64}",
        *("model.pvc.prefetch.tolerations[0].operator=Exists", "model.pvc.prefetch.priorityClassName=low"),
    ],
    "a claim of others": ["model.source=pvc", "model.pvc.existingClaim=models", "model.subPath=olmoe"],
    "an image volume": ["model.source=image", "model.image.reference=registry/model@sha256:" + "0" * 64],
    "devices": [
        *("attention.resources.limits.nvidia\\.com/mig-3g\\.40gb=1", "experts.resources.limits.rdma/hca=1"),
        *("experts.resourceClaims[0].name=gpu", "experts.resourceClaims[0].resourceClaimTemplateName=one-gpu"),
        *("experts.resources.claims[0].name=gpu", "fabric.ncclEnv.NCCL_IB_HCA=mlx5", "experts.runtimeClassName=nvidia"),
    ],
    "placed": [
        *("gateway.rollingUpdate.maxSurge=25%", "scheduler.rollingUpdate.maxUnavailable=1", "bindAddress=::"),
        *("gateway.podLabels.team=a", "commonLabels.team=b", "commonAnnotations.note=c"),
        *("gateway.spread=hard", "experts.priorityClassName=high", "attention.tolerations[0].key=gpu"),
        *(
            "attention.tolerations[0].operator=Exists",
            "gateway.service.type=NodePort",
            "gateway.service.nodePort=30080",
        ),
        *("gateway.ingress.enabled=true", "gateway.ingress.host=llm.example.org", "gateway.ingress.tlsSecret=cert"),
    ],
}


@pytest.fixture(scope="module")
def namespace(bare_cluster: Cluster) -> Iterator[str]:
    """The one that the manifests name."""
    with bare_cluster.namespace("expertmesh", level="privileged") as name:
        yield name


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("profile", PROFILES)
def test_every_rendering_is_accepted(bare_cluster: Cluster, namespace: str, profile: str, option: str) -> None:
    settings = [word for setting in [MODEL, *OPTIONS[option]] for word in ("--set", setting)]
    values = ("--values", str(CHART / f"values-{profile}.yaml"))
    apis = () if option == "autoscaled without KEDA" else ("--api-versions", "keda.sh/v1alpha1")
    text = bare_cluster.helm("template", NAME, str(CHART), "--namespace", namespace, *apis, *values, *settings)
    said = bare_cluster.kubectl("-n", namespace, "apply", "--dry-run=server", "-f", "-", text=text)
    assert said.count("server dry run") == text.count("\nkind: ")
    assert ("kind: ScaledObject" in text) is (option == "autoscaled")


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.usefixtures("namespace")
def test_the_manifests_are_accepted(bare_cluster: Cluster, profile: str) -> None:
    folder = ROOT / "manifests" / profile
    said = bare_cluster.kubectl("apply", "--dry-run=server", "-k", str(folder))
    assert said.count("server dry run") == (folder / "expertmesh.yaml").read_text().count("\nkind: ")
