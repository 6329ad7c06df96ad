"""API keys with their limits, the merged metrics page, and the address."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from testkit.http_peer import bearer

from services.errors import ConfigError, PortInUse
from services.gateway.auth import WithKey, digest, keys_required
from services.gateway.exposition import Siblings, merge, parse_upstreams
from services.gateway.key_stores import FileKeys
from services.gateway.server import listen
from services.metrics import SchedulerMetrics
from services.queue.limits import TenantLimits


def write_keys(path: Any, *entries: dict[str, Any]) -> Any:
    path.write_text(json.dumps({"keys": list(entries)}))
    return path


def entry(name: str, secret: str, **limits: Any) -> dict[str, Any]:
    return {"name": name, "sha256": digest(secret), **limits}


async def test_keys_of_a_file_with_limits_and_priority(start, tmp_path):
    path = write_keys(
        tmp_path / "keys.yaml",
        entry("alice", "sk-a", requests_per_minute=60, burst=2, max_concurrency=3, priority=3),
        entry("bob", "sk-b"),
        entry("carol", "sk-c", priority=0),
    )
    gateway = await start(store=FileKeys(path, print))
    gateway.says([5])
    for headers in ({}, bearer("sk-x"), {"Authorization": "Basic sk-a"}, {"Authorization": "Bearer"}):
        answer = await gateway.http.post("/v1/completions", json={"prompt": "hello"}, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
    assert (await gateway.http.get("/v1/models")).status_code == 401
    assert (await gateway.http.get("/health")).status_code == 200
    for secret in ("sk-a", "sk-b"):
        assert (await gateway.post(tenant=secret)).status_code == 200
    assert [(request.tenant, request.priority) for request in gateway.queue.admitted] == [("alice", 5), ("bob", 5)]
    assert gateway.queue.limits[0] == TenantLimits(concurrency=3, requests_per_minute=60, burst=2)
    for secret, asked, granted in (("sk-a", 2, "3 to 9"), ("sk-b", 4, "5 to 9")):
        urgent = await gateway.post(tenant=secret, priority=asked)
        assert (urgent.status_code, urgent.json()["error"]["param"]) == (400, "priority")
        assert granted in urgent.json()["error"]["message"]
    for secret, asked in (("sk-b", 5), ("sk-b", 9), ("sk-a", 3), ("sk-c", 0)):
        assert (await gateway.post(tenant=secret, priority=asked)).status_code == 200
        assert gateway.queue.admitted[-1].priority == asked
    many = await gateway.post(tenant="sk-a", n=4)
    assert (many.status_code, many.json()["error"]["param"]) == (400, "n"), "no wait would let 4 in where 3 may run"


@pytest.mark.parametrize(
    "content",
    ["", "[]", "keys: {}", "keys: [{name: a}]", "keys: [{name: a, sha256: xyz}]", "other: 1", "\x00"],
)
def test_an_unusable_key_file_is_a_startup_error(tmp_path, content):
    (tmp_path / "keys").write_text(content)
    with pytest.raises(ConfigError, match="keys"):
        FileKeys(tmp_path / "keys", print)
    with pytest.raises(ConfigError, match="twice"):
        FileKeys(write_keys(tmp_path / "twice", entry("a", "s"), entry("b", "s")), print)
    with pytest.raises(ConfigError):
        FileKeys(tmp_path / "absent", print)


async def test_a_key_of_the_settings_is_one_more(start, tmp_path):
    others = FileKeys(write_keys(tmp_path / "keys.yaml", entry("alice", "sk-a")), print)
    gateway = await start(store=WithKey("sk-own", others))
    gateway.says([5])
    for secret, status in (("sk-own", 200), ("sk-a", 200), ("sk-x", 401)):
        assert (await gateway.post(tenant=secret)).status_code == status
    assert [request.tenant for request in gateway.queue.admitted] == ["default", "alice"]
    assert gateway.parts.authenticator.recall("Bearer sk-own") == "default"


ORIGIN = "https://chat.example.org"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


async def test_pages_of_allowed_origins_may_use_the_api(start):
    gateway = await start(allowed_origins=[ORIGIN], tenants=["sk-a"])
    asked = await gateway.http.options("/v1/completions", headers={"Origin": ORIGIN} | PREFLIGHT)
    assert asked.status_code == 200, "a browser sends no key with this question"
    assert asked.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in asked.headers["access-control-allow-headers"]
    refused = await gateway.http.post("/v1/completions", json={"prompt": "hello"}, headers={"Origin": ORIGIN})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == ORIGIN, "the page may read why"
    other = await gateway.http.options("/v1/completions", headers={"Origin": "https://other.example"} | PREFLIGHT)
    assert other.status_code == 400
    assert "access-control-allow-origin" not in other.headers


async def test_without_allowed_origins_no_page_may_use_the_api(start):
    gateway = await start()
    asked = await gateway.http.options("/v1/completions", headers={"Origin": ORIGIN} | PREFLIGHT)
    assert asked.status_code == 405
    assert "access-control-allow-origin" not in asked.headers


def test_keys_are_off_on_loopback_only():
    for host in ("127.0.0.1", "127.8.9.10", "localhost", "LOCALHOST", "::1"):
        assert not keys_required("auto", host), host
    for host in ("localhost.example", "127.example.org", "127.1", "", "0.0.0.0"):
        assert keys_required("auto", host), host
    assert not keys_required("off", "0.0.0.0")
    assert keys_required("required", "127.0.0.1")


OWN = """# HELP x_total X.
# TYPE x_total counter
x_total 1.0
# HELP lat_seconds L.
# TYPE lat_seconds histogram
lat_seconds_bucket{le="+Inf"} 2.0
lat_seconds_count 2.0
lat_seconds_sum 3.0
"""
THEIRS = """# HELP x_total X.
# TYPE x_total counter
x_total{a="b c}"} 5.0
"""


async def test_pages_merge_into_one_valid_exposition():
    page = merge([('role="gateway"', OWN), ('role="scheduler"', THEIRS)])
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert page.count("# TYPE x_total") == 1
    found = {sample.labels["role"]: (sample.labels, sample.value) for sample in families["x"].samples}
    assert found == {
        "gateway": ({"role": "gateway"}, 1.0),
        "scheduler": ({"role": "scheduler", "a": "b c}"}, 5.0),
    }
    assert {sample.labels["role"] for sample in families["lat_seconds"].samples} == {"gateway"}


def test_no_series_has_a_role_twice_when_the_scheduler_wants_replicas():
    registry = CollectorRegistry()
    SchedulerMetrics(registry).wanted_replicas.labels("experts", "0").set(2)
    page = merge([('role="gateway"', OWN), ('role="scheduler"', generate_latest(registry).decode())])
    names = [re.findall(r'[{,](\w+)="', line) for line in page.splitlines() if not line.startswith("#")]
    assert [labels for labels in names if len(labels) != len(set(labels))] == []
    assert 'expertmesh_wanted_replicas{role="experts",shard="0"} 2.0' in page
    assert 'expertmesh_scheduler_leader{role="scheduler"}' in page


async def test_a_dead_sibling_is_shown_as_down():
    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(THEIRS)}\r\n\r\n{THEIRS}".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    dead = ["attention=http://127.0.0.1:9/metrics", "attention=http://127.0.0.1:9"]
    siblings = Siblings(parse_upstreams([f"scheduler=http://127.0.0.1:{port}", *dead]))
    page = await siblings.page(OWN)
    await siblings.close()
    server.close()
    up = {
        (sample.labels["role"], sample.labels.get("instance")): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "expertmesh_metrics_upstream_up"
    }
    assert up == {("scheduler", None): 1.0, ("attention", "attention-0"): 0.0, ("attention", "attention-1"): 0.0}
    assert 'x_total{role="scheduler",a="b c}"} 5.0' in page


def test_a_taken_port_is_a_startup_error():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=f"{port}.*--port"):
            listen("127.0.0.1", port)
    with pytest.raises(PortInUse, match="--host"):
        listen("no.such.host.invalid", 0)
