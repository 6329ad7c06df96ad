"""Attention workers that share the experts, in groups of pods: they answer as recorded, are scaled as groups by KEDA,
sleep and wake, and lose a rank. Where the cluster has no controller of LeaderWorkerSets something stands in for it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from testkit.kube import Cluster, table, until
from testkit.leader_worker_sets import controlled, defined
from testkit.pocket_answers import MOST_TOKENS, recorded
from testkit.prometheus import ADDRESS, Prometheus
from testkit.release import COMES_BACK, NAME, PREFIX, Release
from testkit.tide import Tide

RANKS = 2
CLIENTS = 12
SETTINGS = (
    *("attention.experts=mesh", f"attention.mesh.ranks={RANKS}", "attention.config.max_num_seqs=4"),
    *("autoscaling.enabled=true", "metrics.podMonitor.enabled=true", "metrics.podMonitor.interval=2s"),
    *(f"autoscaling.prometheus.serverAddress={ADDRESS}", "autoscaling.pollingInterval=2"),
    *("autoscaling.scaleDownAfterSeconds=15", "autoscaling.gateway.maxReplicas=1"),
    *("autoscaling.attention.maxReplicas=2", "attention.drainSeconds=20", "attention.resources.requests.cpu=20m"),
)
"""Four sequences to a rank: a dozen clients ask for one and a half groups, at least."""
JSON = ("--set-json", "autoscaling.targetTpotSeconds=60", "--set-json", "autoscaling.targetTtftSeconds=3600")


class Mesh:
    """The release, and its groups."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace
        self.release = Release(cluster=cluster, namespace=namespace)
        self._prometheus = Prometheus.of(cluster)

    def upgrade(self, *settings: str) -> None:
        chart = [*self.cluster.chart("dev", *SETTINGS, *settings), *JSON]
        words = ("--namespace", self.namespace, "--wait", "--timeout", "8m")
        self.cluster.helm("upgrade", "--install", NAME, *chart, *words)

    def groups(self) -> tuple[int, int]:
        """Told and ready."""
        found = self.cluster.get(self.namespace, "leaderworkerset", f"{PREFIX}-attention")
        return found["spec"]["replicas"], found.get("status", {}).get("readyReplicas", 0)

    def asleep(self) -> bool:
        """As `expertmesh status` has it, which misses nothing."""
        words = ("-m", "services", "status", "--kube-namespace", self.namespace, "--json")
        found = json.loads(self.cluster.run(sys.executable, *words))
        assert found["missing"] == found["troubles"] == []
        return bool(found["asleep"])

    def lost(self) -> float | None:
        """Attempts that were not answered to their end."""
        series = f'expertmesh_lost_attempts_total{{namespace="{self.namespace}"}}'
        return self._prometheus.value(f"sum({series}) or vector(0)")

    def registered(self) -> float | None:
        """Ranks that take requests."""
        return self._prometheus.value(f'max(expertmesh_workers{{namespace="{self.namespace}"}})')


@pytest.fixture(scope="module")
def mesh(cluster: Cluster) -> Iterator[Mesh]:
    with ExitStack() as stack:
        has_controller = stack.enter_context(defined(cluster))
        namespace = stack.enter_context(cluster.namespace("t-mesh"))
        if not has_controller:
            stack.enter_context(controlled(cluster, namespace))
        found = Mesh(cluster, namespace)
        began = time.monotonic()
        found.upgrade()
        until(lambda: found.groups() == (1, 1), 120, "the ranks of a group have met")
        print(f"\na group of {RANKS} ranks is ready {time.monotonic() - began:.1f} s after helm install began")
        until(lambda: found.registered() == RANKS, 120, "Prometheus knows it")
        yield found


async def test_groups_come_and_go_by_load(mesh: Mesh) -> None:
    """With the load falls the number of groups; the ranks of the one that goes drain together."""
    tide, marks = Tide(release=mesh.release, clients=CLIENTS), {"one group": time.time()}
    async with tide.flowing(CLIENTS):
        await asyncio.to_thread(until, lambda: mesh.groups() == (2, 2), 180, "KEDA has added a group, and it is ready")
        await asyncio.to_thread(until, lambda: mesh.registered() == 2 * RANKS, 60, "its ranks take requests")
        marks["two groups"] = time.time()
        await asyncio.sleep(15)
        tide.clients = 2
        marks["little load"] = time.time()
        await asyncio.to_thread(until, lambda: mesh.groups()[0] == 1, 180, "KEDA has taken a group away")
        await asyncio.to_thread(until, lambda: len(mesh.release.pods("attention")) == RANKS, 120, "its pods are gone")
        marks["one again"] = time.time()
        await asyncio.sleep(5)
    edges = [*marks.values(), time.time()]
    rows = [(name, end - began) for (name, began), end in zip(marks.items(), edges[1:], strict=True)]
    print(f"\n{tide.finished} requests; s\n" + table(rows))
    assert not mesh.asleep()
    assert mesh.lost() == 0, "all drained what they had"
    assert (tide.failed, tide.wrong) == ([], [])
    assert tide.finished > CLIENTS


async def test_a_rank_whose_pod_is_deleted_with_force_loses_no_request(mesh: Mesh) -> None:
    """Of the only group there is: what its ranks do not answer in a second goes on when they have met again."""
    before = mesh.release.pods("attention")[0]

    def kill() -> None:
        mesh.cluster.kubectl(
            "-n", mesh.namespace, "delete", "pod", before["metadata"]["name"], "--force", "--grace-period=0"
        )
        until(lambda: mesh.groups() == (1, 0), 60, "it is missed")
        until(lambda: mesh.groups() == (1, 1), 120, "the ranks have met again")

    outcome = await mesh.release.under_load(kill, clients=2, manner=COMES_BACK, lead_s=1.0)
    print(f"\n{outcome}")
    assert (outcome.failed, outcome.wrong) == ([], [])


def test_groups_sleep_and_wake(mesh: Mesh) -> None:
    mesh.upgrade("autoscaling.sleepAfterSeconds=8")
    until(lambda: mesh.groups()[0] == 0, 180, "no group is wanted")
    until(lambda: not mesh.release.pods("attention"), 120, "its pods are gone")
    assert mesh.asleep()
    client = mesh.release.client()
    assert [model.id for model in client.models.list().data] == ["pocket"]
    began, asked = time.monotonic(), recorded()[0]
    stream = client.completions.create(
        model="pocket", prompt=asked["prompt"], max_tokens=MOST_TOKENS, temperature=0, stream=True, timeout=300
    )
    pieces = [next(iter(stream)).choices[0].text]
    print(f"\nfirst token {time.monotonic() - began:.1f} s after the request that woke the group")
    pieces += [chunk.choices[0].text for chunk in stream]
    assert "".join(pieces) == asked["text"]
