"""What the chart renders is what a real API server accepts: all profiles, and the options that change objects."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pytest
import yaml
from testkit.kube.chart import CHART, ROOT
from testkit.kube.cluster import Cluster
from testkit.kube.release import NAME, PREFIX

from services.queue.acl import RULES

PROFILES = ("dev", "single-node", "multi-node")
MODEL = "model.hostPath.path=/models"
HAS_DISK = "nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[0]"
OPTIONS = {
    "plain": [],
    "experts with attention": ["layout=local"],
    "workers of a node in one pod": [
        *("layout=colocated", "attention.workers=4", "attention.colocated.groups=2"),
        *("attention.colocated.shared=off", "attention.resources.limits.nvidia\\.com/gpu=4"),
    ],
    "many groups": [
        *("experts.groups=4", "experts.replicas=3", "experts.perGroup.2.replicas=5"),
        *("experts.perGroup.1.nodeSelector.disk=ssd", "experts.perGroup.3.replicas=null"),
    ],
    "Redis elsewhere": [
        *("redis.enabled=false", "redis.external.url=rediss://redis.db:6380/0", "redis.external.caSecret=redis-ca"),
    ],
    "Redis by Sentinels": [
        *("redis.enabled=false", "redis.external.existingSecret=redis-url"),
        "redis.external.url=redis+sentinel://s0.db:26379\\,s1.db:26379/mymaster/0",
    ],
    "secrets of others": [f"{name}.existingSecret=mine" for name in ("redis.auth", "redis.acl", "fabric", "auth")],
    "one password for all": ["redis.acl.enabled=false"],
    "users alone": ["redis.acl.defaultUser=false"],
    "encrypted": [
        *("redis.tls.enabled=true", "redis.tls.secretName=redis-tls", "redis.tls.plaintext=true"),
        *("fabric.tls.enabled=true", "fabric.tls.secretName=fabric-tls", "fabric.lane=tcp"),
    ],
    "no keys, no policies": ["auth.enabled=false", "networkPolicy.enabled=false", "metrics.podMonitor.enabled=true"],
    "observed": ["dashboards.enabled=true", "metrics.podMonitor.enabled=true", "metrics.prometheusRule.enabled=true"],
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
        *("model.pvc.prefetch.podLabels.team=a", "model.pvc.prefetch.podAnnotations.note=b"),
        *("model.pvc.prefetch.serviceAccount.annotations.role=c", "model.pvc.prefetch.waitResources.limits.cpu=1"),
    ],
    "a claim of others": ["model.source=pvc", "model.pvc.existingClaim=models", "model.subPath=olmoe"],
    "an image volume": [
        *("model.source=image", "model.image.reference=registry/model@sha256:" + "0" * 64),
        "model.pvc.prefetch.enabled=false",
    ],
    "devices": [
        *("attention.resources.limits.nvidia\\.com/mig-3g\\.40gb=1", "experts.resources.limits.rdma/hca=1"),
        *("experts.resourceClaims[0].name=gpu", "experts.resourceClaims[0].resourceClaimTemplateName=one-gpu"),
        *("experts.resources.claims[0].name=gpu", "fabric.ncclEnv.NCCL_IB_HCA=mlx5", "experts.runtimeClassName=nvidia"),
    ],
    "tested elsewhere": [
        *("test.nodeSelector.pool=cpu", "test.tolerations[0].operator=Exists", "test.resources.limits.memory=1Gi"),
        *(f"test.affinity.{HAS_DISK}.{field}" for field in ("key=disk", "operator=Exists")),
        *(f"{role}.serviceAccount.annotations.cloud/role=arn" for role in ("gateway", "attention", "experts", "redis")),
    ],
    "rights of their own": [
        *("attention.containerSecurityContext.capabilities.add[0]=IPC_LOCK", "redis.podSecurityContext.runAsUser=null"),
        *("attention.containerSecurityContext.runAsUser=0", "attention.containerSecurityContext.runAsNonRoot=false"),
        *("gateway.podSecurityContext.supplementalGroups[0]=5", "scheduler.containerSecurityContext.runAsUser=5"),
        "experts.perGroup.0.containerSecurityContext.capabilities.add[0]=IPC_LOCK",
    ],
    "a lost node": ["nodeLostSeconds=5", "gateway.tolerations[0].operator=Exists", "gateway.tolerations[0].key=gpu"],
    "placed": [
        *("gateway.rollingUpdate.maxSurge=25%", "scheduler.rollingUpdate.maxUnavailable=1", "bindAddress=::"),
        *("gateway.podLabels.team=a", "commonLabels.team=b", "commonAnnotations.note=c"),
        *("gateway.spread=hard", "experts.priorityClassName=high", "gateway.service.type=NodePort"),
        *("attention.tolerations[0].key=gpu", "attention.tolerations[0].operator=Exists"),
        "gateway.service.nodePort=30080",
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
    asked = [MODEL] if profile == "single-node" and "model.source" not in str(OPTIONS[option]) else []
    apis = () if option == "autoscaled without KEDA" else ("--api-versions", "keda.sh/v1alpha1")
    text = bare_cluster.rendered(namespace, profile, *asked, *OPTIONS[option], words=apis)
    assert bare_cluster.dry_run(namespace, text).count("server dry run") == text.count("\nkind: ")
    assert ("kind: ScaledObject" in text) is (option == "autoscaled")


@pytest.fixture(scope="module", params=["restricted", "baseline"])
def warned(bare_cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """A namespace in which workloads of less than a level of pod security are warned of, and the level."""
    with bare_cluster.namespace(f"t-level-{request.param}", level="privileged") as name:
        bare_cluster.kubectl("label", "namespace", name, f"pod-security.kubernetes.io/warn={request.param}")
        yield name, request.param


LOCK = [f"{role}.containerSecurityContext.capabilities.add[0]=IPC_LOCK" for role in ("attention", "experts")]


@pytest.mark.parametrize(
    ("settings", "breaks", "what"),
    [
        ([], [], ""),
        (["model.source=hostPath", MODEL], ["restricted", "baseline"], "hostPath"),
        (LOCK, ["restricted", "baseline"], 'must not include "IPC_LOCK" in securityContext.capabilities.add'),
        (["redis.uid=0", "redis.podSecurityContext.runAsNonRoot=false"], ["restricted"], "runAsNonRoot != true"),
        (["podSecurityContext.seccompProfile.type=Unconfined"], ["restricted", "baseline"], "seccompProfile"),
        (["containerSecurityContext.readOnlyRootFilesystem=false"], [], ""),
    ],
)
def test_which_level_of_pod_security_a_setting_keeps(
    bare_cluster: Cluster, warned: tuple[str, str], settings: list[str], breaks: list[str], what: str
) -> None:
    """The table in the chart's README."""
    name, level = warned
    text = bare_cluster.rendered(name, "dev", *settings)
    said = bare_cluster.dry_run(name, text, check=False)
    assert said.count("server dry run") == text.count("\nkind: ")
    warnings = [line for line in said.splitlines() if "would violate PodSecurity" in line]
    assert all(f'"{level}:latest"' in line and what in line for line in warnings)
    assert bool(warnings) is (level in breaks)


INSTALLED = (
    *("redis.persistence.enabled=true", "model.source=pvc", "fullnameOverride=mesh-expertmesh"),
    *(f"{role}.replicas=0" for role in ("gateway", "attention", "experts")),
)
STANDING = ("Deployment", "StatefulSet", "PersistentVolumeClaim")


@pytest.fixture(scope="module")
def standing(bare_cluster: Cluster) -> Iterator[str]:
    """A namespace with a release's workloads and its claim, without pods."""
    with bare_cluster.namespace("t-standing") as name:
        bare_cluster.kubectl("-n", name, "apply", "-f", "-", text=_registration(bare_cluster, name))
        yield name


def _registration(cluster: Cluster, namespace: str, *settings: str) -> str:
    """What of a release with ``settings`` an upgrade may meet, all scaled to zero."""
    text = cluster.rendered(namespace, "dev", *INSTALLED, *settings)
    found = [each for each in yaml.safe_load_all(text) if each and each["kind"] in STANDING]
    for each in found:
        if "replicas" in each["spec"]:
            each["spec"]["replicas"] = 0
    return yaml.safe_dump_all(found)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["redis.persistence.size=3Gi"], "updates to statefulset spec for fields other than"),
        (["redis.persistence.enabled=false"], "updates to statefulset spec for fields other than"),
        (["redis.persistence.storageClassName=fast"], "updates to statefulset spec for fields other than"),
        (["model.pvc.storageClassName=fast"], "spec is immutable after creation except"),
        (["model.pvc.accessModes={ReadWriteOnce}"], "spec is immutable after creation except"),
        (["nameOverride=other"], "field is immutable"),
    ],
)
def test_what_the_api_server_refuses_in_an_upgrade(
    bare_cluster: Cluster, standing: str, settings: list[str], says: str
) -> None:
    """The table in the chart's README."""
    text = _registration(bare_cluster, standing, *settings)
    assert says in bare_cluster.dry_run(standing, text, check=False)


@pytest.mark.parametrize(
    "settings",
    [
        ["redis.resources.limits.cpu=1", "redis.uid=5", "redis.nodeSelector.disk=ssd", "images.redis.tag=7.4"],
        ["experts.drainSeconds=5", "experts.resources.limits.rdma/hca=1", "nodeLostSeconds=null", "commonLabels.a=b"],
        ["gateway.service.type=LoadBalancer", "fabric.shmSize=2Gi", "attention.rollingUpdate.maxSurge=2"],
    ],
)
def test_the_rest_may_change(bare_cluster: Cluster, standing: str, settings: list[str]) -> None:
    text = _registration(bare_cluster, standing, *settings)
    assert " configured (server dry run)" in bare_cluster.dry_run(standing, text)


@pytest.mark.parametrize("profile", [*PROFILES, "observability"])
@pytest.mark.usefixtures("namespace")
def test_the_manifests_are_accepted(bare_cluster: Cluster, profile: str) -> None:
    folder = ROOT / "manifests" / profile
    said = bare_cluster.kubectl("apply", "--dry-run=server", "-k", str(folder))
    assert said.count("server dry run") == (folder / "expertmesh.yaml").read_text().count("\nkind: ")


def test_a_secret_that_is_kept_is_found(bare_cluster: Cluster, namespace: str) -> None:
    """Under another name too."""
    bare_cluster.kubectl(
        *("-n", namespace, "create", "secret", "generic", f"{PREFIX}-redis", "--from-literal=redis-password=kept")
    )
    words = ("--namespace", namespace, "--dry-run=server", "--show-only", "templates/redis-secret.yaml")
    for key in ("redis-password", "other"):
        text = bare_cluster.helm("template", NAME, str(CHART), *words, "--set", f"redis.auth.key={key}")
        assert yaml.safe_load(text)["data"] == {key: base64.b64encode(b"kept").decode()}
    users = ("-n", namespace, "create", "secret", "generic", f"{PREFIX}-redis-users", "--from-literal=gateway=kept")
    bare_cluster.kubectl(*users)
    words = (*words[:3], "--show-only", "templates/redis-users-secret.yaml")
    data = yaml.safe_load(bare_cluster.helm("template", NAME, str(CHART), *words))["data"]
    assert data.keys() == set(RULES)
    assert data["gateway"] == base64.b64encode(b"kept").decode() != data["experts"]
