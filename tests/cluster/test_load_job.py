"""The chart's Job sends load on the real cluster: it runs to its end, its results can be read, and prompts that aim at
one shard group's experts raise the rows and the replicas of that group alone. One release, in this order."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from testkit.fabric.slow_group import slow_group, slow_rows
from testkit.kube.cluster import Cluster, table, until
from testkit.kube.prometheus import ADDRESS, Prometheus
from testkit.kube.release import PREFIX, ROLE, WAIT, Release
from testkit.pocket.answers import POCKET

from loadgen.record_experts import record
from services.routing import even_groups

CLAIM, RECORDING, MOUNTED = "load-results", "recording", "/recording"
GROUPS, HOT = 2, 1
LAYERS, EXPERTS = 5, 16
PAIR_S = 0.0015
"""What a row takes with each expert, on a node whose two processors would else be what everybody waits for."""
WORDS = (
    *("law", "bird", "paper", "light", "queen", "stone", "water", "river", "court", "science"),
    *("green", "south", "run", "eat", "red", "sleep", "north", "house", "music", "ship"),
)
"""Repeated, the first ten give group 1 two thirds of their rows or more; the load generator is to find the best."""
REPEATED, CALM_S, HOT_S = 40, 30, 100
SETTINGS = (
    *("autoscaling.enabled=true", "metrics.podMonitor.enabled=true", "metrics.podMonitor.interval=2s"),
    *(f"autoscaling.prometheus.serverAddress={ADDRESS}", "autoscaling.pollingInterval=2"),
    *("autoscaling.scaleDownAfterSeconds=20", "autoscaling.gateway.maxReplicas=1"),
    *("autoscaling.attention.minReplicas=2", "autoscaling.attention.maxReplicas=2"),
    *("autoscaling.experts.maxReplicas=2", "attention.config.prefix_cache=false", "attention.drainSeconds=20"),
    *("experts.resources.requests.cpu=20m", "attention.resources.requests.cpu=20m"),
    *("loadgen.enabled=true", "loadgen.resources.requests.cpu=100m"),
    *("loadgen.results.enabled=true", f"loadgen.results.existingClaim={CLAIM}"),
)
SENT = ("--output-tokens", 1, "--gaps", "constant", "--lag-limit", "2000ms")
"""No latency counts here, so requests may be late on a node that all share."""
CALM = (*SENT, "--workload", "lengths", "--prompt-tokens", REPEATED, "--rate", 0.5)
AIMED = (
    *(*SENT, "--workload", "hot-experts", "--recording", f"{MOUNTED}/recording.json"),
    *("--hot-prompts", 4, "--rate", 1),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Shares of the group that the load aims at. A row counts in each group that has one of its four experts, so with
    two groups both have nearly all rows, and differ in the time that they take."""

    rows: float
    time: float

    def __str__(self) -> str:
        return f"{self.rows:.0%} of rows, {self.time:.0%} of time"


class Loaded:
    """The release, its Jobs, and what Prometheus knows of it."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace
        self.release = Release(cluster=cluster, namespace=namespace)
        self.prometheus = Prometheus.of(cluster)
        self.results = Path()
        self.calm = Part(rows=0.0, time=0.0)

    def upgrade(self, args: Sequence[str | int | float], wait: bool = True) -> None:
        """Install or upgrade with a Job that has these options."""
        volumes = {
            "extraVolumes": [{"name": RECORDING, "configMap": {"name": RECORDING}}],
            "extraVolumeMounts": [{"name": RECORDING, "mountPath": MOUNTED, "readOnly": True}],
            "args": list(args),
        }
        words = [
            word for key, value in volumes.items() for word in ("--set-json", f"loadgen.{key}={json.dumps(value)}")
        ]
        words += ["--set-json", "autoscaling.targetTpotSeconds=60", "--set-json", "autoscaling.targetTtftSeconds=3600"]
        words += [word for group in range(GROUPS) for word in slow_group(group, PAIR_S)]
        self.release.apply("upgrade", *SETTINGS, words=("--install", *words, *(WAIT if wait else ())))

    def job(self) -> dict[str, Any]:
        [found] = self.cluster.items(self.namespace, "jobs", "-l", f"{ROLE}=loadgen")
        return found

    def ended(self) -> bool:
        return bool(self.job().get("status", {}).get("conditions"))

    def read(self) -> tuple[dict[str, Any], str]:
        """The results that the last Job left on its volume, and its log. Its pod has to have succeeded."""
        name = self.job()["metadata"]["name"]
        log = self.release.kubectl("logs", f"job/{name}")
        assert self.job()["status"].get("succeeded") == 1, log
        [file] = self.results.glob(f"{name}-*.json")
        return json.loads(file.read_text()), log

    def part(self, began: float) -> Part:
        """What the aimed group had of the rows and of the time of all groups since ``began``."""
        return Part(
            rows=self._share("experts_rows_total", began), time=self._share("experts_busy_seconds_total", began)
        )

    def _share(self, counter: str, began: float) -> float:
        group = "expertmesh_io_shard_group"
        per_s = f'sum by ({group}) (rate(expertmesh_{counter}{{namespace="{self.namespace}"}}[6s]))'
        lines = self.prometheus.lines(per_s, began, time.time(), step_s=2.0)
        sums = [sum(value for _, value in lines[str(number)]) for number in range(GROUPS)]
        return sums[HOT] / sum(sums)

    def counts(self) -> list[int]:
        """Replicas that are set in Kubernetes, of each group."""
        sets = [self.cluster.get(self.namespace, "statefulset", f"{PREFIX}-experts-{group}") for group in range(GROUPS)]
        return [each["spec"]["replicas"] for each in sets]

    def seats(self, group: int) -> float | None:
        return self.prometheus.value(f'max(expertmesh_expert_seats{{namespace="{self.namespace}",shard="{group}"}})')


@pytest.fixture(scope="module")
def loaded(cluster: Cluster) -> Iterator[Loaded]:
    recording = record(POCKET / "model", [f"{word} " * REPEATED for word in WORDS], lambda _: None)
    data = {"recording.json": msgspec.json.encode(recording).decode()}
    with cluster.namespace("t-load-job") as namespace:
        found = Loaded(cluster, namespace)
        slow_rows(cluster, namespace)
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": RECORDING}, "data": data}
        cluster.kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(body))
        cluster.claim(namespace, CLAIM)
        found.results = cluster.opened(namespace, CLAIM)
        yield found


def test_the_job_runs_to_its_end_and_its_results_can_be_read(loaded: Loaded, tmp_path: Path) -> None:
    began = time.time()
    loaded.upgrade([*CALM, "--duration", CALM_S])
    until(loaded.ended, 300, "the Job has ended")
    results, log = loaded.read()
    file, page = tmp_path / "results.json", tmp_path / "report.html"
    file.write_text(json.dumps(results))
    words = [sys.executable, "-m", "expertmesh.load", "report", str(file), "-o", str(page)]
    said = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120).stdout
    assert page.read_text().startswith("<!doctype html>")
    loaded.calm = loaded.part(began)
    print(f"\n{log}\n{said}\ngroup {HOT}: {loaded.calm}")
    assert loaded.counts() == [1, 1], "a load without an aim raises none"


def test_a_load_that_aims_at_a_group_raises_its_rows_and_its_replicas_alone(loaded: Loaded) -> None:
    experts = even_groups(list(range(LAYERS)), EXPERTS, GROUPS)[HOT].experts
    aim = ",".join(f"{layer}:{expert}" for layer, numbers in experts.items() for expert in numbers)
    began = time.time()
    loaded.upgrade([*AIMED, "--hot-experts", aim, "--duration", HOT_S], wait=False)
    most, marks = [1, 1], [("helm upgrade", time.time() - began)]
    set_s = until(lambda: loaded.counts()[HOT] == 2, HOT_S, "KEDA has set two replicas")
    marks.append(("replicas set", marks[-1][1] + set_s))
    until(lambda: loaded.seats(HOT) == 2, 90, "both are in the routing table")
    marks.append(("both in the routing table", time.time() - began))
    while not loaded.ended():
        most = [max(pair) for pair in zip(most, loaded.counts(), strict=True)]
        time.sleep(1)
    aimed, (_, log) = loaded.part(began), loaded.read()
    print(f"\n{log}\ns since it began\n{table(marks)}\ngroup {HOT}: {loaded.calm} before, {aimed} then")
    assert most == [1, 2], "no other group got one"
    assert aimed.rows > loaded.calm.rows + 0.02
    assert aimed.time > max(0.6, loaded.calm.time + 0.05)
    until(lambda: loaded.counts() == [1, 1], 180, "it is given back")
