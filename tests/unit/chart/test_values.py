"""Which of two values counts, and what follows from single ones."""

from __future__ import annotations

import pytest
from testkit.kube.chart import ROLES, Render, config, container, named, pod, pods


@pytest.mark.parametrize(("value", "read"), [("false", False), ("true", True)])
def test_a_roles_knob_beats_that_of_all_roles_whatever_it_is(render: Render, value: str, read: bool) -> None:
    other = "false" if read else "true"
    objects = render(f"config.prefix_cache={other}", f"attention.config.prefix_cache={value}", profile=None)
    assert config(objects, "attention")["prefix_cache"] is read
    assert config(objects, "gateway")["prefix_cache"] is not read


def test_nothing_is_a_value_as_well(render: Render) -> None:
    objects = render("config.experts_timeout=9", "attention.config.experts_timeout=0", "redis.uid=0", profile=None)
    assert config(objects, "attention")["experts_timeout"] == 0
    context = pod(objects, "redis")["securityContext"]
    assert (context["runAsUser"], context["fsGroup"], context["runAsNonRoot"]) == (0, 0, True)


def test_a_groups_value_replaces_that_of_all_groups(render: Render) -> None:
    of_all = ("experts.groups=2", "experts.resources.limits.nvidia\\.com/gpu=1", "experts.nodeSelector.disk=ssd")
    own = (
        *("resources.limits.nvidia\\.com/mig-3g\\.40gb=1", "nodeSelector.gpu=h100", "replicas=null"),
        *("extraVolumes[0].name=own", "extraVolumeMounts[0].name=own", "extraVolumeMounts[0].mountPath=/own"),
    )
    objects = render(*of_all, *(f"experts.perGroup.1.{each}" for each in own), profile=None)
    replicas = [named(objects, "StatefulSet", f"experts-{group}")["spec"].get("replicas") for group in range(2)]
    assert replicas == [1, None]
    first, second = (pod(objects, f"experts-{group}") for group in range(2))
    assert first["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert second["containers"][0]["resources"] == {"limits": {"nvidia.com/mig-3g.40gb": 1}}
    assert second["nodeSelector"] == {"gpu": "h100"}
    for number, spec in enumerate((first, second)):
        assert ("own" in {volume["name"] for volume in spec["volumes"]}) == number
        assert ("/own" in {mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}) == number


def test_a_host_whose_gpus_are_all_taken_stops_a_worker_before_it_starts_another(render: Render) -> None:
    objects = render("model.hostPath.path=/models", profile="single-node")
    attention = named(objects, "Deployment", "attention")["spec"]["strategy"]["rollingUpdate"]
    assert attention == {"maxSurge": 0, "maxUnavailable": 1}
    gateway = named(objects, "Deployment", "gateway")["spec"]["strategy"]["rollingUpdate"]
    assert gateway == {"maxSurge": 1, "maxUnavailable": 0}
    assert config(objects, "attention")["experts_timeout"] > 120, "long enough to load weights"


@pytest.mark.parametrize(
    ("settings", "ports"),
    [
        (["redis.external.url=rediss://redis.db:6380/0"], [6380]),
        (["redis.external.url=redis://redis.db/0"], [6379]),
        (["redis.external.existingSecret=url"], [6379]),
        (["redis.external.existingSecret=url", "networkPolicy.redisPort=7000"], [7000]),
        (["redis.external.url=redis+sentinel://u@a.db:26380\\,b.db/mymaster/0"], [26380, 26379, 6379]),
        (["redis.external.url=redis+sentinel://a.db\\,b.db/m", "networkPolicy.redisPort=7000"], [26379, 7000]),
    ],
)
def test_the_policies_open_the_port_of_an_external_redis(render: Render, settings: list[str], ports: list[int]) -> None:
    objects = render("redis.enabled=false", *settings)
    for role in ROLES:
        assert {"ports": [{"port": port} for port in ports]} in named(objects, "NetworkPolicy", role)["spec"]["egress"]


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [("http://otel.monitoring.svc:4318", 4318), ("https://otel.example/base", 443), ("http://otel:80/v1/traces", 80)],
)
def test_every_role_sends_its_traces_to_the_collector(render: Render, endpoint: str, port: int) -> None:
    peer = [{"ipBlock": {"cidr": "10.0.0.1/32"}}]
    on = ("tracing.enabled=true", f"tracing.endpoint={endpoint}", "tracing.sample=0.5")
    objects = render(*on, "networkPolicy.tracingTo[0].ipBlock.cidr=10.0.0.1/32")
    for role in ROLES:
        its = config(objects, role)
        assert (its["otlp_endpoint"], its["trace_sample"]) == (endpoint, 0.5)
        assert {"ports": [{"port": port}], "to": peer} in named(objects, "NetworkPolicy", role)["spec"]["egress"]
        found = [template["spec"]["containers"][0] for name, template in pods(objects) if f"-{role}" in name]
        for its in found:
            env = {each["name"]: each.get("value") for each in its["env"]}
            assert env["OTEL_RESOURCE_ATTRIBUTES"] == "k8s.namespace.name=there,k8s.pod.name=$(POD_NAME)"
        assert found


def test_without_tracing_the_pods_say_nothing_of_it(render: Render) -> None:
    assert "otlp" not in str(render("tracing.endpoint=http://otel:4318")).lower()


def test_every_role_trusts_the_authority_of_an_external_redis(render: Render) -> None:
    external = ("redis.enabled=false", "redis.external.url=rediss://redis.db/0", "redis.external.caSecret=authority")
    seen = 0
    for _, template in pods(render(*external)):
        [its] = template["spec"]["containers"]
        [file] = [each["value"] for each in its["env"] if each["name"] == "SSL_CERT_FILE"]
        [mount] = [each["mountPath"] for each in its["volumeMounts"] if each["name"] == "redis-ca"]
        [volume] = [each["secret"] for each in template["spec"]["volumes"] if each["name"] == "redis-ca"]
        assert (file, volume["secretName"]) == (f"{mount}/{volume['items'][0]['path']}", "authority")
        seen += 1
    assert seen == 5


def test_roles_listen_where_values_say(render: Render) -> None:
    objects = render("bindAddress=::")
    assert {config(objects, role)["host"] for role in ROLES} == {"::"}


def test_metrics_do_not_pass_the_ingress(render: Render) -> None:
    objects = render("gateway.ingress.enabled=true", "gateway.ingress.host=llm.example.org")
    [rule] = named(objects, "Ingress", "gateway")["spec"]["rules"]
    paths = [each["path"] for each in rule["http"]["paths"]]
    assert "/v1" in paths
    assert not [path for path in paths if "/metrics".startswith(path)]


def test_helm_test_starts_where_a_given_secret_has_no_plain_key(render: Render) -> None:
    [env] = named(render("auth.existingSecret=mine"), "Pod", "test")["spec"]["containers"][0]["env"]
    assert env["valueFrom"]["secretKeyRef"] == {"name": "mine", "key": "api-key", "optional": True}


def test_a_drain_may_be_kept_off_redis(render: Render) -> None:
    budget = named(render(), "PodDisruptionBudget", "redis")["spec"]
    assert budget["maxUnavailable"] == 1
    assert budget["selector"] == named(render(), "StatefulSet", "redis")["spec"]["selector"]
    assert named(render("redis.pdb.maxUnavailable=0"), "PodDisruptionBudget", "redis")["spec"]["maxUnavailable"] == 0
    for settings in (["redis.pdb.enabled=false"], ["redis.enabled=false", "redis.external.url=redis://elsewhere"]):
        objects = render(*settings)
        assert not [name for kind, name in objects if kind == "PodDisruptionBudget" and "redis" in name]


def test_a_command_in_a_pod_speaks_of_its_release(render: Render) -> None:
    objects = render()
    for role in ("gateway", "scheduler", "attention", "experts-0", "experts-1"):
        its = container(objects, role)
        given = {each["name"]: each.get("value") for each in its["env"]}
        [mount] = [each for each in its["volumeMounts"] if each["name"] == "config"]
        assert given["EXPERTMESH_CONFIG"] == f"{mount['mountPath']}/config.yaml"


@pytest.mark.parametrize(
    ("setting", "image"), [("tag=8-alpine", ":8-alpine"), (f"digest=sha256:{'0' * 64}", f"@sha256:{'0' * 64}")]
)
def test_another_tag_of_redis_is_used(render: Render, setting: str, image: str) -> None:
    assert container(render(f"images.redis.{setting}"), "redis")["image"] == f"docker.io/library/redis{image}"
