"""Pods are killed, evicted and lost under load, on a release with two of each role and on one with a single one.

What "lost" means: where a pod of another role than the gateway dies, clients notice nothing but a pause. A gateway
takes its connections with it, so its clients send the same request again under the same Idempotency-Key. While Redis
is away new requests are refused with 503 and come back. Every request ends with the recorded answer, once.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from testkit.kube.cluster import Cluster, until
from testkit.kube.lost_node import lose
from testkit.kube.release import COMES_BACK, NAME, PLAIN, PREFIX, TAKES_UP, Manner, Outcome, Release

ROLES = ("gateway", "scheduler", "attention", "experts")
TWICE = (
    *("gateway.replicas=2", "scheduler.replicas=2", "attention.replicas=2", "experts.replicas=2"),
    *("redis.persistence.enabled=true", "redis.persistence.size=1Gi"),
)
CLIENTS = 4
LEAD_S = 2.0
"""Time for requests to run before the disturbance."""


def _installed(cluster: Cluster, namespace: str, *settings: str) -> Release:
    release = Release(cluster=cluster, namespace=namespace)
    release.apply("install", *settings)
    return release


@pytest.fixture(scope="module")
def doubled(cluster: Cluster) -> Iterator[Release]:
    """Two of everything but Redis, which keeps its file on a volume."""
    with cluster.namespace("t-disruptions") as namespace:
        cluster.claim(namespace, f"data-{PREFIX}-redis-0")
        yield _installed(cluster, namespace, *TWICE)


@pytest.fixture(scope="module")
def single(cluster: Cluster) -> Iterator[Release]:
    """Profile dev as it is: one of each, and a Redis that forgets all when it ends."""
    with cluster.namespace("t-disruptions-single") as namespace:
        yield _installed(cluster, namespace)


def _names(release: Release, role: str) -> list[str]:
    return sorted(pod["metadata"]["name"] for pod in release.pods(role))


def _kill(release: Release, *pods: str) -> None:
    """Delete pods without time to drain: the kubelet gives them 2 s."""
    names = [f"pod/{pod}" for pod in pods]
    release.kubectl("delete", *names, "--force", "--grace-period=0", "--wait=false")


def _lose(release: Release, *pods: str) -> None:
    """Delete pods as if their node were gone, and Kubernetes had noticed it."""
    lose([pod for pod in release.pods() if pod["metadata"]["name"] in pods])
    _kill(release, *pods)


def _leader(release: Release) -> str:
    """The pod of the leading scheduler, by its own metrics."""
    for pod in release.pods("scheduler"):
        page = httpx.get(f"http://{pod['status']['podIP']}:9100/metrics", trust_env=False).text
        if "\nexpertmesh_scheduler_leader 1.0" in page:
            return str(pod["metadata"]["name"])
    raise AssertionError("no scheduler leads")


async def _survives(release: Release, disturb: Callable[[], object], manner: Manner = PLAIN, what: str = "") -> Outcome:
    """``disturb`` under load until all pods are back and ready: nothing fails, no answer differs."""
    count, back = len(release.pods()), 0.0

    def disturbed() -> None:
        nonlocal back
        before = release.uids()
        disturb()
        until(lambda: release.uids() != before, 60, "a pod has been replaced")
        back = until(lambda: release.whole(count), 240, "all pods are ready again")

    outcome = await release.under_load(disturbed, manner=manner, lead_s=LEAD_S)
    print(f"\n{what}: ready again after {back:.0f} s; {outcome}")
    assert outcome.finished > 5
    return outcome


@pytest.mark.parametrize("role", ["scheduler", "attention", "experts"])
async def test_a_killed_pod_of_two_fails_nothing(doubled: Release, role: str) -> None:
    pod = _leader(doubled) if role == "scheduler" else _names(doubled, role)[0]
    await _survives(doubled, lambda: _kill(doubled, pod), what=f"one {role} of two killed")


async def test_clients_of_a_killed_gateway_take_up_their_requests(doubled: Release) -> None:
    pod = _names(doubled, "gateway")[0]
    await _survives(doubled, lambda: _kill(doubled, pod), TAKES_UP, "one gateway of two killed")


async def test_a_killed_redis_loses_nothing_that_it_admitted(doubled: Release) -> None:
    [pod] = _names(doubled, "redis")
    outcome = await _survives(doubled, lambda: _kill(doubled, pod), COMES_BACK, "Redis killed")
    assert outcome.resumed == 0


async def test_what_waits_in_the_queue_outlives_redis(doubled: Release) -> None:
    """No worker serves meanwhile, so that requests can only wait."""
    [redis] = _names(doubled, "redis")
    stats = f"{{{doubled.namespace}.{NAME}}}:queue:stats"

    def waiting() -> int:
        ask = f"REDISCLI_AUTH=$PASSWORD_OPERATOR exec redis-cli --user operator HGET '{stats}' requests"
        return int(doubled.kubectl("exec", redis, "--", "sh", "-c", ask).strip() or 0)

    def disturb() -> None:
        doubled.kubectl("scale", f"deploy/{PREFIX}-attention", "--replicas=0")
        until(lambda: waiting() == CLIENTS + 1, 120, "all clients wait in the queue")
        before = doubled.uids("redis")
        _kill(doubled, redis)
        until(lambda: doubled.uids("redis").isdisjoint(before) and waiting() == CLIENTS + 1, 60, "they still wait")
        doubled.kubectl("scale", f"deploy/{PREFIX}-attention", "--replicas=2")
        until(lambda: doubled.whole(11), 120, "attention workers are back")

    outcome = await doubled.under_load(disturb, CLIENTS)
    assert (outcome.resumed, outcome.refused) == (0, 0)


def test_an_answer_under_its_key_outlives_redis_and_gateways(doubled: Release) -> None:
    """The key's record, from which a sampled answer is drawn again, stands in the append-only file alone."""

    def drawn(key: str) -> str:
        answer = doubled.client().completions.create(
            model="pocket",
            prompt="define: sea\n",
            max_tokens=32,
            temperature=1.0,
            extra_headers={"Idempotency-Key": key},
        )
        return answer.choices[0].text

    first, count = drawn("monday"), len(doubled.pods())
    assert first != drawn("tuesday")
    _kill(doubled, *_names(doubled, "redis"), *_names(doubled, "gateway"))
    until(lambda: doubled.whole(count), 120, "all pods are ready again")
    assert drawn("monday") == first


async def test_a_lost_node_with_one_of_each_role_loses_nothing(doubled: Release) -> None:
    pods = [_names(doubled, role)[0] for role in ("scheduler", "attention", "gateway")]
    pods += [f"{PREFIX}-experts-{group}-0" for group in range(2)]
    await _survives(doubled, lambda: _lose(doubled, *pods), TAKES_UP, "a node with one of each lost")


def _evict(release: Release, pod: str, *, dry: bool = False) -> str:
    """What the API server says; ``dry``: only asked."""
    body: dict[str, Any] = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": release.namespace},
    }
    if dry:
        body["deleteOptions"] = {"dryRun": ["All"]}
    path = f"/api/v1/namespaces/{release.namespace}/pods/{pod}/eviction"
    return release.cluster.kubectl("create", "--raw", path, "-f", "-", text=json.dumps(body), check=False)


def _drained(release: Release, selector: str) -> float:
    """Seconds that `kubectl drain` takes. The one node is opened again at once, for their successors."""
    cluster, began = release.cluster, time.monotonic()
    [node] = {pod["spec"]["nodeName"] for pod in release.pods()}
    draining = subprocess.Popen(
        ["kubectl", "drain", node, f"--pod-selector={selector}", "--delete-emptydir-data", "--timeout=300s"],
        env=cluster.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        until(lambda: cluster.get("default", "node", node)["spec"].get("unschedulable"), 60, "it is cordoned", 0.1)
    finally:
        cluster.kubectl("uncordon", node)
    said, _ = draining.communicate(timeout=400)
    assert draining.returncode == 0, said
    assert "Cannot evict pod as it would violate the pod's disruption budget" in said, said
    return time.monotonic() - began


async def test_a_drain_waits_for_successors_and_fails_nothing(doubled: Release) -> None:
    selector = f"app.kubernetes.io/instance={NAME},app.kubernetes.io/component!=redis"
    before = doubled.uids() - doubled.uids("redis")
    await _survives(doubled, lambda: _drained(doubled, selector), what="drained")
    assert before.isdisjoint(doubled.uids())


async def test_an_eviction_is_refused_while_the_budget_is_used_up(doubled: Release) -> None:
    first, second = _names(doubled, "attention")
    count = len(doubled.pods())
    assert "Success" in _evict(doubled, first)
    assert "would violate the pod's disruption budget" in _evict(doubled, second)
    until(lambda: doubled.whole(count), 120, "its successor is ready")
    assert "Success" in _evict(doubled, second)
    until(lambda: doubled.whole(count), 120, "its successor is ready")


def test_a_drain_stops_at_redis_where_values_say_so(doubled: Release) -> None:
    budget = ("patch", "pdb", f"{PREFIX}-redis", "--patch", '{"spec": {"maxUnavailable": 0}}')  # redis.pdb's value
    doubled.kubectl(*budget)
    [pod] = _names(doubled, "redis")
    refused = "would violate the pod's disruption budget"
    until(lambda: refused in _evict(doubled, pod, dry=True), 30, "an eviction of Redis would be refused")
    assert refused in _evict(doubled, pod)


@pytest.mark.parametrize("role", ["scheduler", "attention", "experts"])
async def test_the_only_pod_of_a_role_is_missed_but_nothing_fails(single: Release, role: str) -> None:
    await _survives(single, lambda: _kill(single, *_names(single, role)), what=f"every {role} killed")


async def test_clients_of_the_only_gateway_come_back(single: Release) -> None:
    await _survives(single, lambda: _kill(single, *_names(single, "gateway")), TAKES_UP, "the only gateway killed")


async def test_a_redis_that_forgets_everything_loses_nothing(single: Release) -> None:
    outcome = await _survives(
        single, lambda: _kill(single, *_names(single, "redis")), COMES_BACK, "Redis without a volume killed"
    )
    assert outcome.resumed == 0


async def test_everything_at_once(single: Release) -> None:
    pods = [name for role in (*ROLES, "redis") for name in _names(single, role)]
    await _survives(single, lambda: _kill(single, *pods), TAKES_UP, "everything killed")
