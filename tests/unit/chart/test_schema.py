"""What the schema refuses before anything is made, one of each kind, and what it must go on taking."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from testkit.kube.chart import Render, container

BAD = {
    "what is no quantity": [
        ("gateway.resources.limits.memory=4GBB", "gateway.resources.limits.memory: Does not match pattern"),
        ("experts.perGroup.0.resources.requests.cpu=two", "experts.perGroup.0.resources.requests.cpu: Does not match"),
        ("attention.resources.requests.cpu=-1", "attention.resources.requests.cpu: Must be greater than or equal to 0"),
        ("redis.persistence.size=2GB", "redis.persistence.size: Does not match pattern"),
        ("model.pvc.size=0Gi", "model.pvc.size: Does not match pattern"),
        ("fabric.shmSize=", "fabric.shmSize: Does not match pattern"),
        ("redis.maxmemory=768Mi", "redis.maxmemory: Does not match pattern"),
    ],
    "a typo": [
        ("gateway.replica=2", "gateway: Additional property replica is not allowed"),
        ("config.max_num_seq=2", "config: Additional property max_num_seq is not allowed"),
        ("experts.perGroup.first.replicas=2", "experts.perGroup: Additional property first is not allowed"),
        ("gateway.resources.limit.memory=1Gi", "gateway.resources: Additional property limit is not allowed"),
        ("redis.resources.limits.memry=1Gi", "redis.resources.limits: Additional property memry is not allowed"),
        ("gateway.tolerations[0].efect=NoSchedule", "gateway.tolerations.0: Additional property efect is not allowed"),
        ("gateway.tolerations[0].operator=Equals", "gateway.tolerations.0.operator must be one of the following"),
        ("gateway.affinity.nodeAfinity.a=b", "gateway.affinity: Additional property nodeAfinity is not allowed"),
        ("gateway.extraEnv[0].nam=A", "gateway.extraEnv.0: name is required"),
        ("gateway.extraVolumeMounts[0].name=a", "gateway.extraVolumeMounts.0: mountPath is required"),
        ("gateway.extraVolumes[0].configMap.name=a", "gateway.extraVolumes.0: name is required"),
        ("gateway.probes.startup.path=/x", "gateway.probes.startup: Additional property path is not allowed"),
        ("experts.resourceClaims[0].template=a", "resourceClaims.0: Additional property template is not allowed"),
        ("imagePullSecrets[0].nam=a", "imagePullSecrets.0: name is required"),
        ("networkPolicy.gatewayFrom[0].podselector.a=b", "From.0: Additional property podselector is not allowed"),
        ("networkPolicy.extraEgress[0].from=a", "networkPolicy.extraEgress.0: Additional property from is not allowed"),
        ("autoscaling.behavior.scaleup.a=b", "autoscaling.behavior: Additional property scaleup is not allowed"),
        ("autoscaling.experts.replicas=2", "Additional property replicas is not allowed"),
        ("gateway.topologySpreadConstraints[0].maxSkew=1", "topologySpreadConstraints.0: labelSelector is required"),
    ],
    "what is not this role's to say": [
        ("config.redis_url=redis://x", "config: Additional property redis_url is not allowed"),
        ("gateway.config.block_size=9", "gateway.config: Additional property block_size is not allowed"),
        ("config.fabric_shared=auto", "config: Additional property fabric_shared is not allowed"),
        ("attention.config.fabric_shared=auto", "attention.config: Additional property fabric_shared is not allowed"),
        ("attention.config.expert_capacity=9", "attention.config: Additional property expert_capacity is not allowed"),
        ("experts.config.expert_group=1", "experts.config: Additional property expert_group is not allowed"),
    ],
    "what is no number, or none that can be": [
        ("gateway.replicas=many", "gateway.replicas: Invalid type. Expected: [integer,null], given: string"),
        ("attention.workers=half", "attention.workers"),
        ("autoscaling.sleepAfterSeconds=soon", "autoscaling.sleepAfterSeconds: Invalid type"),
        ("config.max_num_seqs=0", "config.max_num_seqs: Must be greater than or equal to 1"),
        ("experts.groups=0", "experts.groups: Must be greater than or equal to 1"),
        ("scheduler.replicas=0", "scheduler.replicas: Must be greater than or equal to 1"),
        ("attention.workers=0", "attention.workers: Must be greater than or equal to 1"),
        ("attention.colocated.groups=-1", "attention.colocated.groups: Must be greater than or equal to 0"),
        ("autoscaling.gateway.minReplicas=0", "Must be greater than or equal to 1"),
        ("gateway.drainSeconds=3601", "gateway.drainSeconds: Must be less than or equal to 3600"),
        ("gateway.drainDelaySeconds=601", "gateway.drainDelaySeconds: Must be less than or equal to 600"),
        ("gateway.pdb.minAvailable=1", "gateway.pdb: Additional property minAvailable is not allowed"),
        ("gateway.pdb.maxUnavailable=101%", "gateway.pdb.maxUnavailable: Does not match pattern"),
        ("experts.pdb.maxUnavailable=-1", "experts.pdb.maxUnavailable: Must be greater than or equal to 0"),
        ("attention.rollingUpdate.maxUnavailable=half", "rollingUpdate.maxUnavailable: Does not match pattern"),
        ("--set-string scheduler.rollingUpdate.maxSurge=25 %", "rollingUpdate.maxSurge: Does not match pattern"),
        ("gateway.probes.liveness.periodSeconds=0", "liveness.periodSeconds: Must be greater than or equal to 1"),
        ("autoscaling.behavior.scaleUp.policies[0].type=Pod", "behavior.scaleUp.policies.0.type must be one of"),
    ],
    "what is no port": [
        ("gateway.service.port=0", "gateway.service.port: Must be greater than or equal to 1"),
        ("gateway.service.port=65536", "gateway.service.port: Must be less than or equal to 65535"),
        ("gateway.service.nodePort=70000", "gateway.service.nodePort: Must be less than or equal to 65535"),
        ("networkPolicy.redisPort=0", "networkPolicy.redisPort: Must be greater than or equal to 1"),
        ("networkPolicy.apiServerPorts={443,443}", "networkPolicy.apiServerPorts: array items[0,1] must be unique"),
    ],
    "what is none of a few": [
        ("model.source=s3", "model.source must be one of the following"),
        ("fabric.lane=gloo", "fabric.lane must be one of the following"),
        ("attention.colocated.shared=on", "attention.colocated.shared must be one of the following"),
        ("gateway.service.type=ExternalName", 'gateway.service.type must be one of the following: "ClusterIP"'),
        ("images.redis.pullPolicy=Sometimes", "images.redis.pullPolicy must be one of the following"),
        ("model.pvc.accessModes={ReadWrite}", "model.pvc.accessModes.0 must be one of the following"),
        ("--set-json model.pvc.accessModes=[]", "model.pvc.accessModes: Array must have at least 1 items"),
        ("autoscaling.prometheus.authModes=token", "autoscaling.prometheus.authModes: Does not match pattern"),
        ("autoscaling.prometheus.secretKeys={token}", "prometheus.secretKeys.0 must be one of the following"),
        ("autoscaling.prometheus.authenticationRef.kind=ClusterTriggerAuthentication", "Has a dependency on name"),
    ],
    "what is no name or address": [
        ("redis.keyPrefix=a b", "redis.keyPrefix: Does not match pattern"),
        ("nameOverride=Mesh", "nameOverride: Does not match pattern"),
        ("images.worker.digest=abc", "images.worker.digest: Does not match pattern"),
        ("redis.auth.existingSecret=My_Secret", "redis.auth.existingSecret: Does not match pattern"),
        ("auth.key=a/b", "auth.key: Does not match pattern"),
        ("fabric.key=", "fabric.key: Does not match pattern"),
        ("gateway.priorityClassName=High", "gateway.priorityClassName: Does not match pattern"),
        ("gateway.podLabels.team=a b", "gateway.podLabels.team: Does not match pattern"),
        ("attention.nodeSelector.disk=-ssd", "attention.nodeSelector.disk: Does not match pattern"),
        ("fabric.ncclEnv.NCCL-DEBUG=INFO", "fabric.ncclEnv: Additional property NCCL-DEBUG is not allowed"),
        ("images.control.repository=registry/control:1", "images.control.repository: Does not match pattern"),
        ("images.worker.tag=a b", "images.worker.tag: Does not match pattern"),
        ("model.hostPath.path=models", "model.hostPath.path: Does not match pattern"),
        ("model.subPath=/olmoe", "model.subPath: Does not match pattern"),
        ("redis.external.url=http://redis", "redis.external.url: Does not match pattern"),
        ("gateway.ingress.host=https://llm.example.org", "gateway.ingress.host: Does not match pattern"),
        ("gateway.ingress.paths={v1}", "gateway.ingress.paths.0: Does not match pattern"),
        ("autoscaling.prometheus.serverAddress=prometheus:9090", "prometheus.serverAddress: Does not match pattern"),
        ("--set-string metrics.podMonitor.interval=15", "metrics.podMonitor.interval: Does not match pattern"),
        ("bindAddress=localhost", "bindAddress: Does not match pattern"),
    ],
}


@pytest.mark.parametrize(("setting", "says"), [case for cases in BAD.values() for case in cases])
def test_nonsense_is_refused(refused: Callable[..., str], setting: str, says: str) -> None:
    assert says in refused(setting)


@pytest.mark.parametrize(
    "settings",
    [
        "gateway.rollingUpdate.maxSurge=150%,gateway.rollingUpdate.maxUnavailable=100%,gateway.pdb.maxUnavailable=0",
        "gateway.resources.limits.cpu=1.5,gateway.resources.requests.memory=1e9,gateway.resources.limits.memory=2G",
        "attention.resources.limits.hugepages-2Mi=64Mi,attention.resources.limits.nvidia\\.com/mig-3g\\.40gb=1",
        "gateway.service.type=LoadBalancer,gateway.service.nodePort=30080,gateway.service.port=443",
        "gateway.extraVolumes[0].name=a,gateway.extraVolumeMounts[0].name=a,gateway.extraVolumeMounts[0].mountPath=/a",
        "gateway.extraEnv[0].name=A,gateway.extraEnv[0].valueFrom.fieldRef.fieldPath=spec.nodeName",
        "gateway.ingress.enabled=true,gateway.ingress.host=*.example.org",
        "images.control.repository=localhost:5000/mesh/control,images.control.tag=1.0-rc.1_x",
        "images.worker.repository=ghcr.io/team/worker__cuda,redis.maxmemory=,redis.persistence.size=1.5Ti",
        "redis.persistence.size=1e9,fabric.shmSize=0.5Gi",
        "experts.tolerations[0].operator=,experts.tolerations[0].key=gpu,experts.tolerations[1].operator=Gt",
        "redis.enabled=false,redis.external.url=rediss+sentinel://a.db\\,b.db:26379/mymaster/0",
        "experts.perGroup.1.tolerations[0].key=gpu,experts.tolerations[0].effect=NoExecute",
        "networkPolicy.gatewayFrom[0].ipBlock.cidr=10.0.0.0/8,bindAddress=::,metrics.podMonitor.interval=1m30s",
    ],
)
def test_what_kubernetes_takes_is_taken(render: Render, settings: str) -> None:
    assert render(settings)


def test_a_profiles_limit_may_be_taken_away(render: Render) -> None:
    model = ("model.hostPath.path=/models", "attention.resources.limits.nvidia\\.com/gpu=null")
    objects = render(*model, "experts.resources.limits=null", profile="single-node")
    for part in ("attention", "experts-0"):
        assert not any((container(objects, part)["resources"].get("limits") or {}).values())
