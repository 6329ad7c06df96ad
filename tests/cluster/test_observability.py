"""Metrics, rules and dashboards on the real cluster: the operator's Prometheus finds every documented series with its
type and labels, knows every alert, and has data for every panel."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest
from testkit.kube.cluster import Cluster, until
from testkit.kube.prometheus import ADDRESS, Prometheus
from testkit.kube.release import NAME, PREFIX, Release
from testkit.kube.tide import Tide

from services.metrics.catalogue import catalogue
from services.metrics.series import PREFIX as SERIES
from services.metrics.series import Definition

SETTINGS = (
    *("metrics.podMonitor.enabled=true", "metrics.podMonitor.interval=2s", "metrics.prometheusRule.enabled=true"),
    *("dashboards.enabled=true", "autoscaling.enabled=true", f"autoscaling.prometheus.serverAddress={ADDRESS}"),
    *(
        "autoscaling.attention.minReplicas=2",
        "autoscaling.attention.maxReplicas=2",
        "autoscaling.experts.maxReplicas=2",
    ),
    *(
        "autoscaling.gateway.maxReplicas=1",
        "experts.resources.requests.cpu=20m",
        "attention.resources.requests.cpu=20m",
    ),
    *("attention.drainSeconds=20", "attention.config.layer_series=true", "experts.config.layer_series=true"),
)
ELSEWHERE = {
    "gpu": "a GPU",
    "graph": "a GPU",
    "shared": "processes of one machine",
    "joined": "processes of one machine",
    "lockstep": "the layout lockstep",
    "worker_starts": "several workers in a pod",
    "process_starts": "`expertmesh serve`",
    "upstream_up": "several workers in a pod",
}
"""Words in names of series that are not on a page of this release, and where they are."""
EVENTS = {
    "unreadable_messages_total",
    "experts_unreadable_messages_total",
    "refused_peers_total",
    "request_errors_total",
    "experts_failed_calls_total",
    "experts_refused_peers_total",
    "step_failures_total",
    "repartitions_total",
    "gateway_refused_total",
    "reclaimed_leases_total",
    "lost_attempts_total",
    "resent_rows_total",
}
"""Counters of what may not happen in this run: then they have no series."""


class Observed:
    """The release, and what Prometheus knows of it."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.release = Release(cluster=cluster, namespace=namespace)
        self.prometheus = Prometheus.of(cluster)
        self.began = time.time()

    def get(self, path: str, **query: str) -> object:
        response = httpx.get(f"{self.prometheus.url}/api/v1/{path}", params=query, timeout=30).raise_for_status()
        return response.json()["data"]

    def labels(self, series: str) -> list[set[str]]:
        """Names of labels of each series of that name, of this release."""
        match = f'{series}{{namespace="{self.release.namespace}"}}'
        found = self.get("series", **{"match[]": match, "start": str(self.began)})
        assert isinstance(found, list)
        return [set(each) for each in found]


@pytest.fixture(scope="module")
def observed(cluster: Cluster) -> Iterator[Observed]:
    """Under load: a hot minute, an expert worker killed, a bad request and a client that leaves."""
    with cluster.namespace("t-observed") as namespace:
        found = Observed(cluster, namespace)
        found.release.apply("install", *SETTINGS)
        asyncio.run(_a_bad_minute(found))
        yield found


async def _a_bad_minute(observed: Observed) -> None:
    release, tide = observed.release, Tide(release=observed.release, clients=2, rest_s=1.0)
    async with tide.flowing(8):
        await asyncio.sleep(20)
        tide.clients, tide.rest_s = 8, 0.0
        await asyncio.sleep(20)
        pods = release.kubectl("get", "pods", "-l", "app.kubernetes.io/component=experts", "-o", "name").split()
        await asyncio.to_thread(release.kubectl, "delete", pods[0], "--grace-period=0", "--force")
        headers = {"Authorization": f"Bearer {release.key}"}
        for body in ({"model": "other", "prompt": "a"}, {"model": "pocket", "prompt": "a " * 3_000_000}):
            refused = httpx.post(f"{release.url}/v1/completions", json=body, headers=headers, timeout=60)
            assert refused.status_code in (400, 404, 413)
        long = {"model": "pocket", "prompt": "the fox " * 20_000, "max_tokens": 1}  # too long, found by a thread
        assert httpx.post(f"{release.url}/v1/completions", json=long, headers=headers, timeout=60).status_code == 400
        workers = release.kubectl("get", "pods", "-l", "app.kubernetes.io/component=attention", "-o", "name").split()
        await asyncio.to_thread(release.kubectl, "delete", workers[0], "--grace-period=0", "--force")
        await asyncio.sleep(75)
        tide.clients = 0
    assert not tide.wrong


def _where(definition: Definition) -> str | None:
    name = definition.name.removeprefix(SERIES)
    return next((place for word, place in ELSEWHERE.items() if word in name), None)


def _stored(definition: Definition) -> str:
    return f"{definition.name}_bucket" if definition.kind == "histogram" else definition.name


def test_every_documented_series_is_there_with_its_type_and_labels(observed: Observed) -> None:
    metadata = observed.get("metadata")
    assert isinstance(metadata, dict)
    missing, wrong = [], []
    for definition in catalogue():
        if _where(definition) is not None:
            continue
        found = observed.labels(_stored(definition))
        if not found:
            missing.append(definition.name)
            continue
        family = definition.name.removesuffix("_total")
        kinds = {each["type"] for name in (family, definition.name) for each in metadata.get(name, ())}
        if kinds != {definition.kind}:
            wrong.append(f"{definition.name} is {kinds}, not a {definition.kind}")
        documented = {label.name for label in definition.labels}
        if not documented <= set().union(*found):  # one series alone may have an empty label, which Prometheus drops
            wrong.append(f"{definition.name} has the labels {found[0]}, not {documented}")
    assert wrong == []
    absent = {name.removeprefix(SERIES) for name in missing}
    assert absent <= EVENTS
    print(f"\n{len(catalogue()) - len(missing)} of {len(catalogue())} series; did not happen: {sorted(absent)}")


def test_every_panel_has_data(observed: Observed) -> None:
    words = ("--prometheus", observed.prometheus.url, "--from", "-4m", "--strict", "--out", "/tmp/observed.html")
    variables = ("--var", f"namespace={observed.release.namespace}")
    command = [sys.executable, "-m", "services", "dashboards", *words, *variables]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    empty = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    print("\n" + done.stdout + "\n".join(empty))
    assert [line for line in empty if not _needs(line)] == []


def _needs(line: str) -> str | None:
    """What a panel shows that is not here, if that is why it is empty."""
    known = {
        "gpu": "a GPU",
        "graph": "a GPU",
        "shared memory": "processes of one machine",
        "lock-step": "that layout",
        "starts of processes": "`expertmesh serve`",
        "unreadable": "messages of another program",
        "requests that failed": "a request that failed for good",
        "rows sent again": "an expert worker that fails with rows under way, and a replica",
        "refused": "a bound that was reached",
        "calls that failed": "an expert worker that fails",
        "leases that ran out": "a worker whose end nobody noticed",
    }
    return next((place for word, place in known.items() if word in line.lower()), None)


def test_prometheus_has_taken_every_alert(observed: Observed) -> None:
    namespace, cluster = observed.release.namespace, observed.release.cluster
    written = cluster.items(namespace, "prometheusrules", "-l", f"app.kubernetes.io/instance={NAME}")
    names = {
        rule["alert"]
        for each in written
        for group in each["spec"]["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    assert len(names) > 15

    def taken() -> bool:
        groups = observed.get("rules")
        assert isinstance(groups, dict)
        rules = [rule for group in groups["groups"] if namespace in group["file"] for rule in group["rules"]]
        healthy = {rule["name"] for rule in rules if rule["health"] == "ok"}
        return names <= healthy

    until(taken, 60, "every rule was evaluated without an error")


def test_dashboards_are_where_grafana_looks(observed: Observed) -> None:
    namespace, cluster = observed.release.namespace, observed.release.cluster
    maps = cluster.items(namespace, "configmaps", "-l", "grafana_dashboard=1")
    boards = [json.loads(text) for each in maps for text in each["data"].values()]
    assert {"overview", "experts", "autoscaler"} <= {each["uid"].rpartition("-")[2] for each in boards}
    assert all(each["metadata"]["name"].startswith(PREFIX) for each in maps)
