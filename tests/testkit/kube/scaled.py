"""A release whose replicas of attention are several workers each, and how KEDA scales it: by load, to sleep, awake."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass

from testkit.kube.cluster import Cluster, table, until
from testkit.kube.prometheus import ADDRESS, Prometheus
from testkit.kube.release import PREFIX, WAIT, Release
from testkit.kube.tide import Tide
from testkit.pocket.answers import MAX_TOKENS, recorded

CLIENTS = 12
SETTINGS = (
    *("attention.config.max_num_seqs=4", "attention.drainSeconds=20", "attention.resources.requests.cpu=20m"),
    *("autoscaling.enabled=true", "metrics.podMonitor.enabled=true", "metrics.podMonitor.interval=2s"),
    *(f"autoscaling.prometheus.serverAddress={ADDRESS}", "autoscaling.pollingInterval=2"),
    *("autoscaling.scaleDownAfterSeconds=15", "autoscaling.gateway.maxReplicas=1"),
    "autoscaling.attention.maxReplicas=2",
)
"""Four sequences to a worker: a dozen clients ask for one and a half replicas of two, at least."""
JSON = ("--set-json", "autoscaling.targetTpotSeconds=60", "--set-json", "autoscaling.targetTtftSeconds=3600")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaled:
    """``kind``: of the workload that attention is; ``workers`` and ``pods``: of each replica."""

    cluster: Cluster
    namespace: str
    kind: str
    workers: int
    pods: int
    settings: tuple[str, ...]

    @property
    def release(self) -> Release:
        return Release(cluster=self.cluster, namespace=self.namespace)

    def upgrade(self, *settings: str) -> None:
        self.release.apply("upgrade", *SETTINGS, *self.settings, *settings, words=("--install", *JSON, *WAIT))

    def install(self) -> None:
        """Returns when all workers of its one replica take requests, and Prometheus knows it."""
        began = time.monotonic()
        self.upgrade()
        until(lambda: self.replicas() == (1, 1), 120, "all workers of a replica are ready")
        print(
            f"\na replica of {self.workers} workers is ready {time.monotonic() - began:.1f} s after helm install began"
        )
        until(lambda: self.registered() == self.workers, 120, "Prometheus knows it")

    def replicas(self) -> tuple[int, int]:
        """Replicas that are set and that are ready."""
        found = self.cluster.get(self.namespace, self.kind, f"{PREFIX}-attention")
        return found["spec"]["replicas"], found.get("status", {}).get("readyReplicas", 0)

    def asleep(self) -> bool:
        """Whether the model is asleep, and `expertmesh status` misses nothing."""
        words = ("-m", "services", "status", "--kube-namespace", self.namespace, "--json")
        found = json.loads(self.cluster.run(sys.executable, *words))
        assert found["missing"] == found["troubles"] == []
        return bool(found["asleep"])

    def lost(self) -> float | None:
        """Attempts that were not answered to their end."""
        series = f'expertmesh_lost_attempts_total{{namespace="{self.namespace}"}}'
        return Prometheus.of(self.cluster).value(f"sum({series}) or vector(0)")

    def registered(self) -> float | None:
        """Workers that take requests."""
        return Prometheus.of(self.cluster).value(f'max(expertmesh_workers{{namespace="{self.namespace}"}})')

    async def grows_and_shrinks(self) -> None:
        """Check that replicas follow the load, and that those that end drain."""
        tide, marks = Tide(release=self.release, clients=CLIENTS), {"one replica": time.time()}
        async with tide.flowing(CLIENTS):
            await asyncio.to_thread(
                until, lambda: self.replicas() == (2, 2), 180, "KEDA has added one, and it is ready"
            )
            await asyncio.to_thread(until, lambda: self.registered() == 2 * self.workers, 60, "it takes requests")
            marks["two replicas"] = time.time()
            await asyncio.sleep(15)
            tide.clients = 2
            marks["little load"] = time.time()
            await asyncio.to_thread(until, lambda: self.replicas()[0] == 1, 180, "KEDA has taken one away")
            await asyncio.to_thread(until, self._pods_are_of_one, 120, "its pods are gone")
            marks["one again"] = time.time()
            await asyncio.sleep(5)
        edges = [*marks.values(), time.time()]
        rows = [(name, end - began) for (name, began), end in zip(marks.items(), edges[1:], strict=True)]
        print(f"\n{tide.finished} requests; s\n" + table(rows))
        assert not self.asleep()
        assert self.lost() == 0, "all drained what they had"
        assert (tide.failed, tide.wrong) == ([], [])
        assert tide.finished > CLIENTS

    def _pods_are_of_one(self) -> bool:
        return len(self.release.pods("attention")) == self.pods

    def sleeps_and_wakes(self) -> None:
        self.upgrade("autoscaling.sleepAfterSeconds=8")
        until(lambda: self.replicas()[0] == 0, 180, "no replica is wanted")
        until(lambda: not self.release.pods("attention"), 120, "its pods are gone")
        assert self.asleep()
        client = self.release.client()
        assert [model.id for model in client.models.list().data] == ["pocket"]
        began, asked = time.monotonic(), recorded()[0]
        stream = client.completions.create(
            model="pocket", prompt=asked["prompt"], max_tokens=MAX_TOKENS, temperature=0, stream=True, timeout=300
        )
        pieces = [next(iter(stream)).choices[0].text]
        print(f"\nfirst token {time.monotonic() - began:.1f} s after the request that woke the replica")
        pieces += [chunk.choices[0].text for chunk in stream]
        assert "".join(pieces) == asked["text"]
