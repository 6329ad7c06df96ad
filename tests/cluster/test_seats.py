"""Several attention workers in one pod, each with a seat for experts: they answer as recorded, by memory that they
share. Under load one of them is killed, a pod of two is, and one ends by SIGTERM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from testkit.kube.cluster import Cluster, until
from testkit.kube.release import WAIT, Release
from testkit.processes.servers import metric_sum

WORKERS = 2
SETTINGS = (
    *("layout=colocated", f"attention.workers={WORKERS}", "attention.colocated.shared=host"),
    *("attention.drainSeconds=20", "attention.resources.requests.cpu=20m", "attention.resources.limits.memory=4Gi"),
)
FIND = """
import os
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        words = open(f"/proc/{pid}/cmdline").read().split("\\0")
    except OSError:  # it has just ended
        continue
    if words[3:5] == ["expertmesh", "colocated"]:
        print(pid)
"""
KILL = "import os, signal, sys; os.kill(int(sys.argv[1]), signal.SIGKILL)"
ROWS = "expertmesh_experts_rows_total"
LEAD_S = 2.0
"""Time for requests to run before the disturbance."""

Pod = dict[str, Any]


def _set_up(release: Release, *settings: str) -> None:
    release.apply("upgrade", *SETTINGS, *settings, words=("--install", *WAIT))


@pytest.fixture(scope="module")
def release(cluster: Cluster) -> Iterator[Release]:
    """A release with one pod of workers."""
    with cluster.namespace("t-seats") as namespace:
        found = Release(cluster=cluster, namespace=namespace)
        _set_up(found)
        yield found


@pytest.fixture(scope="module")
def two_pods(release: Release) -> Release:
    """The release with two pods, each of which holds all shard groups."""
    _set_up(release, "attention.replicas=2")
    until(lambda: release.whole(2, "attention"), 60, "both pods are ready")
    return release


def _name(pod: Pod) -> str:
    return str(pod["metadata"]["name"])


def _workers(release: Release, pod: Pod) -> set[int]:
    """Numbers of the workers inside the pod."""
    return {int(line) for line in release.python(_name(pod), FIND).split()}


def _page(pod: Pod, name: str) -> httpx.Response | None:
    """The one of all workers of the pod; None where it does not answer."""
    try:
        return httpx.get(f"http://{pod['status']['podIP']}:9100/{name}", trust_env=False, timeout=10)
    except httpx.HTTPError:
        return None


def _ready(pod: Pod) -> bool:
    page = _page(pod, "ready")
    return page is not None and page.status_code == 200


def _series(pod: Pod, name: str, **labels: str) -> float:
    """Values of a series of all workers of the pod."""
    page = _page(pod, "metrics")
    return metric_sum(page.text, name, **labels) if page is not None and page.status_code == 200 else 0.0


def test_workers_of_a_pod_answer_as_recorded_by_memory_that_they_share(release: Release) -> None:
    release.answers_as_recorded(8)
    [pod] = release.pods("attention")
    assert len(_workers(release, pod)) == WORKERS
    shards = [str(group) for group in range(WORKERS)]
    until(lambda: all(_series(pod, ROWS, shard=shard) > 0 for shard in shards), 30, "each holds a share of the experts")
    until(lambda: _series(pod, "expertmesh_shared_steps_total") > 0, 30, "rows have gone through shared memory")


async def test_a_worker_that_is_killed_is_started_again_in_its_pod(release: Release) -> None:
    """No other worker has the experts that it held: steps of the other one wait for them."""
    [pod] = release.pods("attention")
    before = _workers(release, pod)
    victim, back = max(before), 0.0

    def kill() -> None:
        nonlocal back
        release.python(_name(pod), KILL, str(victim))
        back = until(lambda: len(_workers(release, pod) - {victim}) == WORKERS, 120, "another one has its place")
        back += until(lambda: _ready(pod), 240, "all workers of the pod are ready again")

    outcome = await release.under_load(kill, lead_s=LEAD_S, least=6)
    print(f"\none worker of {WORKERS} killed: ready again after {back:.0f} s; {outcome}")
    [after] = release.pods("attention")
    assert after["metadata"]["uid"] == pod["metadata"]["uid"]
    assert [each["restartCount"] for each in after["status"]["containerStatuses"]] == [0]
    assert before - {victim} < _workers(release, after), "the other one went on"


def test_pods_reach_the_seats_of_one_another_and_nothing_else(two_pods: Release) -> None:
    one, other = two_pods.pods("attention")
    pages = [9100 + page for page in range(WORKERS + 1)]
    seats = [7100 + seat for seat in range(WORKERS)]
    reached = [port for port in [*pages, *seats] if two_pods.reaches(_name(one), other["status"]["podIP"], port)]
    assert reached == seats


@pytest.mark.parametrize("how", [("--force", "--grace-period=0"), ()], ids=["killed", "ended"])
async def test_a_pod_of_two_goes_and_nothing_is_lost_or_changed(two_pods: Release, how: tuple[str, ...]) -> None:
    pods, back = two_pods.pods("attention"), 0.0
    name, uid = _name(pods[0]), pods[0]["metadata"]["uid"]

    def whole() -> bool:
        return two_pods.whole(2, "attention") and uid not in two_pods.uids()

    def remove() -> None:
        nonlocal back
        until(lambda: all(_series(pod, ROWS) > 0 for pod in pods), 60, "workers of both pods compute")
        two_pods.kubectl("delete", "pod", name, "--wait=false", *how)
        back = until(whole, 300, "another pod has its place, and is ready")

    outcome = await two_pods.under_load(remove, lead_s=LEAD_S, least=6)
    print(f"\none pod of two {'killed' if how else 'ended'}: whole again after {back:.0f} s; {outcome}")
