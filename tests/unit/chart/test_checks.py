"""Values that contradict one another end the rendering, which says what to do. A switch that is off does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from testkit.kube.chart import SCALED as ASKED
from testkit.kube.chart import Render

# Settings as ``helm --set`` takes several of them: path=value,path=value
AT = "autoscaling.prometheus"
SCALED = ",".join(ASKED)
BY_SECRET = f"{SCALED},{AT}.existingSecret=a"
OUTSIDE = "redis.enabled=false,redis.external.url"
ENCRYPTED = "fabric.tls.enabled=true,fabric.tls.secretName=a"
CLAIM = "experts.resourceClaims[0].name=gpu,experts.resourceClaims[0].resourceClaimTemplateName=one"
SEATS = "layout=colocated,attention.workers=4"
LIMITS = "attention.resources.limits"
GPUS, SLICES = f"{LIMITS}.nvidia\\.com/gpu", f"{LIMITS}.nvidia\\.com/mig-3g\\.40gb"
REFUSED = {
    "one Redis is meant": [
        ("redis.enabled=false", "Give redis.external.url"),
        ("redis.external.url=redis://a", "redis.external.url is given, but redis.enabled=true"),
        ("redis.external.existingSecret=a", "redis.external.existingSecret is given, but redis.enabled=true"),
        ("redis.external.caSecret=a", "redis.external.caSecret is given, but redis.enabled=true"),
        ("networkPolicy.redisPort=7000", "networkPolicy.redisPort says where an external Redis is, but redis"),
        ("networkPolicy.redisTo[0].ipBlock.cidr=10.0.0.1/32", "networkPolicy.redisTo says where an external"),
        (
            f"{OUTSIDE}=redis://:hush@a/0",
            "redis.external.url carries a password, which would stand in the pods of every role. Put the whole URL",
        ),
        (f"{OUTSIDE}=rediss://u:hush@a", "then redis.external.existingSecret=NAME"),
        (f"{OUTSIDE}=redis+sentinel://a\\,b/m?sentinel_password=hush", "redis.external.url carries a password"),
        ("redis.acl.login=default,redis.acl.defaultUser=false", "that redis.acl.defaultUser=false turns"),
        (f"{OUTSIDE}=redis://a,redis.external.keys.gateway=a", "redis.external.keys names entries of a Secret, but"),
        (
            f"{OUTSIDE}=redis://redis.db/0,redis.external.caSecret=a",
            "is a, but redis.external.url asks for no TLS. Begin that with",
        ),
    ],
    "traces go somewhere": [("tracing.enabled=true", "Give tracing.endpoint, the collector's address")],
    "what is to be encrypted can be": [
        ("redis.tls.enabled=true", "redis.tls.enabled is true, but nothing says where the certificate is"),
        ("redis.tls.enabled=true,redis.tls.certManager.enabled=true", "redis.tls.certManager.issuerRef has no name"),
        ("fabric.tls.enabled=true", "Give fabric.tls.secretName, or fabric.tls.certManager with enabled and"),
        (f"{ENCRYPTED},fabric.lane=nccl", "fabric.lane is nccl, which cannot be encrypted, but fabric.tls.enabled"),
        (f"{ENCRYPTED},layout=lockstep", "layout=lockstep passes rows by NCCL or gloo, which cannot"),
    ],
    "one model is meant": [
        ("model.source=hostPath", "Give model.hostPath.path."),
        ("model.source=pvc,model.pvc.prefetch.enabled=true", "Give model.pvc.prefetch.source."),
        ("model.hostPath.path=/m", "model.hostPath.path is /m, but model.source is bundled"),
        ("model.source=pvc,model.hostPath.path=/m", "model.hostPath.path is /m, but model.source is pvc"),
        ("model.source=pvc,model.hostPath.type=Directory", "model.hostPath.type is Directory, but model.source"),
        ("model.pvc.existingClaim=a", "model.pvc.existingClaim is a, but model.source is bundled"),
        ("model.pvc.storageClassName=a", "Set model.source=pvc, or leave model.pvc.storageClassName empty"),
        ("model.pvc.prefetch.enabled=true", "prefetch.enabled is true, but model.source is bundled, so nothing is"),
        ("model.image.reference=a", "model.image.reference is a, but model.source is bundled"),
        ("model.subPath=a", "model.subPath is a, but model.source is bundled"),
        (
            "model.source=pvc,model.pvc.existingClaim=a,model.pvc.storageClassName=b",
            "model.pvc.storageClassName is b, for a claim that the chart makes, but model.pvc.existingClaim is a",
        ),
    ],
    "what belongs together is together": [
        ("auth.key=api-key", "auth.key and auth.plainKey are both api-key"),
        ("auth.key=api-key,auth.plainKey=", "auth.key and auth.plainKey are both api-key"),
        ("auth.plainKey=keys.yaml,auth.existingSecret=a", "auth.key and auth.plainKey are both keys.yaml"),
        ("experts.perGroup.1.replicas=2", "experts.perGroup names group 1, but experts.groups is 1"),
        ("experts.perGroup.00.replicas=2", "experts.perGroup names group 00"),
        ("attention.resources.claims[0].name=gpu", "resources.claims has gpu, which the pod does not claim"),
        ("gateway.service.nodePort=30080", "nodePort is 30080, but gateway.service.type is ClusterIP"),
        ("layout=lockstep,attention.workers=1", "attention.workers is 1, but layout=lockstep has groups of 2 or more"),
    ],
    "an update can replace pods": [
        (
            f"{role}.rollingUpdate.maxSurge={zero},{role}.rollingUpdate.maxUnavailable=0",
            f"{role}.rollingUpdate.maxSurge and {role}.rollingUpdate.maxUnavailable are both 0",
        )
        for role in ("gateway", "scheduler", "attention")
        for zero in ("0", "0%")
    ],
    "autoscaling can work, whether or not KEDA is there": [
        ("autoscaling.enabled=true,metrics.podMonitor.enabled=true", f"Give {AT}.serverAddress"),
        (f"{SCALED},metrics.podMonitor.enabled=false", "set metrics.podMonitor.enabled, or say in"),
        (f"{SCALED},autoscaling.attention.minReplicas=5", "autoscaling.attention: minReplicas 5 is more than"),
        (f"{SCALED},experts.perGroup.0.minReplicas=9", "experts.perGroup.0: minReplicas 9 is more than maxReplicas 4"),
        (f"{SCALED},{AT}.authModes=bearer", "bearer and needs authenticationRef or existingSecret"),
        (f"{BY_SECRET}", "Give authModes (basic, bearer, tls, custom), or leave"),
        (
            f"{BY_SECRET},{AT}.authenticationRef.name=a",
            "existingSecret is a, but authenticationRef names a TriggerAuthentication",
        ),
        (f"{SCALED},{AT}.metadata.query=a", "metadata.query is given, but the chart sets it itself"),
        (f"{SCALED},{AT}.metadata.serverAddress=a", f"the chart sets it from {AT}.serverAddress: use that"),
    ],
    "a way to prove oneself has what it needs": [
        (f"{BY_SECRET},{AT}.authModes={modes},{AT}.secretKeys={{{keys}}}", says)
        for modes, keys, says in (
            ("basic", "bearerToken", f"authModes has basic, which needs username, but {AT}.secretKeys is"),
            ("bearer", "username", "has bearer, which needs bearerToken"),
            ("tls", "ca,cert", "has tls, which needs key"),
            ("custom", "customAuthHeader", "has custom, which needs customAuthValue"),
            ("tls\\, basic", "username,key", "Add cert, and have it in the Secret a"),
            ("basic\\,bearer", "username,bearerToken", "authModes has both basic and bearer"),
        )
    ],
    "workers of one pod can be": [
        (f"{SEATS},attention.colocated.groups=5", "colocated.groups is 5, but attention.workers is 4, of which each"),
        (f"{SEATS},{GPUS}=1", f"{LIMITS} has nvidia.com/gpu: 1, but attention.workers is 4, of which"),
        (f"{SEATS},{SLICES}=1", f"{LIMITS} has nvidia.com/mig-3g.40gb: 1, but attention.workers is 4, of which"),
        (
            f"{SEATS},attention.config.device=cuda:0",
            "attention.config.device is cuda:0, one device for all 4 workers of a pod.",
        ),
        (
            f"{SEATS},config.device=cuda:1",
            "config.device is cuda:1, one device for all 4 workers of a pod. Set it to auto, cuda",
        ),
        (f"{SEATS},fabric.lane=nccl", "fabric.lane is nccl, but layout=colocated passes rows by shared memory and"),
    ],
}


@pytest.mark.parametrize(("settings", "says"), [case for cases in REFUSED.values() for case in cases])
def test_contradictions_are_refused(refused: Callable[..., str], settings: str, says: str) -> None:
    assert says in refused(settings)


def test_the_password_of_a_url_is_not_shown(refused: Callable[..., str]) -> None:
    assert "hush" not in refused("redis.external.url=redis://:hush@a")
    assert "hush" not in refused(f"{OUTSIDE}=redis://:hush@a")


def test_a_release_with_a_dot_in_its_name_needs_another(helm: Callable[..., object], render: Render) -> None:
    said = helm(command=("template", "mesh.v2")).stderr
    assert "must not have a dot in its name, as in mesh.v2-expertmesh-gateway. Give fullnameOverride" in said
    assert render("fullnameOverride=mesh", release="mesh.v2")


def test_all_of_them_are_said_at_once_and_each_once(refused: Callable[..., str]) -> None:
    beyond = ("experts.groups=2", "experts.perGroup.2.replicas=2")
    said = refused("model.hostPath.path=/m", "redis.external.url=redis://a", *beyond)
    found = [line.split()[0] for line in said.splitlines() if ", but " in line]
    assert found == ["redis.external.url", "model.hostPath.path", "experts.perGroup"]


@pytest.mark.parametrize(
    "settings",
    [
        "gateway.ingress.host=llm.example.org,gateway.ingress.tlsSecret=cert",
        "auth.enabled=false,auth.existingSecret=mine",
        "networkPolicy.enabled=false,networkPolicy.redisPort=7000",
        "experts.perGroup.0.maxReplicas=8,experts.perGroup.1.minReplicas=9,autoscaling.sleepAfterSeconds=60",
        f"{AT}.authModes=bearer,{AT}.metadata.query=a",
        f"layout=local,experts.perGroup.7.replicas=2,{CLAIM},attention.workers=4",
        f"{OUTSIDE}=redis+sentinel://a/m,redis.external.existingSecret=a",
        "redis.persistence.enabled=false,redis.persistence.storageClassName=fast,redis.pdb.enabled=false",
        "model.pvc.prefetch.source=hf://a/b@c",
        f"{CLAIM},experts.resources.claims[0].name=gpu",
        CLAIM,
        f"{OUTSIDE}=redis://a,redis.auth.existingSecret=a",
        f"{SCALED},layout=local,experts.perGroup.0.minReplicas=9,autoscaling.experts.minReplicas=9",
        f"{BY_SECRET},{AT}.authModes=tls\\,basic,{AT}.secretKeys={{username,cert,key}}",
        f"attention.colocated.groups=5,fabric.lane=nccl,attention.config.overlap=on,{GPUS}=1",
        "layout=local,attention.colocated.groups=5",
        f"{SEATS},attention.colocated.groups=2,fabric.lane=tcp,{GPUS}=4",
        f"{SEATS},{SLICES}=4,experts.perGroup.7.replicas=2",
        f"{SEATS},config.device=cuda,attention.config.device=cpu",
        f"{SEATS},{SCALED},autoscaling.experts.minReplicas=9,attention.workers=3",
    ],
)
def test_what_is_switched_off_or_can_be_meant_is_taken(render: Render, settings: str) -> None:
    assert render(settings)
