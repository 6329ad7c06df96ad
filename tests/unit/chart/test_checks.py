"""Values that contradict one another end the rendering, which says what to do. A switch that is off does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from testkit.kube.chart import CHART, Render

OUTSIDE = ("redis.enabled=false", "redis.external.url=redis://redis.db/0")
SCALED = ("autoscaling.enabled=true", "metrics.podMonitor.enabled=true")
ASKED = (*SCALED, "autoscaling.prometheus.serverAddress=http://prometheus:9090")
ENCRYPTED = ("fabric.tls.enabled=true", "fabric.tls.secretName=a")
SECRET_KEYS = "autoscaling.prometheus.secretKeys"
CLAIM = ("experts.resourceClaims[0].name=gpu", "experts.resourceClaims[0].resourceClaimTemplateName=one")

Refused = Callable[..., str]


@pytest.fixture
def refused(helm: Callable[..., Any]) -> Refused:
    """What helm says of ``settings``, which it must not render."""

    def run(*settings: str) -> str:
        done = helm("template", "mesh", str(CHART), *(word for setting in settings for word in ("--set", setting)))
        assert done.returncode != 0
        said: str = done.stderr
        return said

    return run


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["redis.external.url=redis://a"], "redis.external.url is given, but redis.enabled=true"),
        (["redis.external.existingSecret=a"], "redis.external.existingSecret is given, but redis.enabled=true"),
        (["redis.external.caSecret=a"], "redis.external.caSecret is given, but redis.enabled=true"),
        (["networkPolicy.redisPort=7000"], "networkPolicy.redisPort says where an external Redis is, but redis"),
        (["networkPolicy.redisTo[0].ipBlock.cidr=10.0.0.1/32"], "networkPolicy.redisTo says where an external"),
        (
            ["redis.enabled=false", "redis.external.url=redis://:hush@a/0"],
            "redis.external.url carries a password, which would stand in the pods of every role. Put the whole URL",
        ),
        (["redis.enabled=false", "redis.external.url=rediss://u:hush@a"], "then redis.external.existingSecret=NAME"),
        (
            ["redis.enabled=false", "redis.external.url=redis+sentinel://a\\,b/m?sentinel_password=hush"],
            "redis.external.url carries a password",
        ),
        (
            ["redis.acl.login=default", "redis.acl.defaultUser=false"],
            "that redis.acl.defaultUser=false turns",
        ),
        ([*OUTSIDE, "redis.external.keys.gateway=a"], "redis.external.keys names entries of a Secret, but"),
        ([*OUTSIDE, "redis.external.caSecret=a"], "is a, but redis.external.url asks for no TLS. Begin that with"),
    ],
)
def test_one_redis_is_meant(refused: Refused, settings: list[str], says: str) -> None:
    assert says in refused(*settings)


def test_the_password_of_a_url_is_not_shown(refused: Refused) -> None:
    assert "hush" not in refused("redis.external.url=redis://:hush@a")
    assert "hush" not in refused("redis.enabled=false", "redis.external.url=redis://:hush@a")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["redis.tls.enabled=true"], "redis.tls.enabled is true, but nothing says where the certificate is"),
        (
            ["redis.tls.enabled=true", "redis.tls.certManager.enabled=true"],
            "redis.tls.certManager.issuerRef has no name",
        ),
        (["fabric.tls.enabled=true"], "Give fabric.tls.secretName, or fabric.tls.certManager with enabled and"),
        ([*ENCRYPTED, "fabric.lane=nccl"], "fabric.lane is nccl, which cannot be encrypted, but fabric.tls.enabled"),
        ([*ENCRYPTED, "layout=lockstep"], "layout=lockstep passes rows by NCCL or gloo, which cannot"),
    ],
)
def test_what_is_to_be_encrypted_can_be(refused: Refused, settings: list[str], says: str) -> None:
    assert says in refused(*settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["model.hostPath.path=/m"], "model.hostPath.path is /m, but model.source is bundled"),
        (["model.source=pvc", "model.hostPath.path=/m"], "model.hostPath.path is /m, but model.source is pvc"),
        (["model.source=pvc", "model.hostPath.type=Directory"], "model.hostPath.type is Directory, but model.source"),
        (["model.pvc.existingClaim=a"], "model.pvc.existingClaim is a, but model.source is bundled"),
        (["model.pvc.storageClassName=a"], "Set model.source=pvc, or leave model.pvc.storageClassName empty"),
        (["model.pvc.prefetch.enabled=true"], "prefetch.enabled is true, but model.source is bundled, so nothing is"),
        (["model.image.reference=a"], "model.image.reference is a, but model.source is bundled"),
        (["model.subPath=a"], "model.subPath is a, but model.source is bundled"),
        (
            ["model.source=pvc", "model.pvc.existingClaim=a", "model.pvc.storageClassName=b"],
            "model.pvc.storageClassName is b, for a claim that the chart makes, but model.pvc.existingClaim is a",
        ),
    ],
)
def test_one_model_is_meant(refused: Refused, settings: list[str], says: str) -> None:
    assert says in refused(*settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["auth.key=api-key"], "auth.key and auth.plainKey are both api-key"),
        (["auth.key=api-key", "auth.plainKey="], "auth.key and auth.plainKey are both api-key"),
        (["auth.plainKey=keys.yaml", "auth.existingSecret=a"], "auth.key and auth.plainKey are both keys.yaml"),
        (["experts.perGroup.1.replicas=2"], "experts.perGroup names group 1, but experts.groups is 1"),
        (["experts.perGroup.00.replicas=2"], "experts.perGroup names group 00"),
        (["attention.resources.claims[0].name=gpu"], "resources.claims has gpu, which the pod does not claim"),
    ],
)
def test_what_belongs_together_is_together(refused: Refused, settings: list[str], says: str) -> None:
    assert says in refused(*settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ([*SCALED], "Give autoscaling.prometheus.serverAddress"),
        ([*ASKED, "metrics.podMonitor.enabled=false"], "set metrics.podMonitor.enabled, or say in"),
        ([*ASKED, "autoscaling.attention.minReplicas=5"], "autoscaling.attention: minReplicas 5 is more than"),
        ([*ASKED, "experts.perGroup.0.minReplicas=9"], "experts.perGroup.0: minReplicas 9 is more than maxReplicas 4"),
        ([*ASKED, "autoscaling.prometheus.authModes=bearer"], "bearer and needs authenticationRef or existingSecret"),
        ([*ASKED, "autoscaling.prometheus.existingSecret=a"], "Give authModes (basic, bearer, tls, custom), or leave"),
        (
            [*ASKED, *(f"autoscaling.prometheus.{name}=a" for name in ("existingSecret", "authenticationRef.name"))],
            "existingSecret is a, but authenticationRef names a TriggerAuthentication",
        ),
        ([*ASKED, "autoscaling.prometheus.metadata.query=a"], "metadata.query is given, but the chart sets it itself"),
        (
            [*ASKED, "autoscaling.prometheus.metadata.serverAddress=a"],
            "the chart sets it from autoscaling.prometheus.serverAddress: use that",
        ),
    ],
)
def test_autoscaling_can_work_whether_or_not_keda_is_there(refused: Refused, settings: list[str], says: str) -> None:
    assert says in refused(*settings)


BY_SECRET = (*ASKED, "autoscaling.prometheus.existingSecret=a")


@pytest.mark.parametrize(
    ("modes", "keys", "says"),
    [
        ("basic", "bearerToken", "authModes has basic, which needs username, but autoscaling.prometheus.secretKeys is"),
        ("bearer", "username", "has bearer, which needs bearerToken"),
        ("tls", "ca\\,cert", "has tls, which needs key"),
        ("custom", "customAuthHeader", "has custom, which needs customAuthValue"),
        ("tls\\, basic", "username\\,key", "Add cert, and have it in the Secret a"),
        ("basic\\,bearer", "username\\,bearerToken", "authModes has both basic and bearer"),
    ],
)
def test_a_way_to_prove_oneself_has_what_it_needs(
    refused: Refused, render: Render, modes: str, keys: str, says: str
) -> None:
    words = keys.replace("\\,", ",")
    assert says in refused(*BY_SECRET, f"autoscaling.prometheus.authModes={modes}", f"{SECRET_KEYS}={{{words}}}")
    assert render(*BY_SECRET, "autoscaling.prometheus.authModes=tls\\,basic", f"{SECRET_KEYS}={{username,cert,key}}")


@pytest.mark.parametrize("role", ["gateway", "scheduler", "attention"])
@pytest.mark.parametrize("zero", ["0", "0%"])
def test_an_update_can_replace_pods(refused: Refused, role: str, zero: str) -> None:
    said = refused(f"{role}.rollingUpdate.maxSurge={zero}", f"{role}.rollingUpdate.maxUnavailable=0")
    assert f"{role}.rollingUpdate.maxSurge and {role}.rollingUpdate.maxUnavailable are both 0" in said


def test_a_port_on_nodes_has_a_service_that_opens_it(refused: Refused) -> None:
    assert "nodePort is 30080, but gateway.service.type is ClusterIP" in refused("gateway.service.nodePort=30080")


def test_a_release_with_a_dot_in_its_name_needs_another(helm: Callable[..., Any], render: Render) -> None:
    said = helm("template", "mesh.v2", str(CHART)).stderr
    assert "must not have a dot in its name, as in mesh.v2-expertmesh-gateway. Give fullnameOverride" in said
    assert render("fullnameOverride=mesh", release="mesh.v2")


def test_all_of_them_are_said_at_once_and_each_once(refused: Refused) -> None:
    beyond = ("experts.groups=2", "experts.perGroup.2.replicas=2")
    said = refused("model.hostPath.path=/m", "redis.external.url=redis://a", *beyond)
    lines = [line for line in said.splitlines() if ", but " in line]
    assert [line.split()[0] for line in lines] == [
        *("redis.external.url", "model.hostPath.path", "experts.perGroup"),
    ]


@pytest.mark.parametrize(
    "settings",
    [
        ["gateway.ingress.host=llm.example.org", "gateway.ingress.tlsSecret=cert"],
        ["auth.enabled=false", "auth.existingSecret=mine"],
        ["networkPolicy.enabled=false", "networkPolicy.redisPort=7000"],
        ["experts.perGroup.0.maxReplicas=8", "experts.perGroup.1.minReplicas=9", "autoscaling.sleepAfterSeconds=60"],
        ["autoscaling.prometheus.authModes=bearer", "autoscaling.prometheus.metadata.query=a"],
        ["layout=local", "experts.perGroup.7.replicas=2", *CLAIM, "attention.workers=4"],
        ["redis.enabled=false", "redis.external.existingSecret=a", "redis.external.url=redis+sentinel://a/m"],
        ["redis.persistence.enabled=false", "redis.persistence.storageClassName=fast", "redis.pdb.enabled=false"],
        ["model.pvc.prefetch.source=hf://a/b@c"],
        [*CLAIM, "experts.resources.claims[0].name=gpu"],
        [*CLAIM],
        ["redis.enabled=false", "redis.external.url=redis://a", "redis.auth.existingSecret=a"],
        [*ASKED, "layout=local", "experts.perGroup.0.minReplicas=9", "autoscaling.experts.minReplicas=9"],
    ],
)
def test_what_is_switched_off_may_keep_its_settings(render: Render, settings: list[str]) -> None:
    assert render(*settings)
