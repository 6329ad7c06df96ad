"""KEDA on the real cluster: a hot shard gets replicas and gives them back, a model sleeps and wakes, and what is away
changes nothing. One release for all of it, in this order; KUBE_PLOTS names a folder for the timeline."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest
from testkit.fabric.slow_group import slow_group, slow_rows
from testkit.kube.cluster import Cluster, table, until
from testkit.kube.prometheus import ADDRESS, Prometheus
from testkit.kube.release import NAME, PREFIX, WAIT, Release
from testkit.kube.scaling_picture import figures, timeline
from testkit.kube.tide import Tide

HOT, COLD = "experts-0", "experts-1"
CLIENTS = 8
CALM_REST_S = 4.0
SETTINGS = (
    *("autoscaling.enabled=true", "metrics.podMonitor.enabled=true", "metrics.podMonitor.interval=2s"),
    *("metrics.prometheusRule.enabled=true", f"autoscaling.prometheus.serverAddress={ADDRESS}"),
    *("autoscaling.pollingInterval=2", "autoscaling.scaleDownAfterSeconds=20", "autoscaling.gateway.maxReplicas=1"),
    *("autoscaling.attention.minReplicas=3", "autoscaling.attention.maxReplicas=3"),
    "autoscaling.experts.maxReplicas=3",
    *("experts.resources.requests.cpu=20m", "attention.resources.requests.cpu=20m", "attention.drainSeconds=20"),
    "attention.config.max_num_batched_tokens=8",  # a token does not wait for the whole prompt of another request
)
PAIR_S = 0.003
"""What a row takes with each expert of the hot group, two of its four on average. The next token of eight requests,
split over three attention workers, keeps one seat busy for 0.24 s, and three for 0.08 s, at least."""
JSON = (
    *("--set-json", "autoscaling.targetTpotSeconds=0.5", "--set-json", "autoscaling.targetTtftSeconds=3600"),
    *slow_group(0, PAIR_S),
)


class Scaled:
    """The release under KEDA, and what Prometheus knows of it."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace
        self.release = Release(cluster=cluster, namespace=namespace)
        self.prometheus = Prometheus.of(cluster)

    def upgrade(self, *settings: str, wait: bool = True) -> None:
        words = ("--install", *JSON, *(WAIT if wait else ()))
        self.release.apply("upgrade", *SETTINGS, *settings, words=words)

    def counts(self) -> dict[str, int]:
        """Replicas that are set in Kubernetes, of all that KEDA scales."""
        found = self.cluster.items(
            self.namespace, "statefulsets,deployments", "-l", f"app.kubernetes.io/instance={NAME}"
        )
        replicas = {each["metadata"]["name"].removeprefix(f"{PREFIX}-"): each["spec"]["replicas"] for each in found}
        return {name: replicas[name] for name in (HOT, COLD, "attention", "gateway")}

    def count(self, name: str) -> int:
        return self.counts()[name]

    def wanted(self, role: str, shard: str = "") -> float | None:
        labels = f'namespace="{self.namespace}",role="{role}",shard="{shard}"'
        return self.prometheus.value(f"max(expertmesh_wanted_replicas{{{labels}}})")

    def seats(self, shard: str) -> float | None:
        return self.prometheus.value(f'max(expertmesh_expert_seats{{namespace="{self.namespace}",shard="{shard}"}})')


@pytest.fixture(scope="module")
def scaled(cluster: Cluster) -> Iterator[Scaled]:
    """Fixed replicas first, two of group 1, then KEDA."""
    with cluster.namespace("t-scaling") as namespace:
        slow_rows(cluster, namespace)
        found = Scaled(cluster, namespace)
        fixed = ("autoscaling.enabled=false", "experts.perGroup.1.replicas=2", "attention.replicas=3")
        found.upgrade(*fixed)
        given = {HOT: 1, COLD: 2, "attention": 3, "gateway": 1}
        assert found.counts() == given
        found.upgrade("experts.perGroup.1.replicas=2", wait=False)
        assert found.counts() == given, "an upgrade scales nothing"
        yield found


def test_keda_takes_over_what_was_fixed_and_lowers_it_when_that_suffices(scaled: Scaled) -> None:
    until(lambda: scaled.wanted("experts", "1") == 1, 120, "one replica of group 1 suffices")
    until(lambda: scaled.count(COLD) == 1, 120, "KEDA has followed")
    until(lambda: (scaled.seats("0"), scaled.seats("1")) == (1, 1), 60, "the seat that left is out of the table")
    assert scaled.counts() == {HOT: 1, COLD: 1, "attention": 3, "gateway": 1}


async def test_a_hot_shard_gets_replicas_and_gives_them_back(scaled: Scaled) -> None:
    marks: dict[str, float] = {}
    tide = Tide(release=scaled.release)

    async def phase(name: str, *, clients: int, rest_s: float) -> None:
        tide.clients, tide.rest_s, marks[name] = clients, rest_s, time.time()

    async with tide.flowing(CLIENTS):
        await phase("calm", clients=1, rest_s=CALM_REST_S)
        await asyncio.sleep(25)
        await phase("hot", clients=CLIENTS, rest_s=0.0)
        await asyncio.to_thread(until, lambda: scaled.count(HOT) == 3, 240, "KEDA has raised the hot group to three")
        await asyncio.to_thread(until, lambda: scaled.seats("0") == 3, 150, "all three serve")
        marks["three serve"] = time.time()
        await asyncio.sleep(25)
        assert scaled.count(COLD) == 1, "the other group stays"
        await phase("calm again", clients=1, rest_s=CALM_REST_S)
        await asyncio.to_thread(until, lambda: scaled.count(HOT) == 1, 240, "KEDA has lowered it to one")
        await asyncio.to_thread(until, lambda: scaled.seats("0") == 1, 60, "those that left are out of the table")
        marks["one serves"] = time.time()
        await asyncio.sleep(20)
    ended = time.time()
    edges = [*marks.values(), ended]
    rows = [
        (name, end - began, *(1e3 * tide.gap_s(share, began, end) for share in (0.5, 0.99)))
        for (name, began), end in zip(marks.items(), edges[1:], strict=True)
    ]
    print(f"\n{tide.finished} requests; phase, s, p50 and p99 inter-token latency in ms\n" + table(rows))
    _draw(
        scaled,
        marks,
        ended,
        f"A hot shard under KEDA: {tide.finished} requests, {len(tide.failed)} failed, {len(tide.wrong)} changed",
    )
    assert (tide.failed, tide.wrong) == ([], [])
    median = {name: p50 for name, _, p50, _ in rows}
    assert median["three serve"] < 0.8 * median["hot"], "three seats serve faster than one"


def _draw(scaled: Scaled, marks: dict[str, float], ended: float, title: str) -> None:
    if folder := os.environ.get("KUBE_PLOTS"):
        found = figures(scaled.prometheus, scaled.namespace, marks, ended) | {"title": title}
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, "scaling.json").write_text(json.dumps(found), encoding="utf-8")
        Path(folder, "scaling.svg").write_text(timeline(found, title), encoding="utf-8")


def test_a_model_sleeps_stays_listed_and_is_woken_by_a_request(scaled: Scaled) -> None:
    """There is one attention worker, as for a small model."""
    awake = ("autoscaling.attention.minReplicas=1", "autoscaling.attention.maxReplicas=1")
    scaled.upgrade("autoscaling.sleepAfterSeconds=10", *awake, wait=False)
    asleep = {HOT: 0, COLD: 0, "attention": 0, "gateway": 1}
    slept = until(lambda: scaled.counts() == asleep, 180, "all but the gateway is at zero")
    until(lambda: not scaled.release.pods("attention") + scaled.release.pods("experts"), 120, "their pods are gone")
    client = scaled.release.client()
    assert [model.id for model in client.models.list().data] == ["pocket"]
    phases, began, clock = [("idle until all is at zero", slept)], time.time(), time.monotonic()
    stream = client.completions.create(model="pocket", prompt="define: moor\n", stream=True, timeout=300)
    next(iter(stream))
    first = time.monotonic() - clock
    phases += [(name, after) for name, after in _woken(scaled, began)]
    phases.append(("first token", first))
    print("\ns, from the request on but for the first line\n" + table(phases))
    for _ in stream:
        pass
    scaled.upgrade(wait=False)
    until(lambda: scaled.count("attention") == 3, 120, "it is awake, and as before")


def _woken(scaled: Scaled, began: float) -> list[tuple[str, float]]:
    """Times in s after ``began``: when the scheduler wanted replicas, and when each pod was made and ready."""
    labels = f'namespace="{scaled.namespace}",role="attention"'
    wanted = scaled.prometheus.lines(f"max(expertmesh_wanted_replicas{{{labels}}})", began, time.time())
    at = [at - began for at, value in next(iter(wanted.values()), []) if value > 0]
    made = {
        pod["metadata"]["name"]: datetime.fromisoformat(pod["metadata"]["creationTimestamp"]).timestamp() - began
        for pod in scaled.release.pods()
    }
    ready = scaled.release.ready_after(began)
    rows = [(f"{name} is made", after) for name, after in made.items() if after > 0]
    rows += [(f"{name} is ready", after) for name, after in ready.items() if after > 0]
    return [("replicas are wanted", at[0] if at else float("nan")), *sorted(rows, key=lambda row: row[1])]


async def test_an_upgrade_under_load_scales_nothing(scaled: Scaled) -> None:
    """The load is a client that rests between its requests: one that does not brings the hot group near a second
    replica, which an upgrade has nothing to do with."""
    before, seen = scaled.counts(), []

    def upgrade() -> None:
        with ThreadPoolExecutor() as threads:
            upgrading = threads.submit(scaled.upgrade, "commonAnnotations.rolled=again")
            while not upgrading.done():
                seen.append(scaled.counts())
                time.sleep(1)
            upgrading.result()

    outcome = await scaled.release.under_load(upgrade, clients=0)
    assert outcome.finished > 0
    assert all(counts == before for counts in seen), [counts for counts in seen if counts != before]
    assert len(seen) > 5


def test_replicas_hold_while_prometheus_is_away(scaled: Scaled) -> None:
    """Zero is wanted, and nobody hears of it."""
    before = scaled.counts()
    nobody = "autoscaling.prometheus.serverAddress=http://nobody.monitoring.svc.cluster.local:9090"
    scaled.upgrade("autoscaling.sleepAfterSeconds=3", nobody, wait=False)
    until(lambda: scaled.wanted("attention") == 0, 120, "the scheduler wants none")
    until(lambda: _ready(scaled, "False"), 120, "KEDA says that its trigger fails")
    time.sleep(30)
    assert scaled.counts() == before
    assert all(before.values())
    said = scaled.release.kubectl("get", "events", "--field-selector", "type=Warning")
    assert "KEDAScalerFailed" in said
    scaled.upgrade(wait=False)
    until(lambda: _ready(scaled, "True"), 120, "KEDA reads again")


def _ready(scaled: Scaled, status: str) -> bool:
    conditions = scaled.cluster.get(scaled.namespace, "scaledobject", f"{PREFIX}-{HOT}")["status"]["conditions"]
    return {each["type"]: each["status"] for each in conditions}["Ready"] == status
